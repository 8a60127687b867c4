"""Faults of a server that runs a step ahead of its host.

What belongs to a launched step is kept, counted, read or freed by the wrong measure: the host's or the device's. Or
the host, which may read tokens only when a launch is resolved, works with what it has not read yet.
"""

from collections.abc import Callable
from dataclasses import replace
from functools import partial
from weakref import WeakSet

from torch import Tensor

from specverify.backends.engine.kv.arena import Arena, CacheLease
from specverify.backends.engine.kv.pages import Blocks
from specverify.backends.engine.overlap import Frame, Futures, LaunchedRow, Place
from specverify.backends.engine.request import Request
from specverify.backends.engine.sampling.forest import Forest
from specverify.backends.engine.sampling.processing import History
from specverify.backends.engine.seams import Seams
from specverify.backends.engine.step.state import Emission, Verification
from specverify.backends.faults.fault import (
    attended_fault,
    committed_fault,
    drafted_fault,
    emitted_fault,
    in_place_of,
    lowered_fault,
    scored_fault,
)
from specverify.backends.faults.serving.overlap import Hollow
from specverify.reference.draft import Draft, largest_tree_size
from specverify.reference.sampling import Sampling, Stops
from specverify.reference.trace import Committed


@lowered_fault(
    "placeholders-in-lookup",
    "vllm-project/vllm PR #40768: -1 placeholders survive on the way to the model; PR #24799: n-grams need the tokens",
    "a request whose draft looks text up, launched while a step of it with an accepted token is in flight",
)
def placeholders_in_lookup(seams: Seams) -> Seams:
    """The lookup of a step that is launched ahead reads placeholders; only the newest is replaced, by the root.

    The other tokens of the block in flight stay numbers below 0, in the text that the draft reads.
    """

    class UnfilledRequest(seams.request):  # type: ignore[misc,name-defined]
        fill: Callable[[list[int]], list[int]]

        def propose(self) -> None:
            if self.draft.cache is None and self.draft.reads is None:
                self.fill = partial(root_alone, self.fill)
            super().propose()

    def root_alone(fill: Callable[[list[int]], list[int]], tokens: list[int]) -> list[int]:
        read_tokens: list[int] = []
        for token in tokens:
            block = fill([token])
            read_tokens += [token] * (len(block) - 1) + block[-1:]
        return read_tokens

    return replace(seams, request=UnfilledRequest)


@emitted_fault(
    "end-told-a-step-late",
    "sgl-project/sglang-omni PR #590, #758: a request that ended in the frame before stays in the planned batch",
    "a request that ends in a session with launched steps, and takes part in a later action",
)
@in_place_of("request")
class EndsLate(Request):
    """The end of a request reaches the scheduler a step late: in between the request is planned once more.

    The output is cut rightly where it ends; what the next step emits comes behind the end.
    """

    silent = False

    def record(self, verdict: Verification, emission: Emission, committed: Committed) -> None:
        Request.record(self, verdict, emission, committed)
        # A request that was never launched has `list` there.
        if emission.finish is not None and self.fill is not list and not self.silent:
            self.silent = True
            self.finish = None


@attended_fault(
    "reservation-of-one-step",
    "family of catalogue BZ-083: device writes run ahead of the allocated capacity (NVIDIA/TensorRT-LLM PR #16280)",
    "pages, and a launch whose predecessor in flight has accepted rows and whose block crosses into another page",
)
@in_place_of("arena")
class OneBlock(Arena):
    """A launch reserves pages for one block beyond the length that the host knows, which is a step old.

    The device is up to a block further: its rows lie behind the reserved columns.
    """

    def reserved_columns(self, draft: Draft) -> int:
        return super().reserved_columns(draft) // 2


@attended_fault(
    "reservation-of-the-tree-alone",
    "family of sgl-project/sglang, get_alloc_len_per_decode: max(top-k x steps, draft tokens) columns for a step",
    "pages of few columns, and a launch whose draft opens more rows than its tree has nodes: a dynamic one, or a block",
)
@in_place_of("arena")
class TreeAlone(Arena):
    """A launch reserves pages for the nodes of two trees, and the draft writes the columns of more candidates."""

    def reserved_columns(self, draft: Draft) -> int:
        return 2 * max(largest_tree_size(draft), self.layout.padded_nodes)


