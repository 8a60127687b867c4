"""Faults of page release: too many pages, too few, twice, or still in use."""

from dataclasses import replace

from specverify.backends.engine.kv.arena import Arena, CacheLease
from specverify.backends.engine.kv.pages import Blocks, Pages
from specverify.backends.engine.kv.prefix import PrefixCache
from specverify.backends.engine.seams import Seams
from specverify.backends.faults.fault import committed_fault, in_place_of


class Lenient(Pages):
    """An allocator that frees a page on anyone's word."""

    def free_for_all(self, page: int) -> None:
        """Free `page`, even if other requests hold it."""
        if page in self.holders:
            del self.holders[page]
            self.queue.append(page)

    def drop(self, page: int) -> None:
        """Drop the page, without a complaint about a page that is free."""
        if page in self.holders:
            super().drop(page)


class Twice(Pages):
    """An allocator that appends a page to the free list even if it is free already."""

    def drop(self, page: int) -> None:
        """Drop the page, or list it as free once more."""
        if page in self.holders:
            super().drop(page)
        else:
            self.queue.append(page)


class Selfish(Blocks):
    """A block table that frees its pages even if other requests share them."""

    def release(self) -> None:
        while self.table:
            page = self.table.pop()
            if isinstance(self.pages, Lenient):
                self.pages.free_for_all(page)


@committed_fault(
    "shared-pages-freed",
    "catalogue BZ-068: cancellation plus shared prefix corrupts unrelated requests",
    "a cancelled request whose pages a fork or the prefix cache shares",
)
def freed_though_shared(seams: Seams) -> Seams:
    """A request that ends or is cancelled frees its pages, also those that others share by prefix."""
    return replace(seams, kv=replace(seams.kv, pages=Lenient, blocks=Selfish))


class RememberingBlocks(Blocks):
    """A block table that keeps its entries after it has given all pages back."""

    def release(self) -> None:
        # The table is not emptied, so the second release drops the same pages again.
        for page in reversed(self.table):
            self.pages.drop(page)


@committed_fault(
    "page-freed-twice",
    "family of catalogue BZ-068: shared cache state released incorrectly",
    "a request with a draft model that is cancelled, evicted or over",
)
def freed_twice(seams: Seams) -> Seams:
    """Target and draft both give back the pages that they share, which then stand in the free list twice.

    The caches of target and draft share one block table, and each releases it.
    """
    return replace(seams, kv=replace(seams.kv, pages=Twice, blocks=RememberingBlocks))


@committed_fault(
    "overhang-never-freed",
    "catalogue BZ-067: kv_allocated_len not tracked in paged path, pages never released",
    "a request with a page beyond its committed length that is cancelled, evicted or over",
)
@in_place_of("arena")
class CommittedOnly(Arena):
    """Pages allocated beyond the committed length are not released with the request."""

    def give_back(self, lease: CacheLease, tokens: tuple[int, ...] = ()) -> None:
        if lease.blocks is not None:
            # Rounded up: a partly filled page holds committed columns too.
            lease.blocks.table = lease.blocks.table[: -(-lease.target.length // lease.blocks.size)]
        super().give_back(lease, tokens)


class BorderRoundedDown(Blocks):
    """A block table whose reserve begins with the page that the last committed column may share with it."""

    def release_reserve(self, columns: int) -> None:
        for page in self.table[columns // self.size :]:
            self.pages.drop(page)
        del self.table[-(-columns // self.size) :]


@committed_fault(
    "reserve-freed-from-inside-a-page",
    "sgl-project/sglang, release_kv_cache: the reserve is freed from ceil_align(committed, page size) on, not from the "
    "committed length",
    "a request that leaves while its committed columns end inside a page",
)
def freed_from_inside_a_page(seams: Seams) -> Seams:
    """The reserve of a request that leaves begins with its last partly filled page, which is freed twice."""
    return replace(seams, kv=replace(seams.kv, pages=Twice, blocks=BorderRoundedDown))


@committed_fault(
    "reserve-counted-in-pages",
    "family of catalogue BZ-067: pages allocated beyond the committed length; tokens taken for blocks as in ROCm/ATOM "
    "PR #250",
    "a layout with pages of more than one column, and a reserve",
)
@in_place_of("kv.blocks")
class ReserveInPages(Blocks):
    """The reserve beyond a request's columns is counted in tokens and handed out in pages.

    The pool runs out while most of its columns are empty, and requests wait that have room.
    """

    def reserve(self, columns: int) -> None:
        num_missing = -(-columns // self.size) + self.overhang - len(self.table)
        if num_missing > 0:
            self.table += self.pages.take(num_missing)


class Ruthless(PrefixCache):
    """A prefix cache that evicts its oldest pages even if requests read them."""

    def evict(self, count: int) -> None:
        for key in list(self.entries)[:count]:
            page = self.entries.pop(key)
            if isinstance(self.pages, Lenient):
                self.pages.free_for_all(page)


@committed_fault(
    "kept-page-evicted-in-use",
    "family of catalogue BZ-068: shared cache state released incorrectly",
    "layout prefix, a pool that runs out, and a request that reuses a kept page",
)
def evicted_in_use(seams: Seams) -> Seams:
    """The prefix cache evicts its oldest pages although living requests hold them."""
    return replace(seams, kv=replace(seams.kv, pages=Lenient, prefix=Ruthless))
