"""The prefix cache, which keeps full pages of finished requests, and its second tier.

A later request whose tokens begin with the same tokens adopts these pages. The least recently used page is evicted
first. The second tier keeps a copy of it in host memory and brings it back when a prompt asks for its tokens; with a
page go the columns of the draft's model in it, the hidden states of the target that the draft reads, and the recurrent
states of both models behind its last token.
"""

from collections import Counter, OrderedDict, defaultdict, deque
from collections.abc import Callable, Hashable, Iterator

import torch

from specverify.backends.engine.kv.base import OutOfPages, Pair
from specverify.backends.engine.kv.paged import Cells
from specverify.backends.engine.kv.pages import Pages
from specverify.backends.engine.kv.state_slots import LayerStates

Key = tuple[object, tuple[int, ...]]
"""The owner of a page (see `page_owner`), and every token up to the page's end."""

Border = tuple[LayerStates | None, LayerStates | None]
"""Recurrent states of target and draft behind the last token of a page."""


class PrefixCache:
    """Holds one page for each sequence of tokens that ends at the end of a page.

    A page is useful only together with all pages before it. So the pages of a hit are marked as used from the last to
    the first: the least recently used page is then always a page that no other kept page needs.

    Attributes:
        pages: The allocator, in which the cache is one holder of each page that it keeps.
        page_size: Columns of a page.
        entries: The pages kept by key, the least recently used first.
        borders: The recurrent states of target and draft behind the last token of a page, by the page's key.
        followers: The token behind a page, by the page's key, where the page's last row in a head's cache holds it;
            None for one that is not known.
        tier: The second tier, to which evicted pages go; None for none.
        most: The most pages that are kept while no request holds them; 0 for no limit.
    """

    def __init__(self, pages: Pages, size: int) -> None:
        self.pages = pages
        self.page_size = size
        self.entries: OrderedDict[Key, int] = OrderedDict()
        self.borders: dict[Key, Border] = {}
        self.followers: dict[Key, int | None] = {}
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
            if not self._leads_on(owner, tokens, end):
                break
        if not pages or self._leads_on(owner, tokens, len(pages) * self.page_size):
            pages += self._bring_back(owner, tokens, pages)
        self._touch(owner, tokens, len(pages))
        return pages

    def _leads_on(self, owner: object, tokens: tuple[int, ...], end: int) -> bool:
        """Whether pages of `tokens` may follow the known page that ends at `end`.

        A page is known by its own tokens. Where its last row holds the token behind it too, a text that goes on in
        another way may end with the page, whose last row it then runs anew, but may not go on behind it.
        """
        key = owner, tokens[:end]
        return key not in self.followers or tokens[end : end + 1] == (self.followers[key],)

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
        if tier is None:
            return
        for end in range((num_found + 1) * self.page_size, len(tokens) + 1, self.page_size):
            key = owner, tokens[:end]
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
            if not self._leads_on(owner, tokens, end):
                return

    def insert(
        self, owner: object, tokens: tuple[int, ...], table: list[int], text: tuple[int, ...] | None = None
    ) -> None:
        """Keep the full pages of a request that committed `tokens`; for known tokens the page held already stays.

        With a `text`, all known tokens of the request, the last row of a page holds the token behind it.
        """
        full = len(tokens) // self.page_size
        for place in range(full):
            end = (place + 1) * self.page_size
            key = owner, tokens[:end]
            if key not in self.entries:
                self.pages.share(table[place])
                self.entries[key] = table[place]
                if text is not None:
                    self._follow(key, text[end] if end < len(text) else None)
        self._touch(owner, tokens, full)

    def _follow(self, key: Key, follower: int | None) -> None:
        """Note the token behind the page of `key`; forget a copy in the second tier that has another one behind it."""
        if self.tier is not None and self.followers.get(key, follower) != follower:
            self.tier.forget(key)
        self.followers[key] = follower

    def evict(self, count: int) -> None:
        """Drop the least recently used pages until `count` of them became free, or until no page would become free.

        With a page, all pages that continue it are dropped too, since `match` would never reach them. Requests that
        hold such a page keep it.
        """
        keys, kept_pages = list(self.entries), list(self.entries.values())
        # A request whose draft was switched leaves a page to two owners, and so to two entries.
        num_entries = Counter(kept_pages)
        next_pages = self._next_pages(keys)
        dropped_places = set[int]()
        for place, page in enumerate(kept_pages):
            if count <= 0:
                return
            # An entry may have gone with a page before it. A page that a request holds would not become free; one that
            # is kept for several owners does with the last of them.
            if place not in dropped_places and self.pages.holders[page] == num_entries[page]:
                for following in sorted({*_reached_from(place, next_pages)} - dropped_places):
                    count -= self._drop_entry(keys[following])
                    num_entries[kept_pages[following]] -= 1
                    dropped_places.add(following)

    def _next_pages(self, keys: list[Key]) -> dict[int, list[int]]:
        """For each place in `keys` the places of the pages that continue its page by a page."""
        place_of = {key: place for place, key in enumerate(keys)}
        next_pages: dict[int, list[int]] = defaultdict(list)
        for place, (owner, tokens) in enumerate(keys):
            before = place_of.get((owner, tokens[: -self.page_size]))
            if before is not None:
                next_pages[before].append(place)
        return next_pages

    def _drop_entry(self, key: Key) -> bool:
        """Drop the page of `key`; return whether the page is free now."""
        page = self.entries.pop(key)
        if self.tier is not None:
            self.tier.keep(key, page, self.borders.pop(key, None))
        else:
            self.followers.pop(key, None)
        self.pages.drop(page)
        return page not in self.pages.holders

    def trim(self) -> None:
        """Evict pages until at most `most` are kept, or until requests hold all the others."""
        if self.most and len(self.entries) > self.most:
            self.evict(len(self.entries) - self.most)

    def clear(self) -> None:
        """Drop all pages."""
        for page in self.entries.values():
            self.pages.drop(page)
        self.entries.clear()
        self.followers.clear()

    def _touch(self, owner: object, tokens: tuple[int, ...], full: int) -> None:
        for place in reversed(range(full)):
            self.entries.move_to_end((owner, tokens[: (place + 1) * self.page_size]))