@committed_fault(
    "host-length-on-device",
    "family of catalogue BZ-057: host seq_lens are not those of the device (vllm-project/vllm-ascend PR #8461)",
    "a launch while a step of the request is in flight",
)
@in_place_of("request")
class HostLength(Request):
    """A step that is launched ahead is lowered at the length that the host knows, which lacks the step in flight."""

    def propose(self) -> None:
        if len(self.tokens) > len(self.resolved_tokens):
            self.lease.target.crop(len(self.resolved_tokens) - 1)
        super().propose()


@emitted_fault(
    "overrun-emitted",
    "sgl-project/sglang, overlapped scheduling: a finished request runs once more, and its results must be skipped",
    "a request that ends while a step of it is in flight",
)
@in_place_of("futures")
class OverToo(Futures):
    """The step that a request ran after its end counts: its tokens are emitted behind the end."""

    def is_counted(self, part: LaunchedRow, epoch: int, over: bool) -> bool:
        return part.place.epoch == epoch


@emitted_fault(
    "launched-block-not-cut",
    "family of catalogue BZ-027: slots that do not count are emitted",
    "a launched step with an end before its last accepted token",
)
@in_place_of("request")
class Uncut(Request):
    """A launched block in which the output ends is emitted whole: the host looks for an end, but cuts nothing.

    The reason to end is right, and the tokens behind it are part of the text.
    """

    def emit_launched(self, part: LaunchedRow) -> Emission:
        emission = super().emit_launched(part)
        verdict = part.verdict
        if len(emission.tokens) < len(verdict.accepted):
            logprobs = self.seams.logprobs(verdict.logits)[verdict.path, verdict.accepted].tolist()
            part.emission = Emission(verdict.accepted, emission.finish, tuple(logprobs))
        return part.emission or emission


@emitted_fault(
    "stale-frame-kept",
    "vllm-project/vllm issue #48245: output in flight at a preemption is counted afterwards",
    "a request that is evicted with a step in flight",
)
@in_place_of("futures")
class StaleToo(Futures):
    """Results that were in flight when their request was evicted count when they are resolved."""

    def is_counted(self, part: LaunchedRow, epoch: int, over: bool) -> bool:
        return not over


@emitted_fault(
    "results-routed-by-row",
    "sgl-project/sglang FutureMap by batch row; of the family of catalogue BZ-136: one row stands for another",
    "two steps in flight whose batches have unlike requests in one row",
)
@in_place_of("futures")
class ResultsByRow(Futures):
    """The host reads the tokens of a frame by row in the results that were written last: another request's, mostly."""

    def results(self, part: LaunchedRow, launched: Frame) -> list[int]:
        row = part.place.row
        right = super().results(part, launched)
        return right if row >= len(launched.parts) else launched.parts[row].verdict.accepted


@drafted_fault(
    "future-tokens-by-row",
    "sgl-project/sglang FutureMap by batch row: a row that another batch has overwritten",
    "a request whose row another request took in a later launch, before its own next launch",
)
@in_place_of("futures")
class BlocksByRow(Futures):
    """The device keeps one block of unknown tokens for each row of the batch: a later launch overwrites another's."""

    def put(self, place: Place, tokens: list[int]) -> None:
        super().put(place, tokens)
        row = [key for key in self.blocks if self.rows.get(key) == place.row]
        self.rows[place.number, place.placeholder] = place.row
        for key in row:
            self.blocks[key] = list(tokens)

    @property
    def rows(self) -> dict[tuple[int, int], int]:
        """The row of each block."""
        rows_by_key: dict[tuple[int, int], int] = self.__dict__.setdefault("row_of", {})
        return rows_by_key


