"""The trees that a draft may fill: static, dynamic, by batch size, or ended early.

A static tree has a name where it is full, pruned, or on a published choice list.
"""

import re
from collections.abc import Iterable, Iterator, Mapping, Sequence
from dataclasses import dataclass, field, replace
from difflib import get_close_matches
from functools import cached_property, lru_cache
from heapq import heappop, heappush
from typing import Any, TypeAlias

from specverify.reference.files.json_types import READERS, build
from specverify.reference.malformed import Malformed
from specverify.reference.rules import DRAWS, OMIT_DEFAULT
from specverify.reference.tree import RankTree

MOST_NODES = 4096
"""Most nodes of a named or dynamic tree, the root included."""

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


@dataclass(frozen=True)
class Expansion:
    """A dynamic tree (EAGLE-2, arXiv 2406.16858): its shape follows from the draft's own probabilities.

    The `top_k` best children of the root are the candidates of level 1. Each of the `top_k` best candidates of a level
    gives its `top_k` best children as candidates of the next level, down to level `depth`. The score of a candidate is
    the sum of the log-probabilities along its path, over the tokens that the draft can name, without temperature, added
    in float32 or wider. The tree holds the root and the `total - 1` best candidates of all levels, in the order of
    their numbers.

    Candidates are numbered level by level; within a level by the number of their parent, then from the best child to
    the last. Of equal scores the lower number is better, so that a child whose log-probability rounds to 0 never
    outlives its parent. Of equal logits the lower id is the better child.

    Attributes:
        top_k: The candidates that each expanded node gives, and the nodes of a level that are expanded.
        depth: The number of levels below the root.
        total: The number of nodes, the root included.
        rerank: False for a greedy top-k tree: it holds the `top_k` best candidates of each level in place of the best
            of all, so that `total` is 1 + top_k * depth.
    """

    top_k: int
    depth: int
    total: int
    rerank: bool = field(default=True, metadata=OMIT_DEFAULT)

    def __post_init__(self) -> None:
        for name, least in (("top_k", 1), ("depth", 1), ("total", 2)):
            if getattr(self, name) < least:
                raise Malformed(name, f"{getattr(self, name)} is less than {least}")
        if self.total > min(self.candidates + 1, MOST_NODES):
            most = min(self.candidates + 1, MOST_NODES)
            raise Malformed("total", f"{self.total} nodes; top {self.top_k} over {self.depth} levels give {most}")
        if not self.rerank and self.total != 1 + self.top_k * self.depth:
            num_nodes = 1 + self.top_k * self.depth
            raise Malformed(
                "total", f"{self.total}: without reranking the tree has 1 + top_k * depth = {num_nodes} nodes"
            )

    @property
    def candidates(self) -> int:
        """The number of candidates of all levels."""
        return self.top_k + (self.depth - 1) * self.top_k**2

    @property
    def open_rows(self) -> int:
        """The rows of one proposal in the draft's cache: every expanded node, the root included."""
        return 1 + self.top_k * (self.depth - 1)

    @cached_property
    def outline(self) -> RankTree:
        """A static tree with as many nodes, as deep as the dynamic tree can become; it may take other shapes too."""
        height = min(self.depth, self.total - 1)
        parent, rank, depth = [0, *range(height)], [0] * (height + 1), [*range(height + 1)]
        node = 0
        while len(parent) < self.total:
            # Each node of the first chain has its child of rank 0 already, and gets the others.
            for next_rank in range(1 if node < height else 0, self.top_k if depth[node] < self.depth else 0):
                if len(parent) < self.total:
                    parent.append(node)
                    rank.append(next_rank)
                    depth.append(depth[node] + 1)
            node += 1
        return RankTree(tuple(parent), tuple(rank))

    @property
    def branches(self) -> bool:
        """Whether a node of the dynamic tree may get more than one child; its outline may be a chain all the same."""
        return self.top_k > 1 and self.total > 2

    def simpler(self) -> Iterator["Expansion"]:
        """Dynamic trees with fewer nodes, levels or children; none where a tree would have too few candidates."""
        for top_k, depth in ((self.top_k - 1, self.depth), (self.top_k, self.depth - 1), (self.top_k, self.depth)):
            if top_k and depth:
                most = top_k + (depth - 1) * top_k**2 + 1
                num_nodes = 1 + top_k * depth if not self.rerank else min(self.total, most)
                for total in (num_nodes, num_nodes - 1) if self.rerank else (num_nodes,):
                    if total > 1 and (top_k, depth, total) != (self.top_k, self.depth, self.total):
                        yield replace(self, top_k=top_k, depth=depth, total=total)

    @property
    def description(self) -> str:
        """The tree in a few words for a page."""
        way = "best" if self.rerank else "greedy"
        return f"{self.total} {way} nodes of the top {self.top_k} over {self.depth} level{'s' * (self.depth > 1)}"


