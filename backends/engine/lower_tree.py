"""A tree as index tensors: dummy-root indexing, ancestor table, positions, validity, links, masks, padding."""

from dataclasses import dataclass

import torch
from torch import Tensor

from backends.base import StageFailure
from backends.engine.reach import Reach
from reference.trace import Stage
from reference.tree import Tree


@dataclass(frozen=True)
class TreeTensors:
    """The lowered tree: CPU tensors over R rows, padding included; fields as `reference.trace.Lowered` names them.

    Row 0 is the root and its own parent, and 0 stands wherever an entry does not exist: the root is nobody's child,
    sibling or proper descendant, so no negative index is ever needed (EAGLE-Pangu, dummy-root indexing).
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


def tensorise(tree: Tree, committed: int, position: int, reaches: list[Reach], padded_nodes: int) -> TreeTensors:
    """Lower `tree` for a forward over a cache of `committed` columns whose root stands at `position`.

    Parents may come after their children: depths and ancestors come from lifting all rows at once until every one
    has reached the root. Padding rows hang nowhere: token 0, parent 0, seeing nothing but themselves.
    """
    nodes = len(tree)
    rows = max(nodes, padded_nodes)
    spare = rows - nodes
    parent = torch.tensor((*tree.parent, *[0] * spare))
    valid = torch.arange(rows) < nodes
    lifts = [torch.arange(rows)]
    while bool((lifts[-1][:nodes] != 0).any()):
        if len(lifts) > rows:
            raise StageFailure(Stage.LOWERED, "the parents form a circle that never reaches the root")
        lifts.append(parent[lifts[-1]])
    lift = torch.stack(lifts)
    depth = (lift != 0).sum(0) * valid
    levels = torch.arange(len(lifts))
    climb = depth[:, None] - levels[None]
    ancestor = torch.where(climb >= 0, lift[climb.clamp(min=0), torch.arange(rows)[:, None]], 0)
    ancestor = ancestor * valid[:, None]
    positions = position + depth
    return TreeTensors(
        token=torch.tensor((*tree.token, *[0] * spare)),
        parent=parent,
        depth=depth,
        position=positions,
        valid=valid,
        ancestor=ancestor,
        visible=_visible(ancestor, depth, valid, positions, committed, reaches),
        slot=committed + torch.arange(rows),
        next_token=_first_children(parent, nodes),
        next_sibling=_next_siblings(parent, nodes),
        retrieve_index=torch.arange(nodes),
    )


def _visible(
    ancestor: Tensor, depth: Tensor, valid: Tensor, positions: Tensor, committed: int, reaches: list[Reach]
) -> list[Tensor]:
    """For each layer, bool [R, committed + R]: the prefix and the row's own ancestors, inside the layer's reach."""
    rows = len(depth)
    ancestry = torch.eye(rows, dtype=torch.bool)
    own = torch.arange(ancestor.shape[1])[None] <= depth[:, None]
    ancestry[torch.arange(rows)[:, None].expand_as(own)[own], ancestor[own]] = True
    ancestry[~valid] = torch.eye(rows, dtype=torch.bool)[~valid]
    seen = torch.cat([valid[:, None].expand(rows, committed), ancestry], 1)
    columns = torch.cat([torch.arange(committed), positions])
    distinct = {reach: reach.within(seen, positions, columns) for reach in set(reaches)}
    return [distinct[reach] for reach in reaches]


def _first_children(parent: Tensor, nodes: int) -> Tensor:
    first = torch.zeros_like(parent)
    for row in range(nodes - 1, 0, -1):
        first[parent[row]] = row
    return first


def _next_siblings(parent: Tensor, nodes: int) -> Tensor:
    sibling = torch.zeros_like(parent)
    latest: dict[int, int] = {}
    for row, up in enumerate(parent[:nodes].tolist()):
        if row:
            if up in latest:
                sibling[latest[up]] = row
            latest[up] = row
    return sibling


def check_structure(tensors: TreeTensors, committed: int, max_positions: int) -> None:
    """The checks of the Ascend paper before any kernel: what an accelerator would read out of bounds stops here.

    Raises:
        StageFailure: at stage lowered, naming the first broken rule and its row.
    """
    rows = len(tensors.parent)
    row_numbers = torch.arange(rows)
    own = tensors.valid & (row_numbers > 0)
    table = tensors.ancestor
    at_depth = table.gather(1, tensors.depth.clamp(0, table.shape[1] - 1)[:, None])[:, 0]
    rules = {
        "parent outside the tree": (tensors.parent < 0) | (tensors.parent >= rows),
        "depth is not its parent's plus one": own & (tensors.depth != tensors.depth[tensors.parent % rows] + 1),
        "valid row under an invalid parent": own & ~tensors.valid[tensors.parent % rows],
        "ancestor outside the tree": ((table < 0) | (table >= rows)).any(1),
        "ancestor table does not end at the row itself": tensors.valid & (at_depth != row_numbers),
        "position outside the model's context": (tensors.position < 0) | (tensors.position >= max_positions),
        "slot outside the branch cache": (tensors.slot < committed) | (tensors.slot >= committed + rows),
    }
    for rule, broken in rules.items():
        if bool(broken.any()):
            raise StageFailure(Stage.LOWERED, f"row {int(broken.nonzero()[0])}: {rule}")
