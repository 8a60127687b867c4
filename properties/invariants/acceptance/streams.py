"""The invariant of random streams: two draws for different purposes read no number twice.

A draw of torch, NumPy or random has a place: its stream, its offset and its size (`specverify.reference.trace`). Coins
of a tape
have places too, one for each decision. Rejection sampling needs independent numbers: where the coin of an acceptance is
the number that drew the token, or the noise that drew a rejected token draws its replacement, the output follows
another law than the target's.
"""

from bisect import bisect_left, insort
from collections.abc import Iterable, Iterator
from dataclasses import dataclass, field, replace

from specverify.properties.invariants.applies import is_sampled
from specverify.properties.verdict.finding import Comparisons, Finding
from specverify.properties.verdict.invariant import Fact, Invariant, NotApplicable, Oracle, Unobserved, needing
from specverify.properties.verdict.subject import NoTrace, Subject
from specverify.reference import tape
from specverify.reference.case import Case
from specverify.reference.trace import Draw, Stage, Trace

NAME = "acceptance.streams-disjoint"

FRAMES = 5
"""Most innermost frames of each draw that a finding shows."""

COINS = "the coins"
"""The beginning of the names of streams that a tape holds."""


def streams_disjoint(case: Case, oracle: Oracle, subject: Subject) -> Iterator[Fact]:
    """No draw reads a number that another purpose has read.

    Raises:
        NotApplicable: The engine promises the text that it gives without a draft. It then reads one number for the
            draft and for the target on purpose, and lossless.same-seed judges the promise.
        Unobserved: The engine's process drew nothing through torch, NumPy or random, and shows no coins.
    """
    if subject.abilities is not None and subject.abilities.same_seed:
        raise NotApplicable("numbers are shared by promise; lossless.same-seed judges it")
    draws = coin_draws(case, subject(case)) or _recorded_draws(case, subject)
    if not draws:
        raise Unobserved("nothing was drawn through torch, NumPy or random in the engine's process")
    yield Comparisons(len(draws) - 1)
    pair = first_reread(draws)
    if pair is not None:
        yield _finding(*pair)


def _recorded_draws(case: Case, subject: Subject) -> tuple[Draw, ...]:
    """The draws of a run of `case` that is watched."""
    # On several ranks each one reads the numbers that all of them read.
    if subject.watch is None or case.ranks > 1:
        return ()
    try:
        return subject.run_watched(case).draws or ()
    except NoTrace as no_trace:
        raise Unobserved("the run broke while its draws were watched") from no_trace


def coin_draws(case: Case, trace: Trace) -> tuple[Draw, ...]:
    """The coins of a tape that decided, each a draw of one number; empty where the backend shows none."""
    draws = []
    for step, trace_step in enumerate(trace.steps):
        coins = (trace_step.accepted.coins if trace_step.accepted is not None else None) or ()
        for number, place in enumerate(coins):
            coin = coin_in_words(place, case.most_nodes)
            draws.append(Draw(f"{COINS} of step {step}", place, 1, (f"decision {number}",), coin, step))
    return tuple(draws)


def coin_in_words(place: int, nodes: int) -> str:
    """The coin at `place` of a step: `the draft coin of node 1`, or `the bonus coin`."""
    kind, node = divmod(place, nodes)
    return f"the {tape.KINDS[kind]} coin" + (f" of node {node}" if place < 3 * nodes else "")


@dataclass
class Course:
    """The draws of one call site, which may go back to a place only if it lies behind the last beginning.

    An engine that keys its numbers by position reads those of a position again after a rejection that left the
    position open. Each of its steps settles at least one position, so that it never reads the place of the first draw
    of a step again. A generator that is seeded anew before each draw, or whose offset is frozen in a recorded graph,
    reads this very place.

    Attributes:
        order: The places in the order in which they were first read, each with its number.
        began: The number of the place where the course last began.
        last: The number of the place that was read last.
    """

    order: dict[tuple[str, int], int] = field(default_factory=dict)
    began: int = 0
    last: int = -1

    def follows(self, draw: Draw) -> bool:
        """Whether `draw` may follow; it is then the last one."""
        number = self.order.setdefault((draw.stream, draw.offset), len(self.order))
        goes_back = number <= self.last
        if goes_back and number <= self.began:
            return False
        if goes_back:
            self.began = number
        self.last = number
        return True


@dataclass
class Stream:
    """The draws of one stream so far.

    Attributes:
        draws: (offset, number of the draw), in the order of offsets.
        widest: The largest size of a draw.
    """

    draws: list[tuple[int, int]] = field(default_factory=list)
    widest: int = 0

    def near(self, draw: Draw) -> Iterable[int]:
        """The numbers of the earlier draws that may overlap `draw`."""
        first = bisect_left(self.draws, (draw.offset - self.widest, -1))
        end = bisect_left(self.draws, (draw.end, -1))
        return (number for _, number in self.draws[first:end])

    def add(self, draw: Draw, number: int) -> None:
        """Take one more draw."""
        insort(self.draws, (draw.offset, number))
        self.widest = max(self.widest, draw.size)


def first_reread(draws: tuple[Draw, ...]) -> tuple[Draw, Draw] | None:
    """The first draw that reads a number of another purpose: the earlier draw and this one; None where none does.

    Draws at different call sites have different purposes. Draws at one call site may go back as `Course` says.
    """
    streams: dict[str, Stream] = {}
    courses: dict[tuple[str, ...], Course] = {}
    for number, draw in enumerate(draws):
        if draw.size <= 0:
            continue
        stream = streams.setdefault(draw.stream, Stream())
        goes_on = courses.setdefault(draw.site, Course()).follows(draw)
        for earlier in sorted(stream.near(draw)):
            earlier_draw = draws[earlier]
            overlaps = earlier_draw.end > draw.offset
            if overlaps and (earlier_draw.site != draw.site or (not goes_on and earlier_draw.offset == draw.offset)):
                return earlier_draw, draw
        stream.add(draw, number)
    return None


def _finding(first: Draw, second: Draw) -> Finding:
    """The finding that `second` reads numbers that `first` had read."""
    where: dict[str, int | str] = {"side": "coin"}
    if second.stream.startswith(COINS):
        return Finding(NAME, Stage.ACCEPTED, second.step, where, "one decision", f"another by {second.call}")
    where = {"side": f"{_function(first)}, then {_function(second)}"}
    start, end = max(first.offset, second.offset), min(first.end, second.end)
    shared = replace(second, offset=start, size=end - start).numbers
    frames = (f"{first.call}, read first in", *first.site[-FRAMES:], f"{second.call}, again in", *second.site[-FRAMES:])
    return Finding(NAME, Stage.ACCEPTED, second.step, where, "numbers of its own", shared, said=frames)


def _function(draw: Draw) -> str:
    """The name of the function that drew, read off its innermost frame; the whole frame where it names none."""
    frame = draw.site[-1] if draw.site else "an unknown place"
    _, _, location = frame.partition(" in ")
    return location.partition(":")[0] or frame


INVARIANTS = (
    Invariant(
        NAME,
        "No two draws for different purposes read one random number.",
        needing(Stage.EMITTED),
        streams_disjoint,
        is_sampled,
    ),
)
