"""Faults of drafts whose pages have another size than the target's."""

from dataclasses import replace

import torch
from torch import Tensor

from specverify.backends.engine.handover.state import RequestState
from specverify.backends.engine.kv.arena import Arena, CacheLease, CacheNeeds, Model
from specverify.backends.engine.kv.base import Pair
from specverify.backends.engine.kv.paged import Paged, Pool
from specverify.backends.engine.request import Request
from specverify.backends.engine.seams import Seams
from specverify.backends.engine.uploads import upload
from specverify.backends.faults.fault import committed_fault, drafted_fault, in_place_of
from specverify.reference.layout import KvLayout
from specverify.reference.trace import Step


class PagedByOtherSize(Paged):
    """A paged cache whose rows are written to slots counted in pages of another size, and read from the right ones.

    Attributes:
        other_size: Columns of a page by which slots are counted; 0 for the right size.
    """

    other_size: int = 0

    def put(self, layer: int, begin: int, pair: Pair) -> None:
        """Write keys and values into the slots of columns `begin` on."""
        if not self.other_size:
            super().put(layer, begin, pair)
            return
        for cells, rows in zip(self.pool.layers[layer], pair, strict=True):
            flat = cells.flatten(0, 1)
            # A device writes wherever a slot says; here it stays inside the pool.
            flat[self.other_slots(begin, begin + rows.shape[-2], flat.device) % len(flat)] = rows.transpose(0, 1)

    def other_slots(self, begin: int, end: int, device: torch.device) -> Tensor:
        """The slots of the columns `begin` to `end` as pages of the other size would have them."""
        size, table = self.other_size, self.blocks.table
        slots = [table[min(column // size, len(table) - 1)] * size + column % size for column in range(begin, end)]
        return upload(torch.tensor(slots, dtype=torch.long), device)


@drafted_fault(
    "draft-slots-by-targets-page-size",
    "vLLM pull request 31540: the draft's slot mapping is computed with the block size of another KV cache group",
    "a draft whose pages have another size than the target's, and columns behind its first page",
)
def slots_by_targets_size(seams: Seams) -> Seams:
    """The draft's rows are written to slots that are counted in pages of the target's size."""

    class CountingArena(Arena):
        def _counted(self, lease: CacheLease) -> CacheLease:
            if lease.draft_blocks is not None and isinstance(lease.draft, PagedByOtherSize):
                lease.draft.other_size = self.layout.page_size
            return lease

        def paged(self, needs: CacheNeeds) -> CacheLease:
            return self._counted(super().paged(needs))

        def with_draft(self, lease: CacheLease, needs: CacheNeeds) -> CacheLease:
            return self._counted(super().with_draft(lease, needs))

    return replace(seams, arena=CountingArena, kv=replace(seams.kv, paged=PagedByOtherSize))


@drafted_fault(
    "draft-begins-where-target-does",
    "TensorRT-LLM pull request 5448: tokens that the target's KV cache knows count as the draft's too",
    "a prefix cache that knows more columns of the target than of a draft with pages of its own",
)
@in_place_of("arena")
class AsFarAsTarget(Arena):
    """A draft begins behind as many columns as its target knows, although its own pages hold fewer."""

    def paged(self, needs: CacheNeeds) -> CacheLease:
        lease = super().paged(needs)
        if lease.draft_blocks is not None and lease.draft is not None:
            lease.draft.length = max(lease.draft.length, lease.target.length - lease.rows_lead)
        return lease


@drafted_fault(
    "handed-over-without-draft-pages",
    "TensorRT-LLM pull request 17371: pages of a separate draft KV cache are left out of a transfer",
    "a draft model with pages of its own; a hand-over of its request, then a step",
)
@in_place_of("request")
class WithoutDraftPages(Request):
    """A hand-over leaves the pages of the draft's own pool out; the receiver takes its empty ones for filled."""

    def carry_on(self, state: RequestState, steps: list[Step]) -> None:
        if self.lease.draft_blocks is not None and state.draft is not None:
            keys, values = (
                tuple(torch.zeros_like(columns) for columns in pair) for pair in (state.draft.keys, state.draft.values)
            )
            state = replace(state, draft=replace(state.draft, keys=keys, values=values))
        super().carry_on(state, steps)


class View(Pool):
    """Pages of another size in the memory of a pool."""

    def __init__(self, pool: Pool, size: int) -> None:
        self.latent, self.index_widths, self.sources = pool.latent, pool.index_widths, pool.sources
        self.codec = pool.codec
        self.layers = []
        for pair in pool.layers:
            flat = [cells.flatten(0, 1) for cells in pair]
            pages = len(flat[0]) // size
            keys, values = (cells[: pages * size].view(pages, size, *cells.shape[1:]) for cells in flat)
            self.layers.append((keys, values))


@committed_fault(
    "draft-pages-overlap-targets",
    "vLLM pull request 41657: KV cache tensors shared between layers with unlike block sizes",
    "a target that drafts for itself in pages of another size",
)
@in_place_of("arena")
class OneMemory(Arena):
    """The draft's pages of another size lie in the memory of the target's pool, whose pages they overlap.

    Both allocators hand out ids from 0 on.
    """

    _pools_of_both: dict[Model, tuple[Pool, Pool]]

    def set_drafts_apart(self, layout: KvLayout, pages: int) -> None:
        self._pools_of_both = {}
        super().set_drafts_apart(replace(layout, pages=layout.pages[::-1] or tuple(range(pages))), pages)

    def pool(self, model: Model, role: str, needs: CacheNeeds) -> Pool:
        if needs.draft is not needs.target or model is not needs.target or not self.has_own_pages(needs):
            return super().pool(model, role, needs)
        if model not in self._pools_of_both:
            # The memory has room for all pages of either size.
            columns = self.draft_pages.total * self.draft_layout.page_size
            pages = max(self.pages.total, -(-columns // self.layout.page_size))
            memory = Pool(self.room(model, needs.capacity, needs.rows), pages, self.layout.page_size)
            self._pools_of_both[model] = memory, View(memory, self.draft_layout.page_size)
        target_pool, draft_pool = self._pools_of_both[model]
        return draft_pool if role == "draft" else target_pool
