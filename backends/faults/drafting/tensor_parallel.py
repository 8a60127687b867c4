"""Faults of tensor parallelism, with the second rank simulated in this process.

The second rank accepts by coins of its own, or a rank indexes its part of the head by ids of the whole head.
"""

from dataclasses import replace
from typing import Any

import torch
from torch import Tensor

from specverify.backends.engine.draft.language_model import ModelDraft
from specverify.backends.engine.kv.base import KvCache
from specverify.backends.engine.model.causal_lm import CausalLm
from specverify.backends.engine.request import Request
from specverify.backends.engine.sampling.step import StepSampling
from specverify.backends.engine.seams import Seams
from specverify.backends.faults.fault import committed_fault, drafted_fault, in_place_of_draft

RANKS = 2
"""The number of simulated ranks."""


@committed_fault(
    "ranks-draw-their-own-coins",
    "vllm-project/vllm issue #17498, PR #17509; catalogue BZ-013: each rank accepts another number of tokens",
    "a request that samples, and an accepted node that other coins would not accept in that place",
)
def coins_of_each_rank(seams: Seams) -> Seams:
    """Each rank accepts by coins of its own: KV heads of the second keep other rows than those that were emitted.

    The second rank holds the later half of the KV heads, and keeps there the rows that it accepts itself.
    """

    class RequestOfRanks(Request):
        def settle(self, flat: Tensor, heads: list[Tensor]) -> None:
            right = self.seams
            block = self.block
            assert block is not None
            if block.chance is not None and block.chance.samples:
                tree = block.proposal.tree
                proposal = block.proposal.proposal
                logits = right.score(flat, block.index)
                path_of_second_rank = self._of_second_rank().accept(tree, logits, proposal)[0]
                self.seams = replace(right, commit=lambda cache, path: apart(cache, path, path_of_second_rank))
            super().settle(flat, heads)
            self.seams = right

        def _of_second_rank(self) -> StepSampling:
            # Without the tape, whose coins would be the same on both ranks.
            sampling = replace(self.case.sampling, tape=(), seed=self.case.sampling.seed + 1)
            case = replace(self.case, sampling=sampling)
            return StepSampling(case, self.device_output, self.coined_steps, self.target.device, self.seams.sampling)

    def apart(cache: KvCache, path: list[int], path_of_second_rank: list[int]) -> str | None:
        # As long as `path`: the lengths are those of the first rank.
        rows = [*path_of_second_rank[: len(path)], *path[len(path_of_second_rank) :]]
        for layer in range(cache.layers):
            block = cache.block(layer)
            for cells in block:
                first = len(cells) // RANKS
                cells[first:, path] = cells[first:, rows]
            cache.amend(layer, *block)
        return seams.commit(cache, path)

    return replace(seams, request=RequestOfRanks)


class ShardedHead:
    """A causal model of whose head one rank holds a part; the score of an id is that of its row in the part."""

    def __init__(self, model: CausalLm) -> None:
        self._model = model

    def __getattr__(self, name: str) -> Any:
        return getattr(self._model, name)

    def append(self, *args: Any, **kwargs: Any) -> Tensor:
        """As `CausalLm.append`."""
        return self._local(self._model.append(*args, **kwargs))

    def forward(self, *args: Any, **kwargs: Any) -> list[Tensor]:
        """As `CausalLm.forward`."""
        return [self._local(logits) for logits in self._model.forward(*args, **kwargs)]

    def _local(self, logits: Tensor) -> Tensor:
        vocab = logits.shape[-1]
        # The part of one rank, rounded up.
        rows_of_rank = -(-vocab // RANKS)
        return logits[..., torch.arange(vocab, device=logits.device) % rows_of_rank]


@drafted_fault(
    "token-map-over-sharded-head",
    "sgl-project/sglang issue #4328, PR #6849; catalogue BZ-152: hot-token map indexes a sharded head",
    "a draft model with a vocabulary of its own",
)
@in_place_of_draft
class MapOverShard(ModelDraft):
    """The ids of a reduced vocabulary index one rank's part of the head as if it were the whole one."""

    def catch_up(self, tokens: list[int]) -> Tensor:
        if len(self.named_ids) < self.causal_lm.model.config.vocab_size and isinstance(self.causal_lm, CausalLm):
            self.causal_lm = ShardedHead(self.causal_lm)  # type: ignore[assignment]  # all that a draft asks of one
        return super().catch_up(tokens)