@committed_fault(
    "reservation-not-freed",
    "sgl-project/sglang PR #12224: only committed KV is released, and what was allocated ahead leaks",
    "pages, and a request that leaves after a launch ahead of the host",
)
def reservation_not_freed(seams: Seams) -> Seams:
    """A request that leaves gives back the pages of its committed columns, and keeps those reserved for launches ahead.

    Pages are freed up to the committed length, not up to the allocated one.
    """
    ahead: WeakSet[Blocks] = WeakSet()

    class ReservingRequest(seams.request):  # type: ignore[misc,name-defined]
        def propose(self) -> None:
            if len(self.tokens) > len(self.resolved_tokens) and self.lease.blocks is not None:
                ahead.add(self.lease.blocks)
            super().propose()

    class Short(seams.arena):  # type: ignore[misc,name-defined]
        def give_back(self, lease: CacheLease, tokens: tuple[int, ...] = ()) -> None:
            if lease.blocks is not None and lease.blocks in ahead:
                del lease.blocks.table[-(-lease.target.length // lease.blocks.size) :]
            super().give_back(lease, tokens)

    return replace(seams, arena=Short, request=ReservingRequest)


@committed_fault(
    "grammar-reads-frame-twice",
    "vllm-project/vllm issue #29821; sgl-project/sglang: a grammar is advanced before the next mask and at resolution",
    "a request with a grammar that is launched while a step of it is in flight",
)
@in_place_of("request")
class Rereading(Request):
    """The grammar reads the tokens of a frame before the masks of the next launch, and again when it is resolved."""

    def emit_launched(self, part: LaunchedRow) -> Emission:
        was_emitted = part.emission is not None
        emission = super().emit_launched(part)
        if was_emitted:
            self.read_grammar(list(emission.tokens), None)
        return emission


@scored_fault(
    "penalties-without-flying-tokens",
    "vllm-project/vllm issues #27878, #52461: penalties read the token ids of a step ago",
    "a request that samples under penalties or bad words, launched while a step of it is in flight",
)
def stale_penalties(seams: Seams) -> Seams:
    """The target's penalties of a step that is launched ahead read the output that the host knows.

    Tokens in flight count as if they were not there; drafts are penalised rightly.
    """
    right = seams.sampling

    class BehindRequest(seams.request):  # type: ignore[misc,name-defined]
        @property
        def device_output(self) -> tuple[int, ...]:
            output = super().device_output
            num_known = len(self.resolved_tokens) - len(self.case.prompt)
            if self.case.sampling.greedy:
                return tuple(output)
            # A token below 0 is one that the host does not have: -1 - token.
            return (*output[:num_known], *(-1 - token for token in output[num_known:]))

    def history(
        trees: Forest, prompt: tuple[int, ...], output: tuple[int, ...], sampling: Sampling, vocab: int
    ) -> History:
        true_output = tuple(token if token >= 0 else -1 - token for token in output)
        past = right.history(trees, prompt, true_output, sampling, vocab)
        if true_output == output:
            return past
        known_tokens = tuple(token for token in output if token >= 0)
        return Hollow(**vars(past), patched_history=right.history(trees, prompt, known_tokens, sampling, vocab))

    def law(logits: Tensor, sampling: Sampling, stops: Stops, past: History | None) -> Tensor:
        history = replace(past.patched_history, legal=past.legal) if isinstance(past, Hollow) else past
        return right.target_law(logits, sampling, stops, history)

    sampling = replace(right, history=history, target_law=law, bonus_law=law)
    return replace(seams, request=BehindRequest, sampling=sampling)


@committed_fault(
    "accept-length-with-bonus",
    "SGLang with overlap: the accepted length rises from 2.59 to 2.9 though model, draft and seed are the same",
    "a step that was launched ahead of its results",
)
@in_place_of("request")
class CountsBonus(Request):
    """The accepted length of a launched step is read a token too late, behind the target's own token.

    Texts are right, and every launched step seems to accept a drafted token more.
    """

    is_launched = False

    def emit_launched(self, part: LaunchedRow) -> Emission:
        self.is_launched = True
        return Request.emit_launched(self, part)

    def record(self, verdict: Verification, emission: Emission, committed: Committed) -> None:
        Request.record(self, verdict, emission, committed)
        if self.is_launched:
            self.counters.lengths[-1] = len(verdict.path)
        self.is_launched = False