def _reached_from(place: int, next_pages: dict[int, list[int]]) -> list[int]:
    """`place` and every place that `next_pages` leads to from it."""
    reached = [place]
    for reached_place in reached:  # the list grows while it is walked
        reached += next_pages.get(reached_place, ())
    return reached


class SecondTier:
    """Copies of pages in slots of host memory; where no slot is free, the least recently used copy gives its own.

    A copy stays when its page comes back to the pool, so that the page need not be copied out again.

    Attributes:
        room: Number of slots.
        slots: The slot of each copy by the name of its page, the least recently used first.
        states: The recurrent states that belong to a copy, by the same name.
        brought_pages: Pages of the pool to which copies were brought back since `take_brought` was last called.
    """

    def __init__(self, room: int, page_size: int, pools: Callable[[object], list[Cells]]) -> None:
        """`pools` gives, for the owner of a page, the pools whose columns the page holds, such as the target's."""
        self.room = room
        self.page_size = page_size
        self.slots: OrderedDict[Hashable, int] = OrderedDict()
        self.states: dict[Hashable, Border] = {}
        self.brought_pages: list[int] = []
        self._pools = pools
        self._free = deque(range(room))
        self._host: dict[Cells, list[Pair]] = {}

    def name(self, key: Key) -> Hashable:
        """The name under which a page is kept: its owner and all tokens up to its end, on which its columns depend."""
        return key

    def pools(self, owner: object) -> list[Cells]:
        """The pools in which a page of `owner` holds columns."""
        return self._pools(owner)

    def has_copy(self, key: Key) -> bool:
        """Whether there is a copy of the page of `key`."""
        return self.name(key) in self.slots

    def keep(self, key: Key, page: int, states: Border | None) -> None:
        """Copy `page`, which is about to leave the pool, with the recurrent states behind it."""
        name = self.name(key)
        if states is not None:
            self.states[name] = (_move(states[0], "cpu"), _move(states[1], "cpu"))
        if name not in self.slots:
            slot = self.free_slot()
            for pool in self.pools(key[0]):
                self.copy_out(pool, page, slot)
            self.slots[name] = slot
        self.slots.move_to_end(name)

    def forget(self, key: Key) -> None:
        """Forget the copy of the page of `key`, if there is one."""
        name = self.name(key)
        if name in self.slots:
            self._free.append(self.slots.pop(name))
            self.states.pop(name, None)

    def free_slot(self) -> int:
        """A slot without a copy; the least recently used copy is forgotten for it where there is none."""
        if self._free:
            return self._free.popleft()
        oldest, slot = self.slots.popitem(last=False)
        self.states.pop(oldest, None)
        return slot

    def destination(self, pages: Pages) -> int:
        """A page of the pool for a copy that comes back; the prefix cache is its holder."""
        (page,) = pages.take(1)
        return page

    def bring(self, key: Key, page: int) -> Border | None:
        """Copy the page of `key` back to `page`; return the recurrent states behind it, if there are any."""
        name = self.name(key)
        slot = self.slots[name]
        self.slots.move_to_end(name)
        for pool in self.pools(key[0]):
            self.copy_in(pool, slot, page)
        self.brought_pages.append(page)
        border = self.states.get(name)
        device = self.pools(key[0])[0].layers[0][0].device
        return None if border is None else (_move(border[0], device), _move(border[1], device))

    def take_brought(self) -> tuple[int, ...]:
        """The pages brought back since the last call."""
        pages = tuple(self.brought_pages)
        self.brought_pages = []
        return pages

    def copy_out(self, pool: Cells, page: int, slot: int) -> None:
        """Copy all columns of `page` in every layer of `pool` to `slot`."""
        for cells, host_cells in self.cells(pool):
            host_cells[slot] = cells[page].to(host_cells.device)

    def copy_in(self, pool: Cells, slot: int, page: int) -> None:
        """Copy all columns of `slot` to `page` in every layer of `pool`."""
        for cells, host_cells in self.cells(pool):
            cells[page] = host_cells[slot].to(cells.device)

    def cells(self, pool: Cells) -> list[Pair]:
        """The cells of the pool, each tensor beside its slots in host memory."""
        if pool not in self._host:
            self._host[pool] = [
                (cells, torch.zeros((self.room, *cells.shape[1:]), dtype=cells.dtype))
                for layer in pool.layers
                for cells in layer
            ]
        return self._host[pool]


def _move(states: LayerStates | None, device: torch.device | str) -> LayerStates | None:
    if states is None:
        return None
    return {layer: (window.to(device), memory.to(device)) for layer, (window, memory) in states.items()}
