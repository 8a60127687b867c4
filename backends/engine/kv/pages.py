"""Pages: the allocator of a pool, with a free list and a count of who holds each page; and a request's block table."""

from collections import Counter, deque
from collections.abc import Callable, Sequence

from backends.engine.kv.base import OutOfPages


class Pages:
    """Hands out page ids in the order of its free list; a page comes back when its last holder lets go of it."""

    def __init__(self, order: Sequence[int]) -> None:
        if len(set(order)) < len(order):
            raise ValueError("a page stands twice in the free list")
        self.total = len(order)
        self._free = deque(order)
        self._holders: Counter[int] = Counter()
        self.make_room: Callable[[int], None] = lambda missing: None

    @property
    def free(self) -> tuple[int, ...]:
        """The free list, next page first."""
        return tuple(self._free)

    @property
    def held(self) -> dict[int, int]:
        """Holders of each page that is not free."""
        return dict(self._holders)

    def take(self, count: int) -> list[int]:
        """`count` pages, all or none.

        Raises:
            OutOfPages: where there are not so many.
        """
        if len(self._free) < count:
            self.make_room(count - len(self._free))
        if len(self._free) < count:
            raise OutOfPages(f"{count} pages are needed, {len(self._free)} of {self.total} are free")
        taken = [self._free.popleft() for _ in range(count)]
        self._holders.update(taken)
        return taken

    def share(self, page: int) -> None:
        """One holder more.

        Raises:
            ValueError: where nobody holds it, so that it may be handed out at any time.
        """
        if page not in self._holders:
            raise ValueError(f"page {page} is shared, but belongs to nobody")
        self._holders[page] += 1

    def drop(self, page: int) -> None:
        """One holder less; the last one frees it.

        Raises:
            ValueError: where nobody holds it.
        """
        if self._holders[page] < 1:
            raise ValueError(f"page {page} is freed twice")
        self._holders[page] -= 1
        if not self._holders[page]:
            del self._holders[page]
            self._free.append(page)


class Blocks:
    """One request's block table: logical column c lies in page `table[c // size]`, at offset `c % size`.

    The caches of target and draft share it, so both hold the same blocks at all times. It is over-allocated: `reserve`
    keeps `overhang` columns beyond what is asked for, and nothing goes back before the request ends.

    Attributes:
        copy: Copies a page to another in every pool behind this table; set by the pools.
    """

    def __init__(self, pages: Pages, size: int, overhang: int = 0) -> None:
        self.pages = pages
        self.size = size
        self.table: list[int] = []
        self.copy: list[Callable[[int, int], None]] = []
        self._overhang = overhang

    @property
    def allocated(self) -> int:
        """Columns that the table has room for."""
        return len(self.table) * self.size

    def reserve(self, columns: int) -> None:
        """Room for `columns` columns and the overhang, all of it or, with OutOfPages, none."""
        missing = -(-(columns + self._overhang) // self.size) - len(self.table)
        if missing > 0:
            self.table += self.pages.take(missing)

    def own(self, begin: int, end: int) -> None:
        """Copy on write: replace every page of columns `begin` to `end` that somebody else holds too."""
        if begin >= end:
            return
        for place in range(begin // self.size, (end - 1) // self.size + 1):
            page = self.table[place]
            if self.pages.held[page] > 1:
                (mine,) = self.pages.take(1)
                for copy in self.copy:
                    copy(page, mine)
                self.pages.drop(page)
                self.table[place] = mine

    def adopt(self, shared: list[int]) -> None:
        """Begin with pages that somebody else holds."""
        for page in shared:
            self.pages.share(page)
        self.table = [*shared, *self.table]

    def check(self) -> None:
        """Refuse a table that an accelerator would read out of bounds.

        Raises:
            ValueError: for a page outside the pool, one that nobody holds, or one that is there twice.
        """
        held = self.pages.held
        for place, page in enumerate(self.table):
            if not 0 <= page < self.pages.total:
                raise ValueError(f"block {place}: page {page} is outside the pool of {self.pages.total}")
            if page not in held:
                raise ValueError(f"block {place}: page {page} belongs to nobody")
        if len(set(self.table)) < len(self.table):
            raise ValueError("a page stands twice in the block table")

    def release(self) -> None:
        """Give every page back, the overhang first."""
        while self.table:
            self.pages.drop(self.table.pop())
