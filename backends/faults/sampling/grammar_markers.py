"""Faults of grammars behind a marker: their beginning, what they have read, what a budget counts."""

from dataclasses import replace

from specverify.backends.engine.guided.behind_marker import MatcherBehindMarker
from specverify.backends.engine.guided.guide import Guide, Masks, open_guide
from specverify.backends.engine.request import Request
from specverify.backends.engine.sampling.seams import SamplingSeams
from specverify.backends.faults.fault import in_place_of, scored_fault
from specverify.reference.tree import Shape


def waiting_matcher(guide: Guide | None) -> MatcherBehindMarker | None:
    """The matcher of a request whose grammar has not begun yet; None for every other request."""
    matcher = None if guide is None else guide.matcher
    return matcher if isinstance(matcher, MatcherBehindMarker) and not matcher.has_begun else None


@scored_fault(
    "grammar-asleep-inside-a-block",
    "vllm-project/vllm PR #44297; catalogue BZ-018: whether a grammar holds was decided once a step",
    "a grammar behind a marker, and a drafted marker with a node below it",
)
@in_place_of("sampling.masks")
def asleep_inside(sampling: SamplingSeams, guide: Guide, shape: Shape, token: list[int]) -> Masks:
    """All nodes of a tree have the mask of its root where the grammar has not begun there, marker or not."""
    right_masks = sampling.masks(guide, shape, token)
    if waiting_matcher(guide) is None:
        return right_masks
    return replace(right_masks, legal=right_masks.legal[:1].expand_as(right_masks.legal))


@scored_fault(
    "marker-missed-inside-a-block",
    "vllm-project/vllm issues #34650, #43388: the end of the reasoning is looked for in the last token of a step",
    "a grammar behind a marker, and a step that emits a token behind the marker",
)
@in_place_of("request")
class MissingMarkers(Request):
    """A grammar begins where the marker ends a block, and never where more tokens follow it in the same block."""

    def read_grammar(self, emitted: list[int], finish: str | None) -> tuple[list[int], str | None]:
        matcher = waiting_matcher(self.guide)
        if matcher is None or self.guide is None:
            return super().read_grammar(emitted, finish)
        unread = emitted[:-1]
        matcher.tokens += unread
        self.guide.read += len(unread)
        tokens, why = super().read_grammar(emitted[-1:], finish)
        return unread + tokens, why


@scored_fault(
    "grammar-begins-behind-its-block",
    "vllm-project/vllm PR #48516, issue #48228: tokens behind the marker in the same step never reach the grammar",
    "a grammar behind a marker, and a step that emits a token behind the marker",
)
@in_place_of("request")
class BeginningLate(Request):
    """The grammar begins with the step after the marker; what the marker's own step emitted behind it is not read."""

    def read_grammar(self, emitted: list[int], finish: str | None) -> tuple[list[int], str | None]:
        is_waiting = waiting_matcher(self.guide) is not None
        tokens, why = super().read_grammar(emitted, finish)
        grammar = self.case.sampling.grammar
        if is_waiting and waiting_matcher(self.guide) is None and why is None and grammar is not None:
            assert self.guide is not None
            late_guide = open_guide(grammar, self.case.stops.eos)
            assert isinstance(late_guide.matcher, MatcherBehindMarker)
            late_guide.matcher.has_begun = True
            self.guide = replace(late_guide, read=self.guide.read)
        return tokens, why


class StayingBegun(MatcherBehindMarker):
    """A matcher that has begun for good once a marker was pushed, also where the marker is taken back."""

    def pop(self) -> None:
        """See `Matcher`."""
        has_begun = self.has_begun
        super().pop()
        self.has_begun = has_begun


@scored_fault(
    "grammar-begun-by-a-rejected-marker",
    "family of vllm-project/vllm PR #44297: what the walk over drafted tokens has switched on is to be rolled back",
    "a grammar behind a marker, and a drafted marker that is rejected",
)
@in_place_of("sampling.masks")
def begun_by_rejected(sampling: SamplingSeams, guide: Guide, shape: Shape, token: list[int]) -> Masks:
    """A marker among the drafted tokens begins the grammar, whether it is accepted or not."""
    matcher = waiting_matcher(guide)
    if matcher is not None:
        # Only the class changes: what was read stays.
        matcher.__class__ = StayingBegun
    return sampling.masks(guide, shape, token)


class CountingDrafts(MatcherBehindMarker):
    """A matcher whose budget counts every token that was pushed, also those that were taken back."""

    pushed = 0

    def push(self, token: int) -> bool:
        """See `Matcher`."""
        is_legal = super().push(token)
        self.pushed += is_legal
        return is_legal

    def num_counted(self) -> int:
        """See `MatcherBehindMarker`."""
        return max(len(self.tokens), min(self.pushed, self.last_counted()))

    def last_counted(self) -> int:
        """The largest count at which a token of the marker is left to be forced."""
        return self.budget + len(self.markers[0]) - 1


@scored_fault(
    "budget-counts-drafted-tokens",
    "jundot/omlx PR #2617: each verified row counts against the thinking budget, accepted or not",
    "a grammar behind a marker with a budget, and a rejected node before the budget is used up",
)
@in_place_of("request")
class Spendthrift(Request):
    """The budget before the marker counts drafted tokens as well as emitted ones, and so is used up too early."""

    def prefill(self) -> None:
        matcher = waiting_matcher(self.guide)
        if matcher is not None:
            matcher.__class__ = CountingDrafts
        super().prefill()


class CountingSteps(MatcherBehindMarker):
    """A matcher whose budget counts blocks of tokens that are kept; tokens that were pushed since count one by one."""

    num_blocks = 0
    num_kept = 0

    def num_counted(self) -> int:
        """See `MatcherBehindMarker`."""
        last = self.budget + len(self.markers[0]) - 1
        return min(self.num_blocks + len(self.tokens) - self.num_kept, last)


@scored_fault(
    "budget-counted-in-steps",
    "family of vllm-project/vllm issue #39573: the thinking budget is not kept where a step accepts several tokens",
    "a grammar behind a marker with a budget, and a step that emits two tokens before the budget is used up",
)
@in_place_of("request")
class CountingOnceAStep(Request):
    """The budget before the marker counts steps, however many tokens each of them emits."""

    def prefill(self) -> None:
        matcher = waiting_matcher(self.guide)
        if matcher is not None:
            matcher.__class__ = CountingSteps
        super().prefill()

    def read_grammar(self, emitted: list[int], finish: str | None) -> tuple[list[int], str | None]:
        matcher = waiting_matcher(self.guide)
        result = super().read_grammar(emitted, finish)
        if isinstance(matcher, CountingSteps):
            matcher.num_blocks += 1
            matcher.num_kept = len(matcher.tokens)
        return result
