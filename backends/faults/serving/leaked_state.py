"""Faults of state that outlives its request.

Compiled steps, buffers by row and batch slots are handed to another request or another tree.
"""

from dataclasses import dataclass, field, replace
from typing import Any

import torch
from torch import Tensor

from specverify.backends.engine.kv.arena import Arena, CacheLease
from specverify.backends.engine.kv.base import KvCache
from specverify.backends.engine.kv.lanes import BatchCache
from specverify.backends.engine.kv.seams import KvSeams
from specverify.backends.engine.lower_tree import TreeTensors
from specverify.backends.engine.model.causal_lm import Rows
from specverify.backends.engine.reach import Reach
from specverify.backends.engine.request import Request
from specverify.backends.engine.seams import Seams
from specverify.backends.faults.fault import (
    attended_fault,
    committed_fault,
    emitted_fault,
    lowered_fault,
    scored_fault,
)
from specverify.reference.layout import KvLayout
from specverify.reference.tree import Tree

PENALTIES = ("repetition_penalty", "presence_penalty", "frequency_penalty", "bad_words")
"""The settings that the fault of penalties takes from the first request of the batch."""


@dataclass
class Memory:
    """State that a server keeps by mistake; it is empty whenever a server starts, so that every run repeats.

    Attributes:
        steps: Masks of compiled steps, by the key of the step.
        trees: Lowered trees, by the key of the lowering.
        first: A value of the first request of the batch, or of the server, that all requests get.
        lengths_left: The accepted lengths in the slots that were given back.
    """

    steps: dict[tuple[int, ...], Tensor] = field(default_factory=dict)
    trees: dict[tuple[int, ...], TreeTensors] = field(default_factory=dict)
    first: Any = None
    lengths_left: list[int] = field(default_factory=list)


def _with_memory(seams: Seams, memory: Memory) -> Seams:
    """The seams with `memory` cleared when a server starts, and told of each lease that comes back."""

    class ForgettingArena(Arena):
        def __init__(
            self, layout: KvLayout, pages: int = 0, seams: KvSeams | None = None, draft_pages: int = 0
        ) -> None:
            super().__init__(layout, pages, seams, draft_pages)
            memory.steps = {}
            memory.trees = {}
            memory.first = None
            memory.lengths_left = []

        def give_back(self, lease: CacheLease, tokens: tuple[int, ...] = ()) -> None:
            # The lease stands for the request's slot in the batch.
            memory.lengths_left.append(getattr(lease, "accepted", 0))
            super().give_back(lease, tokens)

    return replace(seams, arena=ForgettingArena)


@attended_fault(
    "step-keyed-by-token-count",
    "catalogue BZ-174: compiled step keyed without the query length",
    "two steps of equally many rows with unlike trees",
)
def keyed_by_token_count(seams: Seams) -> Seams:
    """A compiled step, its tree mask in it, is looked up by the total of tokens: another tree of that size gets it."""
    memory = Memory()

    class CompiledMasks(BatchCache):
        def masks(self, layer: int, visible: list[Tensor]) -> Tensor:
            # The last columns of a mask are the block's own rows.
            blocks = [mask[:, -len(mask) :] for mask in visible]
            compiled_mask = memory.steps.setdefault((sum(self.rows), layer), _side_by_side(blocks))
            begin = 0
            stale = []
            for mask in visible:
                end = begin + len(mask)
                stale.append(torch.cat([mask[:, : -len(mask)], compiled_mask[begin:end, begin:end]], 1))
                begin = end
            return super().masks(layer, stale)

    return replace(_with_memory(seams, memory), kv=replace(seams.kv, lanes=CompiledMasks))


def _side_by_side(blocks: list[Tensor]) -> Tensor:
    """Square masks as the diagonal blocks of one mask."""
    joint_mask = torch.zeros(sum(map(len, blocks)), sum(map(len, blocks)), dtype=torch.bool)
    begin = 0
    for block in blocks:
        end = begin + len(block)
        joint_mask[begin:end, begin:end] = block
        begin = end
    return joint_mask


@lowered_fault(
    "lowering-reused-for-other-tree",
    "catalogue BZ-127: compiled graph reused when one of two inputs matches",
    "two unlike trees of one size under equally many committed tokens",
)
def keyed_by_place(seams: Seams) -> Seams:
    """Index tensors are used again where place and size match, although the tree is another."""
    memory = Memory()

    def lower_tree(tree: Tree, committed: int, position: int, reaches: list[Reach], padded_nodes: int) -> TreeTensors:
        right = seams.lower_tree(tree, committed, position, reaches, padded_nodes)
        remembered = memory.trees.setdefault((len(tree), committed, position), right)
        # The tokens are right, so that only the structure is of another tree.
        return replace(remembered, token=right.token)

    return replace(_with_memory(seams, memory), lower_tree=lower_tree)


