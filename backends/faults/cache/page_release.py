"""Faults of pages that go back: too many, too few, twice, or while somebody reads them."""

from dataclasses import replace

from backends.engine.kv.arena import Arena, CacheLease
from backends.engine.kv.pages import Blocks, Pages
from backends.engine.kv.prefix import PrefixCache
from backends.engine.seams import Seams
from backends.faults.fault import fault, faults_in
from reference.trace import Stage


class Lenient(Pages):
    """Believes whoever says that a page is free."""

    def free_for_all(self, page: int) -> None:
        """Free it, whoever holds it."""
        if page in self._holders:
            del self._holders[page]
            self._free.append(page)

    def drop(self, page: int) -> None:
        """Without complaint."""
        if page in self._holders:
            super().drop(page)


class Twice(Pages):
    """Appends to the free list what is free already."""

    def drop(self, page: int) -> None:
        """Without complaint."""
        if page in self._holders:
            super().drop(page)
        else:
            self._free.append(page)


class Selfish(Blocks):
    """Frees its pages, whoever shares them."""

    def release(self) -> None:
        """See `Blocks.release`."""
        while self.table:
            page = self.table.pop()
            if isinstance(self.pages, Lenient):
                self.pages.free_for_all(page)


@fault(
    "shared-pages-freed",
    Stage.COMMITTED,
    "catalogue BZ-068: cancellation plus shared prefix corrupts unrelated requests",
    "a cancelled request whose pages a fork or the prefix cache shares",
)
def freed_though_shared(seams: Seams) -> Seams:
    """A request that ends or is cancelled frees its pages, also those that others share by prefix.

    A request that ends, or is cancelled, frees its pages without looking who else holds them.
    """
    return replace(seams, kv=replace(seams.kv, pages=Lenient, blocks=Selfish))


class Remembering(Blocks):
    """Still has its table after it gave all pages back."""

    def release(self) -> None:
        """See `Blocks.release`."""
        for page in reversed(self.table):
            self.pages.drop(page)


@fault(
    "page-freed-twice",
    Stage.COMMITTED,
    "family of catalogue BZ-068: shared cache state released incorrectly",
    "a request with a draft model that is cancelled, evicted or over",
)
def freed_twice(seams: Seams) -> Seams:
    """Target and draft both give back the pages that they share, which then stand in the free list twice.

    Target and draft both give back the pages that they share.
    """
    return replace(seams, kv=replace(seams.kv, pages=Twice, blocks=Remembering))


class CommittedOnly(Arena):
    """Gives back the pages of committed columns."""

    def give_back(self, lease: CacheLease, tokens: tuple[int, ...] = ()) -> None:
        """See `Arena.give_back`."""
        if lease.blocks is not None:
            lease.blocks.table = lease.blocks.table[: -(-lease.target.length // lease.blocks.size)]
        super().give_back(lease, tokens)


@fault(
    "overhang-never-freed",
    Stage.COMMITTED,
    "catalogue BZ-067: kv_allocated_len not tracked in paged path, pages never released",
    "a request with a page beyond its committed length that is cancelled, evicted or over",
)
def overhang_lost(seams: Seams) -> Seams:
    """Pages allocated beyond the committed length are not released with the request.

    Pages that were allocated beyond the committed length never come back.
    """
    return replace(seams, arena=CommittedOnly)


class Ruthless(PrefixCache):
    """Evicts the oldest pages, whoever reads them."""

    def evict(self, count: int) -> None:
        """See `PrefixCache.evict`."""
        for key in list(self._kept)[:count]:
            page = self._kept.pop(key)
            if isinstance(self._pages, Lenient):
                self._pages.free_for_all(page)


@fault(
    "kept-page-evicted-in-use",
    Stage.COMMITTED,
    "family of catalogue BZ-068: shared cache state released incorrectly",
    "layout prefix, a pool that runs out, and a request that reuses a kept page",
)
def evicted_in_use(seams: Seams) -> Seams:
    """The prefix cache evicts its oldest pages although living requests hold them.

    The prefix cache evicts pages that a living request holds.
    """
    return replace(seams, kv=replace(seams.kv, pages=Lenient, prefix=Ruthless))


FAULTS = faults_in(globals())