@dataclass(frozen=True)
class Dispatch:
    """Static trees, one of which a server takes at each step by the number of requests that step together.

    The source is arXiv 2508.08192: a verify forward of many requests is bound by computation, so that large batches get
    small trees. A step of `n` requests takes the first tree whose bound is at least `n`, and the last tree where no
    bound is.

    The tree depends on the number of requests alone, and not on a token or a coin of the step. Given all earlier
    tokens, each step therefore verifies a static tree, and a rule that is lossless for every tree of the table is
    lossless for the dispatched draft. A request that samples keeps its law in every batch; the tokens that its coins
    give do depend on the batches, as they depend on the tree.

    Attributes:
        up_to: The largest batch of each tree, ascending.
        trees: The tree of each bound.
        batches: The number of requests that step together at each step of a request that is run without a session;
            later steps repeat the last number. Empty: the request steps alone. In a session the actions decide.
    """

    up_to: tuple[int, ...]
    trees: tuple[RankTree, ...]
    batches: tuple[int, ...] = field(default=(), metadata=OMIT_DEFAULT)

    def __post_init__(self) -> None:
        if not self.up_to:
            raise Malformed("up_to", "a table has at least one batch size")
        if len(self.trees) != len(self.up_to):
            raise Malformed("trees", f"{len(self.trees)} trees for {len(self.up_to)} batch sizes")
        if self.up_to[0] < 1 or any(a >= b for a, b in zip(self.up_to, self.up_to[1:], strict=False)):
            raise Malformed("up_to", f"batch sizes ascend from at least 1; these are {list(self.up_to)}")
        if min(self.batches, default=1) < 1:
            raise Malformed("batches", "at least one request takes each step")

    @property
    def description(self) -> str:
        """The table in a few words for a page."""
        return ", ".join(
            f"up to {most}: {tree_description(tree)}" for most, tree in zip(self.up_to, self.trees, strict=True)
        )

    def with_trees(self, trees: tuple[RankTree, ...]) -> "Dispatch":
        """The first rows of the table, with `trees` in place of their own."""
        return replace(self, up_to=self.up_to[: len(trees)], trees=trees)

    def simpler(self) -> Iterator["Dispatch"]:
        """Tables with a row less, and with fewer or smaller batches."""
        for dropped_row in range(len(self.up_to)) if len(self.up_to) > 1 else ():
            kept_rows = [row for row in range(len(self.up_to)) if row != dropped_row]
            up_to = tuple(self.up_to[row] for row in kept_rows)
            trees = tuple(self.trees[row] for row in kept_rows)
            yield replace(self, up_to=up_to, trees=trees)
        for i in range(len(self.batches)):
            yield replace(self, batches=self.batches[:i] + self.batches[i + 1 :])
        for i, size in enumerate(self.batches):
            if size > 1:
                yield replace(self, batches=(*self.batches[:i], size - 1, *self.batches[i + 1 :]))


STOP_TIMES = ("before", "after", "head")
"""The confidences by which a path of `Stopped` may end."""


@dataclass(frozen=True)
class Stopped:
    """A static tree whose paths end where the draft's own confidence falls below a bound.

    A confidence is a probability of the draft's law over the tokens that it can name, without temperature, computed in
    float32 or wider. A node has all its children of the tree, or none. The nodes keep the order of the tree's rows.

    Which child is drafted does not depend on the child, only on the tokens before it. Given these, a step therefore
    verifies a static tree, and the proposal laws are those of its static tree. To withdraw a token by its own
    probability would be another law: `specverify law --stop drop` shows by how much.

    Attributes:
        tree: The tree of a draft that is confident at every node.
        stop_below: The confidence that the draft must reach to go on, between 0 and 1.
        when: One of STOP_TIMES. before: a node has children where the largest probability of its children's law
            reaches the bound (llama.cpp, --draft-p-min; SGLang). after: a node below the root has children where its
            own probability does; its token stays (transformers, assistant_confidence_threshold). head: as before, by
            the probability that the draft's confidence head gives the next token (DSpark, arXiv 2607.05147).
        cumulated: Whether the product of the probabilities along the path is compared, in place of the last one
            (DSpark: the probability that a prefix survives).
    """

    tree: RankTree
    stop_below: float
    when: str = field(default="after", metadata=OMIT_DEFAULT)
    cumulated: bool = field(default=False, metadata=OMIT_DEFAULT)

    def __post_init__(self) -> None:
        if not 0 < self.stop_below < 1:
            raise Malformed("stop_below", f"{self.stop_below} does not lie between 0 and 1")
        if self.when not in STOP_TIMES:
            raise Malformed("when", f"{self.when!r} is none of {', '.join(STOP_TIMES)}")

    @property
    def description(self) -> str:
        """The tree in a few words for a page."""
        which = "product of probabilities along a path" if self.cumulated else "probability"
        places = {"before": "of the best next token", "after": "of a token", "head": "by the confidence head"}
        place = places[self.when]
        return f"{tree_description(self.tree)}, ends below a {which} {place} of {self.stop_below:g}"

    def rows_in_tree(self, children: Sequence[Sequence[int]]) -> tuple[int, ...] | None:
        """The row of `tree` that each row of a drafted tree with these `children` is; None for no part of `tree`."""
        rows = {0: 0}
        level = [0]
        while level:
            for node in level:
                below = children[node]
                places = self.tree.children[rows[node]]
                if below and len(below) != len(places):
                    return None
                rows |= dict(zip(below, places, strict=False))
            level = [child for node in level for child in children[node]]
        ordered = tuple(rows[node] for node in range(len(rows)))
        return ordered if list(ordered) == sorted(ordered) else None

    def simpler(self) -> Iterator["DraftTree"]:
        """The tree without an end, and with the plainer confidence."""
        yield self.tree
        if self.cumulated:
            yield replace(self, cumulated=False)


