"""Faults of heads behind known pages: the states that a hit brings, and the rows that it counts."""

import torch
from torch import Tensor

from specverify.backends.engine.draft.head import HeadDraft
from specverify.backends.engine.kv.arena import Arena, CacheLease, CacheNeeds
from specverify.backends.engine.kv.state_pages import StatePages
from specverify.backends.faults.fault import drafted_fault, in_place_of, in_place_of_draft


@drafted_fault(
    "hit-without-states",
    "sgl-project/sglang PR #21125: known pages skip the target's prefill, and the draft lacks the states it would give",
    "a prefix cache whose pages carry states, and a head that begins with known pages",
)
@in_place_of("kv.state_pages")
class WithoutStates(StatePages):
    """A hit brings keys and values alone, and the head reads zeros where the states of known columns belong."""

    def read(self, end: int) -> Tensor:
        return torch.zeros_like(super().read(end))


@drafted_fault(
    "states-of-another-prompt",
    "sgl-project/sglang PR #30177, review: behind a hit the offset of states is off, and a request reads another's row",
    "a prefix cache whose pages carry states, and a hit after another request has written the same columns",
)
@in_place_of("kv.state_pages")
class ByColumn(StatePages):
    """States stand in one buffer by their columns, whichever request they are of, and a hit reads the latest there."""

    def write(self, begin: int, states: Tensor) -> None:
        self.cells[begin : begin + len(states)] = states

    def read(self, end: int) -> Tensor:
        return self.cells[:end].clone()


@drafted_fault(
    "states-one-page-late",
    "vllm-project/vllm PR #43650: at a hit one cache group counts a block that another has dropped",
    "a prefix cache whose pages carry states, and a hit of two pages",
)
@in_place_of("kv.state_pages")
class PageBefore(StatePages):
    """A hit reads the states of each page from the page before it; those of the first page stay."""

    def read(self, end: int) -> Tensor:
        states = super().read(end)
        size = self.blocks.size
        return torch.cat([states[:size], states[: max(end - size, 0)]])[:end]


@drafted_fault(
    "known-row-keeps-old-next-token",
    "vllm-project/vllm issue #50438: the draft's last row of a page depends on the token behind the page",
    "a prefix cache, a head whose first token has no row, and a prompt that parts from a known one at a page's end",
)
@in_place_of("arena")
class WholePages(Arena):
    """The last row of known pages is taken as it is, though it holds the token with which the earlier text went on."""

    def known_columns(self, reused: int, needs: CacheNeeds) -> tuple[int, int]:
        return super().known_columns(reused, needs)[0], reused


@drafted_fault(
    "suffix-fused-as-first-token",
    "arXiv 2508.08192, section 3.4: the first token of a prompt alone is fused with its own hidden state",
    "a prefix cache, and a head whose first token has a row, which begins with known pages",
)
@in_place_of_draft
class FusedAgain(HeadDraft):
    """The first row behind known pages stands beside the state of its own token, as the first of a prompt does.

    The root has no state yet: if its row is the first one, it keeps the state of the token before.
    """

    def row_states(self, hidden: Tensor, first: int, last: int) -> Tensor:
        states = super().row_states(hidden, first, last)
        if self.words.fuses_first and first and first == self.adopted and first < len(hidden):
            states = torch.cat([hidden[first : first + 1], states[1:]])
        return states


@drafted_fault(
    "draft-evicted-apart-from-target",
    "sgl-project/sglang issue #16964: the target's pages are there again, and the draft's half of them is not",
    "a prefix cache, and a head that begins with pages of a request before the last one",
)
@in_place_of("arena")
class DraftOfTheLast(Arena):
    """The draft's half of known pages is kept for the last request that left, and a hit counts the target's half.

    What lies in the draft's half of older pages was overwritten.
    """

    def give_back(self, lease: CacheLease, tokens: tuple[int, ...] = ()) -> None:
        pages = [] if lease.blocks is None else list(lease.blocks.table)
        super().give_back(lease, tokens)
        older_pages = [] if self.prefix is None else [page for page in self.prefix.cached_pages if page not in pages]
        for pool in self.draft_pools.values() if tokens and older_pages else ():
            pool.fill(older_pages, 0.0)
