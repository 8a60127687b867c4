"""ExecuTorch: trees and chains on a static KV cache, by its Python runtime.

The program (`backends/adapt/export/executorch_program.py`) takes slots and a mask with every forward. Two ways to use
them are adapters. In `executorch-tree` a committed row stays in the slot where the tree wrote it, and rejected rows
leave their slots to later trees. In `executorch-overwrite` the slot of a row is its position, as in ExecuTorch's plan
for EAGLE-3: the next forward writes over the rows of rejected tokens, so that the cache is rewound by its length alone,
and trees are chains.
"""

from collections.abc import Sequence
from dataclasses import replace
from functools import lru_cache

import torch
from executorch.runtime import Runtime

from specverify.backends.adapt import exported
from specverify.backends.adapt.drafting import DRAFTS
from specverify.backends.adapt.export.executorch_program import ROPES, ROWS, SLOTS, save_executorch
from specverify.backends.adapt.greedy_trees import GreedyTrees
from specverify.backends.base import Declaration
from specverify.reference.trace import Stage
from specverify.reference.tree import Tree

OPEN_PROGRAMS = 16
"""Programs that stay open, each with a cache of its own."""

HIDDEN = -1e9
"""The number that is added to the score of a slot that a row does not see."""

LONGEST = SLOTS - 192
"""The most tokens of a request: the slots beside them are for a tree of 160 nodes, and for idle rows."""


class Engine:
    """An open program, and the slots of the committed rows.

    Attributes:
        held_slots: The slot of each committed row, in the order of the text.
    """

    def __init__(self, checkpoint: str) -> None:
        program = Runtime.get().load_program(exported(save_executorch, checkpoint))
        method = program.load_method("forward")
        assert method is not None, "an exported program has the method forward"
        self._program = program
        self._method = method  # the method does not keep its program alive
        self.held_slots: list[int] = []
        self._slots: list[int] = []

    def begin(self, prefix: Sequence[int]) -> None:
        """See `TreeForwards`; what the cache holds of other requests is never seen."""
        self.held_slots = list(range(len(prefix)))
        self.forward(
            prefix, range(len(prefix)), self.held_slots, [self.held_slots[: row + 1] for row in self.held_slots]
        )

    def verify(self, tree: Tree, length: int) -> torch.Tensor:
        """See `TreeForwards`."""
        self._slots = self.slots_for(tree, length)
        visible_slots = [[*self.held_slots, *(self._slots[up] for up in tree.path(node))] for node in range(len(tree))]
        return self.forward(tree.token, [length + depth for depth in tree.depth], self._slots, visible_slots)

    def keep(self, path: Sequence[int]) -> None:
        """See `TreeForwards`; the rows stay where they are."""
        self.held_slots += [self._slots[node] for node in path]

    def slots_for(self, tree: Tree, length: int) -> list[int]:
        """The slot that each node writes: the lowest free ones."""
        occupied_slots = set(self.held_slots)
        free = (slot for slot in range(SLOTS - ROWS) if slot not in occupied_slots)
        return [next(free) for _ in range(len(tree))]

    def forward(
        self,
        tokens: Sequence[int],
        positions: Sequence[int],
        slots: Sequence[int],
        visible_slots: Sequence[Sequence[int]],
    ) -> torch.Tensor:
        """Logits [rows, vocabulary] of rows that write `slots` and see `visible_slots`, in as many calls as it takes.

        A row may see slots of rows before it. Idle rows of the last call write the last slots, which nothing sees.
        """
        answers = []
        for first in range(0, len(tokens), ROWS):
            here = range(first, min(first + ROWS, len(tokens)))
            idle = ROWS - len(here)
            mask = torch.full((ROWS, SLOTS), HIDDEN)
            mask[:, SLOTS - 1] = 0.0  # an idle row sees one slot, since a softmax needs one
            for row, number in enumerate(here):
                mask[row, SLOTS - 1] = HIDDEN
                mask[row, torch.tensor(visible_slots[number])] = 0.0
            inputs = (
                torch.tensor([*(tokens[number] for number in here), *[0] * idle]),
                torch.tensor([*(positions[number] for number in here), *[0] * idle]),
                torch.tensor([*(slots[number] for number in here), *(SLOTS - 1 - index for index in range(idle))]),
                mask,
            )
            (logits,) = self._method.execute(inputs)
            answers.append(logits[: len(here)].clone())  # the runtime writes the next answer to the same memory
        return torch.cat(answers) if answers else torch.empty(0, 0)


class OverwritingEngine(Engine):
    """An open program in which the slot of a row is its position."""

    def slots_for(self, tree: Tree, length: int) -> list[int]:
        """See `Engine`; chains alone have one node at each position."""
        return [length + depth for depth in tree.depth]


@lru_cache(maxsize=OPEN_PROGRAMS)
def engine(checkpoint: str) -> Engine:
    """The open program of a checkpoint directory."""
    return Engine(checkpoint)


@lru_cache(maxsize=OPEN_PROGRAMS)
def open_overwriting_engine(checkpoint: str) -> OverwritingEngine:
    """The open program of a checkpoint directory, for chains."""
    return OverwritingEngine(checkpoint)


DECLARATION = Declaration(
    name="executorch-tree",
    device="cpu",
    reveals=frozenset({Stage.DRAFTED, Stage.SCORED, Stage.ACCEPTED, Stage.EMITTED}),
    dtypes=("float32",),
    drafts=DRAFTS,
    layout_settings=(),
    max_temperature=0.0,
    stops=("max_new_tokens", "eos", "stop_tokens"),
    families=("llama", "pangu", "qwen2", "qwen3", "mistral"),
    ropes=ROPES,
    least_window=0,
    soft_caps="none",
    sinks=False,
    indexed=False,
    longest=LONGEST,
)


def open_tree() -> GreedyTrees:
    """The backend whose committed rows stay where the tree wrote them."""
    return GreedyTrees(DECLARATION, engine)


def open_overwrite() -> GreedyTrees:
    """The backend whose rows lie at their positions."""
    return GreedyTrees(replace(DECLARATION, name="executorch-overwrite", trees="chains"), open_overwriting_engine)