DraftTree: TypeAlias = RankTree | Expansion | Dispatch | Stopped
"""A static tree of ranks, a dynamic tree, a table of static trees by batch size, or a static tree that ends early."""


def outlines(tree: DraftTree) -> tuple[RankTree, ...]:
    """Static trees as large, as deep and as branched as `tree` can become."""
    if isinstance(tree, Dispatch):
        return tree.trees
    if isinstance(tree, Stopped):
        return (tree.tree,)
    return (tree,) if isinstance(tree, RankTree) else (tree.outline,)


def most_rank(tree: DraftTree) -> int:
    """The largest rank of any node of `tree`, or of any candidate."""
    return tree.top_k - 1 if isinstance(tree, Expansion) else max(max(outline.rank) for outline in outlines(tree))


def open_rows(tree: DraftTree) -> int:
    """The most rows that a proposal of `tree` opens in the draft's cache, the root's included."""
    return tree.open_rows if isinstance(tree, Expansion) else max(map(len, outlines(tree)))


def tree_kind(tree: DraftTree) -> str:
    """The kind of `tree`, one of TREE_KINDS."""
    if isinstance(tree, Dispatch):
        return "dispatched"
    if isinstance(tree, Stopped):
        return "stopped"
    return "static" if isinstance(tree, RankTree) else "dynamic"


TREE_KINDS = ("static", "dynamic", "dispatched", "stopped")
"""The kinds of tree that a draft may fill."""


def read_static_tree(content: str | Mapping[str, Any]) -> RankTree:
    """The static tree that a name or a checked JSON object describes; raises Malformed with the path below it."""
    tree: RankTree = named_tree(content) if isinstance(content, str) else build(RankTree, content)
    return tree


def read_draft_tree(content: str | Mapping[str, Any]) -> DraftTree:
    """The tree that a name or a checked JSON object describes; raises Malformed with the path below it."""
    tree: DraftTree
    if "top_k" in content and not isinstance(content, str):
        tree = build(Expansion, content)
    elif "up_to" in content and not isinstance(content, str):
        tree = build(Dispatch, content)
    elif "stop_below" in content and not isinstance(content, str):
        tree = build(Stopped, content)
    else:
        tree = read_static_tree(content)
    return tree


READERS[RankTree] = read_static_tree
READERS[DraftTree] = read_draft_tree


@dataclass(frozen=True)
class TreeLaw:
    """The facts that a rule is told of the tokens of one kind of tree.

    Attributes:
        name: The kind of tree.
        draws: The ways to name siblings (DRAWS) for which there is a proposal law; a case refuses others.
        proposal: The law that a rule is told for each node, and why no rule is misled by it.
    """

    name: str
    draws: tuple[str, ...]
    proposal: str


TREE_LAWS = (
    TreeLaw(
        "static",
        DRAWS,
        "A best token counts as surely proposed. A drawn token has the draft's law at its parent; without replacement, "
        "that law without the siblings before it.",
    ),
    TreeLaw(
        "product",
        DRAWS,
        "Medusa's law, and that of a block without a Markov head, depends on the depth of a node alone; the children "
        "of each node are drawn from it by coins of their own, so that the proposal laws are those of a static tree.",
    ),
    TreeLaw(
        "batch size",
        DRAWS,
        "The table gives a static tree by the number of requests that step together, before the first coin of the step "
        "is read: given all earlier tokens, each step is one of a static tree.",
    ),
    TreeLaw(
        "stopped",
        DRAWS,
        "A path ends by a confidence that reads the tokens before the next one alone: given these, each step is one of "
        "a static tree.",
    ),
    TreeLaw(
        "dynamic",
        ("top-k",),
        "Nodes and shape follow from the draft's scores alone, and each token counts as surely proposed. Drawn tokens "
        "that are kept by their scores follow no law that a rule could correct.",
    ),
)
"""Every kind of tree. `tests/meta/laws/test_kinds_of_tree.py` enumerates the law of each."""
