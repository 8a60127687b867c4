"""Static trees by name: full, pruned, and published choice lists."""

import re
from collections.abc import Iterable, Iterator, Mapping
from difflib import get_close_matches
from functools import lru_cache
from heapq import heappop, heappush

from specverify.reference.draft_trees.expansion import MOST_NODES
from specverify.reference.malformed import Malformed
from specverify.reference.tree import RankTree

Ranks = tuple[int, ...]
"""The ranks along a path below the root."""

CHOICES: Mapping[str, Mapping[Ranks, int]] = {
    "medusa-mc_sim_7b_63": {
        (): 10, (0,): 10, (1,): 7, (2,): 3, (3,): 2, **{(rank,): 1 for rank in range(4, 10)},
        (0, 0): 10, (0, 1): 3, (0, 2): 2, **{(0, rank): 1 for rank in range(3, 8)}, (1, 0): 2, (2, 0): 1, (0, 0, 0): 2,
    },
    "eagle-mc_sim_7b_63": {
        (): 4, (0,): 3, (1,): 2, (2,): 2, (3,): 1, (0, 0): 3, (0, 1): 2, (0, 2): 2, (1, 0): 1, (0, 0, 0): 3,
        (0, 0, 0, 0): 2,
    },
}  # fmt: skip
"""Published choice lists, as the number of children of each node with children.

The children have the ranks from 0 on. Medusa's list (FasterDecoding/Medusa, medusa_choices.py) has 63 nodes below the
root. EAGLE-1's (SafeAILab/EAGLE, choices.py) bears the same name and has 25.
"""

_NAME = re.compile(r"D_?([1-9]\d{0,3})(?:-BF_?([1-9]\d{0,3})(?:-N_?([1-9]\d{0,3}))?)?")


def named_tree(name: str) -> RankTree:
    """The static tree of this name.

    `Dm` is a chain of `m` levels. `Dm-BFn` is the full tree of `m` levels below the root, in which each inner node has
    `n` children. `Dm-BFn-Ni` holds `i` of its nodes, the root included: those whose ranks along their paths have the
    least sum; of equal sums the shallower, then the one with the better first ranks. An underscore may stand before
    each number (`D_4-BF_2`). Other names are keys of CHOICES.

    Raises:
        Malformed: No tree has this name, and the nearest name is told; or the tree has fewer nodes than it names, or
            more than MOST_NODES.
    """
    if name in CHOICES:
        children = CHOICES[name]
        return tree_of_paths((*path, rank) for path, count in children.items() for rank in range(count))
    match = _NAME.fullmatch(name)
    if match is None:
        nearest = _nearest_name(name)
        hint = f"; did you mean {nearest}?" if nearest else ""
        raise Malformed("", f"{name!r} is not Dm, Dm-BFn, Dm-BFn-Ni or one of {', '.join(CHOICES)}{hint}")
    levels, width, num_nodes = (None if number is None else int(number) for number in match.groups())
    assert levels is not None
    return _pruned_tree(name, levels, width or 1, num_nodes)


def _nearest_name(name: str) -> str | None:
    """The name most like `name`: a published list, or a name with the numbers that stand in `name`."""
    numbers = [str(int(number)) for number in re.findall(r"\d{1,4}", name)[:3]]
    marks = ("D", "-BF", "-N")
    completed_name = "".join(mark + number for mark, number in zip(marks, numbers, strict=False) if number != "0")
    known_names = [*CHOICES, *([completed_name] if _NAME.fullmatch(completed_name) else [])]
    names_by_lower = {known_name.lower(): known_name for known_name in known_names}
    matches = get_close_matches(name.lower(), names_by_lower, n=1, cutoff=0.4)
    return names_by_lower[matches[0]] if matches else None


@lru_cache(maxsize=256)
def name_of(tree: RankTree) -> str | None:
    """The name of `tree`, the shortest if it has several; None for a tree without a name, and for the bare root."""
    return next((name for name in _names_for(tree) if named_tree(name) == tree), None)


def _names_for(tree: RankTree) -> Iterator[str]:
    """The names that a tree of this size, height and width can have."""
    nodes, levels, width = len(tree), tree.height, max(tree.rank) + 1
    if not levels:
        return
    if width == 1:
        yield f"D{levels}"
        return
    full = sum(width**depth for depth in range(levels + 1))
    if nodes == full:
        yield f"D{levels}-BF{width}"
    elif nodes < full:
        yield f"D{levels}-BF{width}-N{nodes}"
    yield from (name for name in CHOICES if len(named_tree(name)) == nodes)


def tree_description(tree: RankTree) -> str:
    """A static tree in a few words for a page: its size, and its name where it has one."""
    name = name_of(tree)
    return f"{len(tree)} node{'s' * (len(tree) > 1)}" + (f" ({name})" if name else "")


def _pruned_tree(name: str, levels: int, width: int, num_nodes: int | None) -> RankTree:
    """The first `num_nodes` nodes of the full tree, or all of them."""
    paths: list[Ranks] = []
    heap: list[tuple[int, int, Ranks]] = [(0, 0, ())]
    while heap and len(paths) != num_nodes:
        if len(paths) == MOST_NODES:
            raise Malformed("", f"{name} has more than {MOST_NODES} nodes")
        # A child has at least its parent's sum and is deeper: no parent comes after its child.
        total, depth, path = heappop(heap)
        paths.append(path)
        for rank in range(width) if depth < levels else ():
            heappush(heap, (total + rank, depth + 1, (*path, rank)))
    if num_nodes is not None and len(paths) < num_nodes:
        raise Malformed("", f"{name}: the full tree has {len(paths)} nodes")
    return tree_of_paths(paths[1:])


def tree_of_paths(paths: Iterable[Ranks]) -> RankTree:
    """The static tree with a node for each of `paths`, level by level and then by rank, as choice lists are read.

    Raises:
        Malformed: The parent of a node is missing.
    """
    rows: list[Ranks] = [(), *sorted(set(paths) - {()}, key=lambda path: (len(path), path))]
    place = {path: row for row, path in enumerate(rows)}
    for path in rows[1:]:
        if path[:-1] not in place:
            raise Malformed("", f"the path {list(path)} has no parent")
    return RankTree(tuple(place[path[:-1]] for path in rows), tuple(path[-1] if path else 0 for path in rows))
