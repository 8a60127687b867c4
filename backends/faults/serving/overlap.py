"""Faults of overlapped scheduling, which plans a step before the last one returns.

The plan then misses tokens, the root or the number of accepted rows.
"""

from dataclasses import dataclass, field, replace
from weakref import WeakKeyDictionary

from torch import Tensor

from specverify.backends.engine.kv.base import KvCache
from specverify.backends.engine.model.causal_lm import Rows
from specverify.backends.engine.request import Request
from specverify.backends.engine.sampling.forest import Forest
from specverify.backends.engine.sampling.processing import History
from specverify.backends.engine.seams import Seams
from specverify.backends.faults.fault import attended_fault, lowered_fault, scored_fault
from specverify.reference.sampling import Sampling, Stops

PLACEHOLDER = -1
"""The value of an output slot whose token has not returned."""


@dataclass(frozen=True)
class Hollow(History):
    """A history, with the history of an output in which some placeholders were never replaced."""

    patched_history: History


@scored_fault(
    "history-slots-left-as-placeholders",
    "vllm-project/vllm PR #30122; catalogue BZ-019: async scheduling replaces only the last placeholder",
    "a request that samples under penalties or bad words, after a step that accepted a token",
)
def last_slot_patched(seams: Seams) -> Seams:
    """Only the last of a block's placeholders in the output is replaced: penalties do not see the tokens before it."""
    right = seams.sampling

    class PatchedRequest(Request):
        @property
        def device_output(self) -> tuple[int, ...]:
            output = super().device_output
            if self.case.sampling.greedy:
                return output
            # A token below 0 is one that the scheduler does not have: -1 - token.
            patched_output = [-1 - token for token in output]
            end = 0
            for step in self.steps:
                assert step.emitted is not None
                end += len(step.emitted.tokens)
                patched_output[end - 1] = output[end - 1]
            return tuple(patched_output)

    def history(
        trees: Forest, prompt: tuple[int, ...], output: tuple[int, ...], sampling: Sampling, vocab: int
    ) -> History:
        true_output = tuple(token if token >= 0 else -1 - token for token in output)
        past = right.history(trees, prompt, true_output, sampling, vocab)
        if true_output == output:
            return past
        # vLLM pads token lists with the vocabulary's size and counts one id more than there are.
        padded_output = tuple(max(token, -1) % (vocab + 1) for token in output)
        partial = right.history(trees, prompt, padded_output, sampling, vocab + 1)

        def sequence(request: int, node: int) -> tuple[int, ...]:
            return tuple(PLACEHOLDER if token == vocab else token for token in partial.sequence(request, node))

        patched_history = replace(
            partial, seen_tokens=partial.seen_tokens[..., :vocab], counts=partial.counts[..., :vocab], sequence=sequence
        )
        return Hollow(**vars(past), patched_history=patched_history)

    def law(logits: Tensor, sampling: Sampling, stops: Stops, past: History | None) -> Tensor:
        history = replace(past.patched_history, legal=past.legal) if isinstance(past, Hollow) else past
        return right.target_law(logits, sampling, stops, history)

    sampling = replace(right, history=history, target_law=law, bonus_law=law)
    return replace(seams, request=PatchedRequest, sampling=sampling)


@dataclass
class Pipeline:
    """The number of planned forwards, and for each request the last forward that it was in."""

    forwards: int = 0
    # Weak keys, so that a finished request does not stay in memory.
    last: "WeakKeyDictionary[Request, int]" = field(default_factory=WeakKeyDictionary)


@lowered_fault(
    "root-still-in-flight",
    "vllm-project/vllm issue #52071, PR #52179; catalogue BZ-028: a step runs before its anchor token has returned",
    "a request in two forwards in a row, with a draft in the second",
)
def root_in_flight(seams: Seams) -> Seams:
    """A drafted step is planned before the token of the last one has returned: token 0 is embedded as its root."""
    pipeline = Pipeline()

    def gather(batch: list[Request]) -> list[Rows]:
        pipeline.forwards += 1
        for request in batch:
            assert request.block is not None
            has_draft = len(request.block.proposal.tree) > 1
            # The token of the last forward is in flight only if the request took part in that forward.
            if has_draft and pipeline.last.get(request) == pipeline.forwards - 1:
                request.block.tensors.token[0] = 0
            pipeline.last[request] = pipeline.forwards
        return seams.gather(batch)

    return replace(seams, gather=gather)


@attended_fault(
    "lengths-before-rejection",
    "vllm-project/vllm-ascend PR #8461; catalogue BZ-057: host seq_lens not corrected for rejected tokens",
    "a step after one with a rejected row",
)
def lengths_before_rejection(seams: Seams) -> Seams:
    """The length that attention gets takes each row of the last step for accepted, and the mask begins behind them."""
    num_rejected: WeakKeyDictionary[KvCache, int] = WeakKeyDictionary()

    def commit(cache: KvCache, path: list[int]) -> str | None:
        num_rejected[cache] = cache.rows - len(path)
        return seams.commit(cache, path)

    class Ahead(seams.kv.lanes):  # type: ignore[misc,name-defined]
        def masks(self, layer: int, visible: list[Tensor]) -> Tensor:
            moved_masks = [self._move_prefix_end(cache, mask) for cache, mask in zip(self.caches, visible, strict=True)]
            masks: Tensor = super().masks(layer, moved_masks)
            return masks

        def _move_prefix_end(self, cache: KvCache, mask: Tensor) -> Tensor:
            begin = cache.length
            columns = mask.shape[1]
            end = min(begin + num_rejected.get(cache, 0), columns)
            moved_mask = mask.clone()
            moved_mask[:, begin:end] = True
            moved_mask[:, end:] = mask[:, begin : begin + columns - end]
            return moved_mask

    return replace(seams, commit=commit, kv=replace(seams.kv, lanes=Ahead))
