"""Faults of recurrent state.

The state is that of another row than the last accepted one, it is lost or shared, or rows are scanned as a chain.
"""

from dataclasses import replace
from typing import Any

import torch

from specverify.backends.engine.kv.arena import Arena, CacheLease
from specverify.backends.engine.kv.recurrent import RecurrentStates, states_of
from specverify.backends.engine.kv.state_slots import LayerState, LayerStates
from specverify.backends.engine.request import Request
from specverify.backends.engine.seams import Seams
from specverify.backends.faults.fault import attended_fault, committed_fault, in_place_of


def _last(states: RecurrentStates) -> LayerStates:
    """The states after the last open row; empty if no row is open."""
    row = len(states.parents) - 1
    return {layer: states_by_row[row] for layer, states_by_row in states.rows.items() if row in states_by_row}


@committed_fault(
    "recurrent-state-by-depth",
    "vLLM keeps the state of slot accepted - 1, which is right for chains alone",
    "recurrent layers; an accepted path that is not a prefix of the row order",
)
@in_place_of("kv.states")
class ByDepth(RecurrentStates):
    """The recurrent state kept is that of the row whose number is the accepted count, not that of the accepted node.

    Rows of a chain are numbered by their depth; rows of a tree are not.
    """

    def commit(self, path: list[int]) -> None:
        super().commit(list(range(len(path))))


@committed_fault(
    "recurrent-state-not-rolled-back",
    "catalogue BZ-111: crop() does not roll back recurrent states",
    "recurrent layers; a rejected row behind the last accepted one",
)
@in_place_of("kv.states")
class KeepsMemory(RecurrentStates):
    """Rejected rows are cropped from the KV cache and from the convolution, but the recurrent memory keeps them."""

    def commit(self, path: list[int]) -> None:
        last_states = _last(self)
        super().commit(path)
        if path:
            mixed_states = {
                layer: (window, last_states[layer][1])
                for layer, (window, _) in self.committed.items()
                if layer in last_states
            }
            self.states_by_length[self.length] = mixed_states


@committed_fault(
    "recurrent-window-of-last-row",
    "public reports of hybrids: the convolution's state is a second state, and is rolled back apart from the first",
    "recurrent layers; a rejected row behind the last accepted one",
)
@in_place_of("kv.states")
class Windows(RecurrentStates):
    """The recurrent memory is that of the accepted node, but the convolution's window ends at the last row."""

    def commit(self, path: list[int]) -> None:
        last_states = _last(self)
        super().commit(path)
        if path:
            mixed_states = {
                layer: (last_states[layer][0], memory)
                for layer, (_, memory) in self.committed.items()
                if layer in last_states
            }
            self.states_by_length[self.length] = mixed_states


@committed_fault(
    "recurrent-state-of-last-row",
    "vLLM issue #39273: a hybrid's state after all drafted tokens stays when some are rejected",
    "recurrent layers; a rejected row behind the last accepted one",
)
@in_place_of("kv.states")
class Last(RecurrentStates):
    """After verification the recurrent state is that of the last row of the block, accepted or not.

    A padding row counts as the last row too.
    """

    def commit(self, path: list[int]) -> None:
        last_states = _last(self)
        super().commit(path)
        if path and last_states:
            self.states_by_length[self.length] = last_states


@attended_fault(
    "recurrent-rows-scanned-in-order",
    "transformers runs the rows of a forward as one chain through a recurrent layer, whatever the mask",
    "recurrent layers; a tree with a side branch",
)
@in_place_of("kv.states")
class ScansInOrder(RecurrentStates):
    """The rows of a tree run through recurrent layers as one chain, in row order: no mask repairs that."""

    def order(self, first: int) -> list[int]:
        return list(range(first, len(self.parents)))

    def above(self, layer: int, row: int) -> LayerState | None:
        return self.rows[layer][row - 1] if row else self.committed.get(layer)


@attended_fault(
    "recurrent-cell-of-neighbour",
    "catalogue BZ-122: hybrid cell copy missing, stale source in recurrent slot search",
    "recurrent layers; a node whose parent is not the first row",
)
@in_place_of("kv.states")
class NeighbourCell(RecurrentStates):
    """A new branch reads the recurrent state of the cell beside its parent's, which belongs to another branch.

    The source of a copied cell is one row off; where that row has not run yet, the parent's own cell is read.
    """

    def above(self, layer: int, row: int) -> LayerState | None:
        neighbour = self.parents[row] - 1
        neighbour_state = self.rows.get(layer, {}).get(neighbour) if neighbour >= 0 else None
        return super().above(layer, row) if neighbour_state is None else neighbour_state


@attended_fault(
    "recurrent-slot-zero-without-drafts",
    "vLLM issue #52942: a step without drafts reads slot 0 of a block of several",
    "recurrent layers; a step of one row after a block of several",
)
@in_place_of("kv.states")
class Slots(RecurrentStates):
    """A step without drafts goes on from slot 0 of the block before it, however many rows of that were accepted.

    Slot 0 holds the state after the block's root.
    """

    def __init__(self, border: int = 0) -> None:
        super().__init__(border)
        self.zero: LayerStates = {}

    def close(self) -> None:
        rows = len(self.parents)
        self.zero = (
            {layer: states_by_row[0] for layer, states_by_row in self.rows.items() if 0 in states_by_row}
            if rows > 1
            else {}
        )
        super().close()

    def above(self, layer: int, row: int) -> LayerState | None:
        alone = len(self.parents) == 1 and layer in self.zero
        return self.zero[layer] if alone else super().above(layer, row)