@attended_fault(
    "positions-of-first-lane",
    "family of catalogue BZ-136: row 0 of the batch stands for every row",
    "a batch of unequal prefixes",
)
def positions_of_first(seams: Seams) -> Seams:
    """Positions of every request of the batch count from the root of the first."""
    memory = Memory()

    class PlacedByFirst(Request):
        def propose(self) -> None:
            memory.first = None
            super().propose()

        @property
        def rows(self) -> Rows:
            right = super().rows
            root = int(right.positions[0])
            memory.first = root if memory.first is None else memory.first
            return replace(right, positions=right.positions - root + memory.first)

    return replace(_with_memory(seams, memory), request=PlacedByFirst)


@scored_fault(
    "penalties-of-first-lane",
    "catalogue BZ-144: row 0's processor parameters for the batch",
    "a batch in which a request that samples has other penalties than the first",
)
def penalties_of_first(seams: Seams) -> Seams:
    """Penalties and banned words of the first request of the batch are used for all that sample."""
    memory = Memory()

    class PenaltiesOfFirst(Request):
        def propose(self) -> None:
            memory.first = None
            super().propose()

        def settle(self, flat: Tensor, heads: list[Tensor]) -> None:
            memory.first = memory.first or self.case.sampling
            chance = None if self.block is None else self.block.chance
            if chance is not None and chance.samples:
                settings = {name: getattr(memory.first, name) for name in PENALTIES}
                chance.case = replace(self.case, sampling=replace(self.case.sampling, **settings))
            super().settle(flat, heads)

    return replace(_with_memory(seams, memory), request=PenaltiesOfFirst)


@lowered_fault(
    "joiner-inherits-accepted-length",
    "family of catalogue BZ-049: accepted counts keep values of the former step",
    "a request that leaves after accepting a node, and one that joins",
)
def length_of_leaver(seams: Seams) -> Seams:
    """A request that joins begins with the accepted length that the one before it left in its slot."""
    memory = Memory()

    class JoiningRequest(Request):
        def __init__(self, *args: Any) -> None:
            super().__init__(*args)
            self.position += memory.lengths_left.pop() if memory.lengths_left else 0

        def settle(self, flat: Tensor, heads: list[Tensor]) -> None:
            super().settle(flat, heads)
            self.lease.accepted = self.counters.lengths[-1]  # type: ignore[attr-defined]

    return replace(_with_memory(seams, memory), request=JoiningRequest)


@committed_fault(
    "accepted-length-of-first-lane",
    "family of catalogue BZ-136: row 0 of the batch stands for every row",
    "a batch in which another request accepts more than the first",
)
def accepted_length_of_first(seams: Seams) -> Seams:
    """As many rows are committed for each request of a batch as for its first."""
    memory = Memory()

    class Batch(BatchCache):
        def __init__(self, caches: list[KvCache], rows: list[int], filler: float = 0.0) -> None:
            super().__init__(caches, rows, filler)
            memory.first = None

    def commit(cache: KvCache, path: list[int]) -> str | None:
        memory.first = memory.first or len(path)
        return seams.commit(cache, path[: memory.first])

    return replace(_with_memory(seams, memory), kv=replace(seams.kv, lanes=Batch), commit=commit)


@emitted_fault(
    "one-end-ends-the-batch",
    "family of catalogue BZ-136: row 0 of the batch stands for every row",
    "a batch in which another request than the last meets a stop",
)
def one_ends_all(seams: Seams) -> Seams:
    """When a request of the batch meets a stop, those behind it end as well."""
    memory = Memory()

    class EndingRequest(Request):
        def propose(self) -> None:
            memory.first = None
            super().propose()

        def settle(self, flat: Tensor, heads: list[Tensor]) -> None:
            super().settle(flat, heads)
            memory.first = self.finish = self.finish or memory.first
            # The revealed step must name the same finish as the request.
            last = self.steps[-1]
            assert last.emitted is not None
            self.steps[-1] = replace(last, emitted=replace(last.emitted, finish=self.finish))

    return replace(_with_memory(seams, memory), request=EndingRequest)
