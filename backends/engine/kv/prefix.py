"""The prefix cache, which keeps full pages of finished requests.

A later request whose tokens begin with the same tokens adopts these pages. The least recently used page is evicted
first; a second tier may keep a copy of it and bring it back.
"""

from collections import OrderedDict
from collections.abc import Iterator

from specverify.backends.engine.kv.base import OutOfPages
from specverify.backends.engine.kv.pages import Pages
from specverify.backends.engine.kv.tiers.second import Border, Key, SecondTier


class PrefixCache:
    """Holds one page for each sequence of tokens that ends at the end of a page.

    A page is useful only together with all pages before it. So the pages of a hit are marked as used from the last to
    the first: the least recently used page is then always a page that no other kept page needs.

    Attributes:
        pages: The allocator, in which the cache is one holder of each page that it keeps.
        page_size: Columns of a page.
        entries: The pages kept by key, the least recently used first.
        borders: The recurrent states of target and draft behind the last token of a page, by the page's key.
        tier: The second tier, to which evicted pages go; None for none.
        most: The most pages that are kept while no request holds them; 0 for no limit.
    """

    def __init__(self, pages: Pages, size: int) -> None:
        self.pages = pages
        self.page_size = size
        self.entries: OrderedDict[Key, int] = OrderedDict()
        self.borders: dict[Key, Border] = {}
        self.tier: SecondTier | None = None
        self.most = 0
        pages.make_room = self.evict
        pages.exact = False

    def __len__(self) -> int:
        return len(self.entries)

    @property
    def cached_pages(self) -> tuple[int, ...]:
        """The pages that this cache holds, the least recently used first."""
        return tuple(self.entries.values())

    def match(self, owner: object, tokens: tuple[int, ...]) -> list[int]:
        """The pages of the longest known prefix of `tokens`, in order.

        The caller adopts them at once: until then an eviction may free them.
        """
        pages = []
        for end in range(self.page_size, len(tokens) + 1, self.page_size):
            page = self.entries.get((owner, tokens[:end]))
            if page is None:
                break
            pages.append(page)
        pages += self._bring_back(owner, tokens, pages)
        self._touch(owner, tokens, len(pages))
        return pages

    def _bring_back(self, owner: object, tokens: tuple[int, ...], found_pages: list[int]) -> list[int]:
        """The pages of `tokens` behind the pages `found_pages` that the second tier brings back, in order."""
        pages = list(found_pages)
        for page in found_pages:  # room for the next page must not be made by evicting those before it
            self.pages.share(page)
        for page in self._fetch(owner, tokens, len(found_pages)):
            self.pages.share(page)
            pages.append(page)
        for page in pages:
            self.pages.drop(page)
        return pages[len(found_pages) :]

    def _fetch(self, owner: object, tokens: tuple[int, ...], num_found: int) -> Iterator[int]:
        """Bring back page after page behind the first `num_found`, until one is missing or no page is free."""
        tier = self.tier
        for end in range((num_found + 1) * self.page_size, len(tokens) + 1, self.page_size) if tier is not None else ():
            key = owner, tokens[:end]
            assert tier is not None
            if not tier.has_copy(key):
                return
            try:
                page = tier.destination(self.pages)
            except OutOfPages:
                return
            if not tier.has_copy(key):  # the copy gave its slot to a page that was evicted to make room
                self.pages.drop(page)
                return
            states = tier.bring(key, page)
            if states is not None:
                self.borders[key] = states
            self.entries[key] = page
            yield page

    def insert(self, owner: object, tokens: tuple[int, ...], table: list[int]) -> None:
        """Keep the full pages of a request that committed `tokens`; for known tokens the page held already stays."""
        full = len(tokens) // self.page_size
        for place in range(full):
            key = owner, tokens[: (place + 1) * self.page_size]
            if key not in self.entries:
                self.pages.share(table[place])
                self.entries[key] = table[place]
        self._touch(owner, tokens, full)

    def evict(self, count: int) -> None:
        """Drop the least recently used pages until `count` of them became free, or until no page would become free.

        With a page, all pages that continue it are dropped too, since `match` would never reach them. Requests that
        hold such a page keep it.
        """
        for (owner, tokens), page in list(self.entries.items()):
            if count <= 0:
                return
            # An entry may have gone with a page before it. A page that a request holds would not become free; one that
            # is kept for several owners does with the last of them.
            if (owner, tokens) in self.entries and self.pages.holder_counts[page] == self._num_entries(page):
                count -= sum(map(self._drop_entry, self._beginning(owner, tokens)))

    def _num_entries(self, page: int) -> int:
        """The number of entries that keep `page`: a request whose draft was switched leaves it to two owners."""
        return sum(entry_page == page for entry_page in self.entries.values())

    def _beginning(self, owner: object, tokens: tuple[int, ...]) -> list[Key]:
        """The keys of kept pages whose tokens begin with `tokens`."""
        return [key for key in self.entries if key[0] == owner and key[1][: len(tokens)] == tokens]

    def _drop_entry(self, key: Key) -> bool:
        """Drop the page of `key`; return whether the page is free now."""
        page = self.entries.pop(key)
        if self.tier is not None:
            self.tier.keep(key, page, self.borders.pop(key, None))
        self.pages.drop(page)
        return page not in self.pages.holder_counts

    def trim(self) -> None:
        """Evict pages until at most `most` are kept, or until requests hold all the others."""
        if self.most and len(self.entries) > self.most:
            self.evict(len(self.entries) - self.most)

    def clear(self) -> None:
        """Drop all pages."""
        for page in self.entries.values():
            self.pages.drop(page)
        self.entries.clear()

    def _touch(self, owner: object, tokens: tuple[int, ...], full: int) -> None:
        for place in reversed(range(full)):
            self.entries.move_to_end((owner, tokens[: (place + 1) * self.page_size]))
