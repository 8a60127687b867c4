"""The second tier of the prefix cache, which has slots in host memory for pages.

A page leaves the pool when the prefix cache evicts it, and comes back when a prompt asks for its tokens. With it go the
columns of the draft's model in the same page, and the recurrent states of both models behind its last token.
"""

from collections import OrderedDict, deque
from collections.abc import Callable, Hashable

import torch

from specverify.backends.engine.kv.base import Pair
from specverify.backends.engine.kv.paged import Pool
from specverify.backends.engine.kv.pages import Pages
from specverify.backends.engine.kv.recurrent import LayerStates

Key = tuple[object, tuple[int, ...]]
"""The owner of a page (the draft model that shares the blocks, or None), and every token up to the page's end."""

Border = tuple[LayerStates | None, LayerStates | None]
"""Recurrent states of target and draft behind the last token of a page."""


class SecondTier:
    """Copies of pages in slots of host memory; where no slot is free, the least recently used copy gives its own.

    A copy stays when its page comes back to the pool, so that the page need not be copied out again.

    Attributes:
        room: Number of slots.
        slots: The slot of each copy by the name of its page, the least recently used first.
        states: The recurrent states that belong to a copy, by the same name.
        brought_pages: Pages of the pool to which copies were brought back since `take_brought` was last called.
    """

    def __init__(self, room: int, page_size: int, pools: Callable[[object], list[Pool]]) -> None:
        """`pools` gives, for the owner of a page, the pools whose columns the page holds: the target's, the draft's."""
        self.room = room
        self.page_size = page_size
        self.slots: OrderedDict[Hashable, int] = OrderedDict()
        self.states: dict[Hashable, Border] = {}
        self.brought_pages: list[int] = []
        self._pools = pools
        self._free = deque(range(room))
        self._host: dict[Pool, list[Pair]] = {}

    def name(self, key: Key) -> Hashable:
        """The name under which a page is kept: its owner and all tokens up to its end, on which its columns depend."""
        return key

    def pools(self, owner: object) -> list[Pool]:
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

    def copy_out(self, pool: Pool, page: int, slot: int) -> None:
        """Copy all columns of `page` in every layer of `pool` to `slot`."""
        for cells, host_cells in self.cells(pool):
            host_cells[slot] = cells[page].to(host_cells.device)

    def copy_in(self, pool: Pool, slot: int, page: int) -> None:
        """Copy all columns of `slot` to `page` in every layer of `pool`."""
        for cells, host_cells in self.cells(pool):
            cells[page] = host_cells[slot].to(cells.device)

    def cells(self, pool: Pool) -> list[Pair]:
        """The cells of the pool, each tensor beside its slots in host memory."""
        if pool not in self._host:
            self._host[pool] = [
                (cells, torch.zeros((self.room, *cells.shape[1:]), dtype=cells.dtype))
                for pair in pool.layers
                for cells in pair
            ]
        return self._host[pool]


def _move(states: LayerStates | None, device: torch.device | str) -> LayerStates | None:
    if states is None:
        return None
    return {layer: (window.to(device), memory.to(device)) for layer, (window, memory) in states.items()}
