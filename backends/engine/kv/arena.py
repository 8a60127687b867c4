"""The arena: where the caches of all requests of an engine come from and go back to, whatever their layout."""

from collections.abc import Sequence
from dataclasses import dataclass, replace
from typing import Protocol

from backends.base import Unsupported
from backends.engine.kv.base import CacheSpec, KvCache, Poison
from backends.engine.kv.layouts import CACHES
from backends.engine.kv.paged import Pool
from backends.engine.kv.pages import Blocks
from backends.engine.kv.seams import KvSeams
from reference.layout import KvLayout

LARGE = 3e4
"""Finite in every working dtype, and far from any key or value."""


class Model(Protocol):
    """A model that needs caches."""

    def room(self, capacity: int, rows: int) -> CacheSpec:
        """The sizes that a cache of this model must know."""
        ...


@dataclass
class CacheLease:
    """The caches of one request: target, draft (if it has a model), and the block table that both share.

    Attributes:
        owner: Whose pages they may be in the prefix cache: requests with the same draft model.
        reused: Columns that came from the prefix cache, or from a fork.
    """

    target: KvCache
    draft: KvCache | None = None
    blocks: Blocks | None = None
    owner: object = None
    reused: int = 0

    @property
    def caches(self) -> list[KvCache]:
        """One or two."""
        return [self.target] if self.draft is None else [self.target, self.draft]


class Arena:
    """Makes caches of one layout; with pages, one pool per model and role, one allocator for all of them."""

    def __init__(self, layout: KvLayout, pages: int = 0, seams: KvSeams | None = None) -> None:
        self.layout = layout
        self._seams = seams or KvSeams()
        self._pools: dict[tuple[Model, str], Pool] = {}
        self.pages = self._seams.pages(layout.pages or range(pages))
        self.prefix = self._seams.prefix(self.pages, layout.page_size) if layout.traits.keeps_prefixes else None

    def lease(
        self, target: Model, draft: Model | None, capacity: int, rows: int, tokens: tuple[int, ...] = ()
    ) -> CacheLease:
        """Caches for a request that will prefill `tokens`, empty but for what the prefix cache knows of them."""
        if self.layout.traits.pages:
            return self._paged(target, draft, capacity, rows, tokens)
        small = None if draft is None else self._plain(draft.room(capacity, rows))
        return CacheLease(self._plain(target.room(capacity, rows)), small, owner=draft)

    def _plain(self, room: CacheSpec) -> KvCache:
        return CACHES[self.layout.kind](self._seams, room, self.layout)

    def _paged(
        self, target: Model, draft: Model | None, capacity: int, rows: int, tokens: tuple[int, ...]
    ) -> CacheLease:
        blocks = self._seams.blocks(self.pages, self.layout.page_size, self.layout.overhang)
        known = [] if self.prefix is None else self.prefix.match(draft, tokens)
        blocks.adopt(known)
        reused = len(known) * self.layout.page_size
        small = None if draft is None else self._seams.paged(self._pool(draft, "draft", capacity, rows), blocks, reused)
        return CacheLease(
            self._seams.paged(self._pool(target, "target", capacity, rows), blocks, reused),
            small,
            blocks,
            draft,
            reused,
        )

    def _pool(self, model: Model, role: str, capacity: int, rows: int) -> Pool:
        """The pool of a model in one role: a target that drafts for itself has both caches in the same blocks."""
        if (model, role) not in self._pools:
            room = model.room(capacity, rows)
            self._pools[model, role] = self._seams.pool(room, self.pages.total, self.layout.page_size)
        return self._pools[model, role]

    def fork(self, source: CacheLease, target: Model, draft: Model | None, capacity: int, rows: int) -> CacheLease:
        """Caches that begin with all that `source` has committed: shared pages, or copies.

        The draft's come along where it is the same model, in pages as far as the target's: a draft that has proposed
        is one column ahead of the target, and with a full page before it that column lies in a page that is not shared.
        """
        columns = source.target.length
        same = draft is not None and source.draft is not None and source.owner is draft
        if source.blocks is not None:
            lease = self._paged(target, draft, capacity, rows, ())
            assert lease.blocks is not None
            lease.blocks.adopt(source.blocks.table[: -(-columns // source.blocks.size)])
            lease.target.length = columns
            if same and lease.draft is not None and source.draft is not None:
                lease.draft.length = min(source.draft.length, columns)
        else:
            lease = self.lease(target, draft, capacity, rows)
            lease.target.begin_as(source.target)
            if same and lease.draft is not None and source.draft is not None:
                lease.draft.begin_as(source.draft)
        lease.owner, lease.reused = draft, columns
        return lease

    def with_draft(self, lease: CacheLease, draft: Model | None, capacity: int, rows: int) -> CacheLease:
        """The same target cache beside an empty one for another draft model, in the same blocks."""
        small: KvCache | None = None
        if draft is not None and lease.blocks is not None:
            small = self._seams.paged(self._pool(draft, "draft", capacity, rows), lease.blocks)
        elif draft is not None:
            small = self._plain(draft.room(capacity, rows))
        return replace(lease, draft=small, owner=draft)

    def give_back(self, lease: CacheLease, tokens: tuple[int, ...] = ()) -> None:
        """The request is over, or evicted; full pages of the `tokens` it committed are offered to the prefix cache.

        A page counts only up to where target and draft have both committed: a hit never leaves either uninitialised.
        """
        if lease.blocks is not None and self.prefix is not None and tokens:
            both = min(lease.target.length, lease.draft.length if lease.draft is not None else len(tokens))
            self.prefix.insert(lease.owner, tokens[:both], lease.blocks.table)
        if lease.draft is not None:
            lease.draft.release()
        lease.target.release()

    def poison(self, leases: Sequence[CacheLease] = ()) -> None:
        """Fill every free page, and the free and stale cells of `leases`, as `layout.poison` says."""
        if not self.layout.poison:
            return
        for pool in self._pools.values() if self.pages.free else ():
            caches = [cache for lease in leases for cache in lease.caches if getattr(cache, "pool", None) is pool]
            pool.fill(list(self.pages.free), self._filling(caches))
        for lease in leases:
            others = [one for one in leases if one is not lease]
            lease.target.poison(self._filling([one.target for one in others]))
            if lease.draft is not None:
                same = [one.draft for one in others if one.draft is not None and one.owner is lease.owner]
                lease.draft.poison(self._filling(same))

    def _filling(self, others: Sequence[KvCache]) -> Poison:
        """The filling of a cell, `others` being caches of one model; NaN only where attention reads no such cell."""
        if self.layout.poison == "others":
            keys = (cache.held(0)[1] for cache in others)
            # A layer with a window of one column holds none between steps.
            return next((held[0, -1] for held in keys if held.shape[1]), LARGE)
        return float("nan") if self.layout.poison == "nan" and not self.layout.traits.reads_stale else LARGE

    @property
    def filler(self) -> float:
        """The number in padding columns of a batch: attention reads and masks them, so the number is finite."""
        return LARGE if self.layout.poison else 0.0


def refuse_small_pool(layout: KvLayout, columns: int) -> None:
    """Refuse a free list that cannot hold one request of `columns` columns, before anything runs.

    Raises:
        Unsupported: where pages are missing.
    """
    if layout.pages and layout.pages_for(columns) > len(layout.pages):
        raise Unsupported(
            f"out of pages: the request and its block may need {layout.pages_for(columns)} pages of "
            f"{layout.page_size} columns, the pool has {len(layout.pages)}"
        )
