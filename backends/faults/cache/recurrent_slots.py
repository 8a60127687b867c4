"""Faults of recurrent states in slots.

A slot keeps what its owner before has left, slots overlap, one is lost or written by padding, or a state is read from,
or copied to, the wrong cell where a page ends.
"""

from dataclasses import replace

from torch import zeros_like

from specverify.backends.engine.kv.arena import Arena, CacheLease
from specverify.backends.engine.kv.base import KvCache
from specverify.backends.engine.kv.lanes import BatchCache
from specverify.backends.engine.kv.recurrent import RecurrentStates, states_of
from specverify.backends.engine.kv.state_slots import Checkpoints, LayerState, LayerStates, RecurrentPool
from specverify.backends.engine.seams import Seams
from specverify.backends.faults.fault import attended_fault, committed_fault, in_place_of


@attended_fault(
    "recurrent-slot-not-cleared",
    "vLLM PR #56524: blocks of recurrent state are handed out again without being zeroed",
    "recurrent layers; states in slots; a request that takes the slot of one that has left",
)
@in_place_of("kv.checkpoints")
class NotCleared(Checkpoints):
    """A slot is handed out as its owner before has left it, and a request without a token goes on from that state."""

    def clear(self) -> LayerStates:
        cell = self.cells[0]
        self.committed, self.rows = {0: cell}, []
        return {layer: self.pool.read(layer, cell) for layer in self.pool.layers}


@attended_fault(
    "recurrent-slots-overlap",
    "vLLM (tpu-inference) PR #3196: a group of slots must have one state more than there are drafted tokens",
    "recurrent layers; states in slots; two requests, one of whose rows takes the last checkpoint",
)
@in_place_of("kv.recurrent_pool")
class OneCellShort(RecurrentPool):
    """Slots are one cell closer than they are long: the last checkpoint of one is the first cell of the next."""

    def cells_of(self, slot: int) -> range:
        begin = slot * (self.cells - 1)
        return range(begin, begin + self.cells)


@attended_fault(
    "recurrent-slot-of-padding",
    "vLLM PR #39064: padded entries have state index 0, which the kernel takes for a request's own",
    "recurrent layers; states in slots; a batch of unequal widths with the owner of slot 0",
)
def slot_of_padding(seams: Seams) -> Seams:
    """Padding rows of a batch run in slot 0: the window of its owner moves on by a row of zeros."""

    class PaddingInSlotZero(seams.kv.lanes):  # type: ignore[name-defined,misc]
        def __init__(self, caches: list[KvCache], rows: list[int], filler: float = 0.0) -> None:
            super().__init__(caches, rows, filler)
            states_by_lane = [states_of(cache) for cache in caches]
            for states in states_by_lane if min(rows) < max(rows) else ():
                if states is not None and states.slot is not None and states.slot.slot == 0:
                    for window, _ in states.committed.values():
                        moved_rows = window[1:].clone()
                        window[:-1] = moved_rows
                        window[-1] = zeros_like(window[-1])

    lanes: type[BatchCache] = PaddingInSlotZero
    return replace(seams, kv=replace(seams.kv, lanes=lanes))


@committed_fault(
    "recurrent-slot-lost-without-pages",
    "SGLang PR #16067: a request that has a slot and finds no pages waits, and its slot is lost",
    "states in slots; pages listed; a request that must wait for pages",
)
def lost_without_pages(seams: Seams) -> Seams:
    """A request that has taken a slot and finds too few free pages gives back its pages and not the slot."""

    class LosesSlots(seams.arena):  # type: ignore[name-defined,misc]
        def release_slot(self, lease: CacheLease) -> None:
            blocks = lease.blocks
            if blocks is None or len(blocks.table) > -(-lease.reused // blocks.size):
                super().release_slot(lease)

    arena: type[Arena] = LosesSlots
    return replace(seams, arena=arena)


@attended_fault(
    "recurrent-window-of-new-cell",
    "vLLM PR #42792: behind a block's border the convolution reads the cell that it is about to write",
    "recurrent layers; states in slots; a prefix cache; a commit that crosses the end of a page",
)
@in_place_of("kv.states")
class WindowOfNewCell(RecurrentStates):
    """Behind the end of a page the window comes from the cell that the row writes, the memory from the right one."""

    def __init__(self, border: int = 0) -> None:
        super().__init__(border)
        self.crossed = False

    def commit(self, path: list[int]) -> None:
        begin = self.length
        super().commit(path)
        self.crossed = bool(self.border) and begin // self.border < self.length // self.border

    def above(self, layer: int, row: int) -> LayerState | None:
        state = super().above(layer, row)
        if state is None or self.slot is None or not self.crossed or self.parents[row] >= 0:
            return state
        return self.slot.pool.read(layer, self.slot.rows[row])[0].clone(), state[1]


@committed_fault(
    "recurrent-state-copied-back",
    "vLLM issue #53505: a step that ends on a block's border copies the state before it over the new one",
    "recurrent layers; states in slots; a prefix cache; a verification that ends at the end of a page",
)
@in_place_of("kv.states")
class CopiedBack(RecurrentStates):
    """Where a step ends at the end of a page, the state before the step is copied over the one behind it."""

    def commit(self, path: list[int]) -> None:
        before, verified = self.committed, not self.is_run
        super().commit(path)
        if path and verified and self.slot is not None and self.is_border(self.length):
            cell = self.slot.committed[self.length]
            copies = {layer: self.slot.pool.write(layer, cell, state) for layer, state in before.items()}
            self.states_by_length[self.length] |= copies
