"""The lowering of a tree to index tensors, and their structural check.

The tensors hold the ancestor table, positions, validity flags, child and sibling links, masks and padding. They use
dummy-root indexing: row 0 is the root and its own parent.
"""

from collections.abc import Callable
from dataclasses import dataclass
from typing import TypeAlias

import numpy as np
import torch
from torch import Tensor

from specverify.backends.base import StageFailure
from specverify.backends.engine.columns import RowWords
from specverify.backends.engine.reach import Reach
from specverify.reference.trace import Stage
from specverify.reference.tree import Tree

STRUCTURE = (
    "parent outside the tree",
    "depth is not its parent's plus one",
    "valid row under an invalid parent",
    "ancestor outside the tree",
    "ancestor table does not end at the row itself",
    "position outside the model's context",
    "slot outside the branch cache",
)
"""The rules that lowered tensors keep, in the order in which they are checked."""


@dataclass(frozen=True)
class TreeTensors:
    """The lowered tree: tensors over R rows, padding included; see `specverify.reference.trace.Lowered`.

    `lower_tree` makes CPU tensors and the dense masks `visible`. A lowering on a device (`lowering/device.py`) makes
    tensors there, and `words` for each layer in place of `visible`.

    Row 0 is the root and its own parent. 0 also stands for an entry that does not exist, because the root is never a
    child, a sibling or a proper descendant. So no negative index is needed (EAGLE-Pangu, dummy-root indexing).
    """

    token: Tensor
    parent: Tensor
    depth: Tensor
    position: Tensor
    valid: Tensor
    ancestor: Tensor
    visible: list[Tensor]
    slot: Tensor
    next_token: Tensor
    next_sibling: Tensor
    retrieve_index: Tensor
    words: list[RowWords] | None = None

    @property
    def masks(self) -> list[Tensor]:
        """`visible`, or the dense masks of `words` where the tree was lowered to words; layers may share one tensor."""
        if self.words is None:
            return self.visible
        dense = {id(words): words.dense() for words in self.words}
        return [dense[id(words)] for words in self.words]


TreeMasks: TypeAlias = Callable[[Tensor, int, Tensor, int, list[Reach]], list[Tensor]]
"""From the ancestor table, the number of nodes, positions, committed columns and reaches to a mask for each layer."""


def tree_masks(ancestor: Tensor, nodes: int, positions: Tensor, committed: int, reaches: list[Reach]) -> list[Tensor]:
    """For each layer, bool [R, committed + R]: the row sees the prefix and its ancestors inside the layer's reach."""
    rows = len(positions)
    visible = torch.zeros(rows, committed + rows, dtype=torch.bool)
    visible[:nodes, :committed] = True
    ancestry = visible[:, committed:]
    ancestry.diagonal().fill_(True)
    # An entry that does not exist is 0: the root, which each node sees.
    ancestry[:nodes].scatter_(1, ancestor[:nodes], True)
    # A block column stands at its row's position, not at its index: siblings share a position.
    columns = torch.cat([torch.arange(committed), positions])
    # Layers of equal reach share one mask object, which is made once and copied to a trace once.
    distinct = {reach: reach.within(visible, positions, columns) for reach in set(reaches)}
    return [distinct[reach] for reach in reaches]


