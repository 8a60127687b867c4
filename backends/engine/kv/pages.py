"""The page allocator and the block table of a request.

The allocator has a free list and a count of the holders of each page.
"""

from collections import Counter, deque
from collections.abc import Callable, Sequence

from specverify.backends.engine.kv.base import OutOfPages


class Pages:
    """Hands out page ids in the order of its free list; a page becomes free again when its last holder drops it.

    Attributes:
        total: Number of pages.
        queue: The free pages, next page first.
        holders: The number of holders of each page that is not free.
        exact: Whether a recorded forward reads exactly the columns of a request, as a layout that promises bits needs.
        make_room: Called with the number of missing pages before a request is told that none is free.
    """

    def __init__(self, order: Sequence[int]) -> None:
        if len(set(order)) < len(order):
            raise ValueError("a page stands twice in the free list")
        self.total = len(order)
        self.queue = deque(order)
        self.holders: Counter[int] = Counter()
        # The prefix cache, whose layout promises no bits, clears this and puts its eviction below.
        self.exact = True
        self.make_room: Callable[[int], None] = lambda num_pages: None

    @property
    def free(self) -> tuple[int, ...]:
        """The free list, next page first."""
        return tuple(self.queue)

    @property
    def holder_counts(self) -> dict[int, int]:
        """The number of holders of each page that is not free."""
        return dict(self.holders)

    def take(self, count: int) -> list[int]:
        """Hand out `count` pages, or none.

        Raises:
            OutOfPages: if fewer than `count` pages are free.
        """
        if len(self.queue) < count:
            self.make_room(count - len(self.queue))
        if len(self.queue) < count:
            raise OutOfPages(f"{count} pages are needed, {len(self.queue)} of {self.total} are free")
        pages = [self.queue.popleft() for _ in range(count)]
        self.holders.update(pages)
        return pages

    def share(self, page: int) -> None:
        """Add one holder to `page`.

        Raises:
            ValueError: if the page has no holder, since a free page may be handed out at any time.
        """
        if page not in self.holders:
            raise ValueError(f"page {page} is shared, but belongs to nobody")
        self.holders[page] += 1

    def drop(self, page: int) -> None:
        """Remove one holder of `page`; without holders the page goes to the end of the free list.

        Raises:
            ValueError: if the page has no holder.
        """
        if self.holders[page] < 1:
            raise ValueError(f"page {page} is freed twice")
        self.holders[page] -= 1
        if not self.holders[page]:
            del self.holders[page]
            self.queue.append(page)


class Blocks:
    """One request's block table: logical column c lies in page `table[c // size]`, at offset `c % size`.

    The caches of target and draft share the table, so both hold the same blocks at all times. The table is
    over-allocated: `reserve` keeps room for `overhang` columns more than asked for, and no page goes back before the
    request ends.

    Attributes:
        overhang: Columns, not pages, of which `reserve` keeps room beyond those asked for.
        end: The column behind the last one that the target or the draft has opened.
        copy: Functions that copy one page to another, one for each cache made on this table; the caches add them.
    """

    def __init__(self, pages: Pages, size: int, overhang: int = 0) -> None:
        self.pages = pages
        self.size = size
        self.table: list[int] = []
        self.copy: list[Callable[[int, int], None]] = []
        self.overhang = overhang
        self.end = 0

    @property
    def allocated(self) -> int:
        """The number of columns that the table has room for."""
        return len(self.table) * self.size

    def reserve(self, columns: int) -> None:
        """Make room for `columns` columns and the overhang; raise OutOfPages, taking no page, if pages are missing."""
        num_missing = -(-(columns + self.overhang) // self.size) - len(self.table)
        if num_missing > 0:
            self.table += self.pages.take(num_missing)

    def copy_on_write(self, begin: int, end: int) -> None:
        """Copy on write: replace every page of columns `begin` to `end` that has another holder by an own copy."""
        if begin >= end:
            return
        for place in range(begin // self.size, (end - 1) // self.size + 1):
            page = self.table[place]
            if self.pages.holders[page] > 1:
                (copied_page,) = self.pages.take(1)
                for copy in self.copy:
                    copy(page, copied_page)
                self.pages.drop(page)
                self.table[place] = copied_page

    def adopt(self, shared: list[int]) -> None:
        """Put pages that already have a holder at the beginning of the table, as one more holder."""
        for page in shared:
            self.pages.share(page)
        self.table = [*shared, *self.table]

    def check(self) -> None:
        """Refuse a table with which an accelerator would read out of bounds or from a foreign page.

        Raises:
            ValueError: for a page outside the pool, a page without a holder, or a page that is in the table twice.
        """
        for place, page in enumerate(self.table):
            if not 0 <= page < self.pages.total:
                raise ValueError(f"block {place}: page {page} is outside the pool of {self.pages.total}")
            if page not in self.pages.holders:
                raise ValueError(f"block {place}: page {page} belongs to nobody")
        if len(set(self.table)) < len(self.table):
            raise ValueError("a page stands twice in the block table")

    def release_reserve(self, columns: int) -> None:
        """Drop the pages that hold none of the first `columns` columns: those from the next page border on."""
        border = -(-columns // self.size)
        while len(self.table) > border:
            self.pages.drop(self.table.pop())

    def release(self) -> None:
        """Drop every page, from the end of the table."""
        while self.table:
            self.pages.drop(self.table.pop())