@attended_fault(
    "recurrent-window-not-continued",
    "transformers issue #45513: several tokens behind a cached prefix are convolved as if nothing came before",
    "recurrent layers; two rows or more behind committed tokens",
)
@in_place_of("kv.states")
class Anew(RecurrentStates):
    """A block of several rows is convolved as if no token came before it; a single row is convolved rightly."""

    def above(self, layer: int, row: int) -> LayerState | None:
        state = super().above(layer, row)
        if state is None or self.parents[row] >= 0 or len(self.parents) == 1:
            return state
        return torch.zeros_like(state[0]), state[1]


@committed_fault(
    "recurrent-state-lost-by-eviction",
    "public reports of servers: after an eviction the pages come back and the recurrent slot does not",
    "recurrent layers; a request that is evicted and restored",
)
def lost_by_eviction(seams: Seams) -> Seams:
    """A request that was evicted has its keys and values again when it is restored, but an empty recurrent state."""

    class EmptyAfterEviction(seams.request):  # type: ignore[name-defined,misc]
        def prefill(self) -> None:
            super().prefill()
            states = states_of(self.lease.target)
            if self.steps and states is not None:
                states.states_by_length[states.length] = {
                    layer: (torch.zeros_like(window), torch.zeros_like(memory))
                    for layer, (window, memory) in states.committed.items()
                }

    request: type[Request] = EmptyAfterEviction
    return replace(seams, request=request)


@committed_fault(
    "recurrent-state-shared-by-fork",
    "public reports of parallel sampling on hybrids: copies of a request share one recurrent slot",
    "recurrent layers; a fork, and steps of both requests",
)
@in_place_of("kv.states")
class SharedSlot(RecurrentStates):
    """A fork takes the recurrent state of its source by reference, so that each step of one changes the other's."""

    def __init__(self, border: int = 0) -> None:
        super().__init__(border)
        self.shared = False

    def begin_as(self, source: RecurrentStates, length: int) -> None:
        super().begin_as(source, length)
        self.shared = True
        if isinstance(source, type(self)):
            source.shared = True

    def keep(self, states: LayerStates) -> None:
        slot: Any = self.committed
        if self.shared and slot:
            for layer, state in states.items():
                for old, new in zip(slot[layer], state, strict=True):
                    old.copy_(new)
            states = slot
        super().keep(states)


@attended_fault(
    "recurrent-state-of-prefix-advanced",
    "catalogue BZ-022: prefix cache serves recurrent state that contains rejected drafts",
    "recurrent layers; a prefix cache; a request that begins with pages of one that went on behind their end",
)
def prefix_advanced(seams: Seams) -> Seams:
    """The prefix cache keeps, beside the last full page, the recurrent state that the request had when it ended.

    That state has read tokens behind the page, and the next request reads them again.
    """

    class AdvancedStates(seams.arena):  # type: ignore[name-defined,misc]
        def keep_states(self, lease: CacheLease, tokens: tuple[int, ...]) -> None:
            end = len(tokens) // self.layout.page_size * self.layout.page_size
            for cache in lease.caches:
                states = states_of(cache)
                if states is not None and end in states.states_by_length:
                    states.states_by_length[end] = states.committed
            super().keep_states(lease, tokens)

    arena: type[Arena] = AdvancedStates
    return replace(seams, arena=arena)


@attended_fault(
    "recurrent-suffix-from-blank-state",
    "SGLang PR #29368: the state behind a prefix hit is read only where the suffix is long enough to be tracked itself",
    "recurrent layers; a prefix cache; a request that has fewer tokens behind its known pages than a page",
)
def suffix_from_blank(seams: Seams) -> Seams:
    """Behind known pages a prefill of fewer tokens than a page begins with a blank recurrent state."""

    class BlankBehindPages(seams.request):  # type: ignore[name-defined,misc]
        def begin_prefill(self) -> None:
            states = states_of(self.lease.target)
            missing = len(self.tokens) - 1 - self.lease.target.length
            if states is not None and states.length and 0 < missing < self.case.layout.page_size:
                states.states_by_length[states.length] = {}
            super().begin_prefill()

    request: type[Request] = BlankBehindPages
    return replace(seams, request=request)


class ChunkStates(RecurrentStates):
    """States of a request whose chunks before `end` tokens leave none.

    Attributes:
        end: The number of tokens that the latest prefill commits.
    """

    def __init__(self, border: int = 0) -> None:
        super().__init__(border)
        self.end = 0

    def commit(self, path: list[int]) -> None:
        before = {layer: (window.clone(), memory.clone()) for layer, (window, memory) in self.committed.items()}
        super().commit(path)
        if self.length < self.end:
            self.states_by_length[self.length] = before


@attended_fault(
    "recurrent-state-of-chunk-dropped",
    "SGLang PR #30938: chunks of a prefill that are shorter than the interval of checkpoints leave no state",
    "recurrent layers; a prefill of two chunks or more",
)
def chunk_dropped(seams: Seams) -> Seams:
    """A chunk of a prefill goes on from the recurrent state before the first one: what chunks read is dropped."""

    class Chunked(seams.request):  # type: ignore[name-defined,misc]
        def begin_prefill(self) -> None:
            states = states_of(self.lease.target)
            if isinstance(states, ChunkStates):
                states.end = len(self.tokens) - 1
            super().begin_prefill()

    request: type[Request] = Chunked
    return replace(seams, request=request, kv=replace(seams.kv, states=ChunkStates))