def lower_tree(
    tree: Tree,
    committed: int,
    position: int,
    reaches: list[Reach],
    padded_nodes: int,
    masks: TreeMasks = tree_masks,
) -> TreeTensors:
    """Lower `tree` for a forward over a cache of `committed` columns; the root of the tree has position `position`.

    Padding rows have token 0, parent 0, and see themselves alone. The tree is padded to `padded_nodes` rows if it has
    fewer. The tables are made as lists: torch's operations on so few numbers took two and a half times as long.
    """
    nodes = len(tree)
    rows = max(nodes, padded_nodes)
    padding = [0] * (rows - nodes)
    paths = _paths(tree.parent)
    # One entry for each depth; an entry below the node, and a padding row, are 0.
    table = [path + [0] * (max(map(len, paths)) - len(path)) for path in paths]
    ancestor = torch.from_numpy(np.array(table + [[0] * len(table[0])] * len(padding)))
    depth = torch.tensor([len(path) - 1 for path in paths] + padding)
    row_numbers = torch.arange(rows)
    return TreeTensors(
        token=torch.tensor((*tree.token, *padding)),
        parent=torch.tensor((*tree.parent, *padding)),
        depth=depth,
        position=position + depth,
        valid=row_numbers < nodes,
        ancestor=ancestor,
        visible=masks(ancestor, nodes, position + depth, committed, reaches),
        slot=committed + row_numbers,
        next_token=torch.tensor(_first_children(tree.parent) + padding),
        next_sibling=torch.tensor(_next_siblings(tree.parent) + padding),
        retrieve_index=row_numbers[:nodes],
    )


def _paths(parent: tuple[int, ...]) -> list[list[int]]:
    """The rows from the root down to each row; a parent may come after its children in row order.

    `Tree` refuses parents that form a circle, so that each walk ends.
    """
    paths = list[list[int]]()
    for row in range(len(parent)):
        upwards = [row]
        while upwards[-1]:
            upwards.append(parent[upwards[-1]])
        paths.append(upwards[::-1])
    return paths


def _first_children(parent: tuple[int, ...]) -> list[int]:
    first = [0] * len(parent)
    for row in range(len(parent) - 1, 0, -1):  # backwards, so that the first child in row order is written last
        first[parent[row]] = row
    return first


def _next_siblings(parent: tuple[int, ...]) -> list[int]:
    sibling = [0] * len(parent)
    latest: dict[int, int] = {}
    for row, parent_row in enumerate(parent):
        if row:
            if parent_row in latest:
                sibling[latest[parent_row]] = row
            latest[parent_row] = row
    return sibling


def check_structure(tensors: TreeTensors, committed: int, max_positions: int) -> None:
    """Check the structure of lowered tensors before any kernel reads them, as the EAGLE-Pangu paper does on Ascend.

    An accelerator would read an index out of bounds without notice.

    Raises:
        StageFailure: at stage lowered, naming the first broken rule and its row.
    """
    refuse_broken(broken_rules(tensors, committed, max_positions))


def broken_rules(tensors: TreeTensors, committed: int, max_positions: int) -> Tensor:
    """Whether each row breaks each rule of STRUCTURE, bool [rules, R], on the device of the tensors."""
    rows = len(tensors.parent)
    device = tensors.parent.device
    row_numbers = torch.arange(rows, device=device)
    below_root = tensors.valid & (row_numbers > 0)
    table = tensors.ancestor
    at_depth = table.gather(1, tensors.depth.clamp(0, table.shape[1] - 1)[:, None])[:, 0]
    # `% rows` and `clamp` only keep the checks themselves in bounds: a wrong index breaks a rule of its own.
    return torch.stack(
        [
            (tensors.parent < 0) | (tensors.parent >= rows),
            below_root & (tensors.depth != tensors.depth[tensors.parent % rows] + 1),
            below_root & ~tensors.valid[tensors.parent % rows],
            ((table < 0) | (table >= rows)).any(1),
            tensors.valid & (at_depth != row_numbers),
            (tensors.position < 0) | (tensors.position >= max_positions),
            (tensors.slot < committed) | (tensors.slot >= committed + rows),
        ]
    )


def refuse_broken(broken: Tensor) -> None:
    """Raise if a row breaks a rule; `broken` is what `broken_rules` returned, read in one transfer.

    Raises:
        StageFailure: at stage lowered, naming the first broken rule and its row.
    """
    for rule, rows in zip(STRUCTURE, broken.tolist(), strict=True):
        if any(rows):
            raise StageFailure(Stage.LOWERED, f"row {rows.index(True)}: {rule}")
