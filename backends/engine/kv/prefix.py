"""The prefix cache: full pages of finished requests, kept for the next one whose tokens begin alike, evicted by age."""

from collections import OrderedDict

from backends.engine.kv.pages import Pages

Key = tuple[object, tuple[int, ...]]
"""The owner of a page (the draft model that shares the blocks, or None), and every token up to the page's end."""


class PrefixCache:
    """Holds one page for each run of tokens that ends at a page's end.

    A page is only useful with all pages before it, so a hit is touched from its last page to its first: the least
    recently used page is then always one that no other kept page needs.
    """

    def __init__(self, pages: Pages, size: int) -> None:
        self._pages = pages
        self._size = size
        self._kept: OrderedDict[Key, int] = OrderedDict()
        pages.make_room = self.evict

    def __len__(self) -> int:
        return len(self._kept)

    @property
    def kept(self) -> tuple[int, ...]:
        """Pages held, the least recently used first."""
        return tuple(self._kept.values())

    def match(self, owner: object, tokens: tuple[int, ...]) -> list[int]:
        """Pages that hold the longest known beginning of `tokens`, in order; the caller adopts them at once."""
        found = []
        for end in range(self._size, len(tokens) + 1, self._size):
            page = self._kept.get((owner, tokens[:end]))
            if page is None:
                break
            found.append(page)
        self._touch(owner, tokens, len(found))
        return found

    def insert(self, owner: object, tokens: tuple[int, ...], table: list[int]) -> None:
        """Keep the full pages of a request that committed `tokens`; runs that are known keep the page they have."""
        full = len(tokens) // self._size
        for place in range(full):
            key = owner, tokens[: (place + 1) * self._size]
            if key not in self._kept:
                self._pages.share(table[place])
                self._kept[key] = table[place]
        self._touch(owner, tokens, full)

    def evict(self, count: int) -> None:
        """Let go of the oldest pages until `count` of them became free, or none is left that only this cache holds.

        With a page go those that need it, since nobody would find them; whoever else holds them keeps them.
        """
        for (owner, tokens), page in list(self._kept.items()):
            if count <= 0:
                return
            if (owner, tokens) in self._kept and self._pages.held[page] == 1:
                count -= sum(map(self._let_go, self._beginning(owner, tokens)))

    def _beginning(self, owner: object, tokens: tuple[int, ...]) -> list[Key]:
        """Kept runs that begin with `tokens`."""
        return [key for key in self._kept if key[0] is owner and key[1][: len(tokens)] == tokens]

    def _let_go(self, key: Key) -> bool:
        """Whether the page of `key` is free now."""
        page = self._kept.pop(key)
        self._pages.drop(page)
        return page not in self._pages.held

    def clear(self) -> None:
        """Let go of everything."""
        for page in self._kept.values():
            self._pages.drop(page)
        self._kept.clear()

    def _touch(self, owner: object, tokens: tuple[int, ...], full: int) -> None:
        for place in reversed(range(full)):
            self._kept.move_to_end((owner, tokens[: (place + 1) * self._size]))
