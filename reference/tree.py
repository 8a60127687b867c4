"""Tree: the candidate tokens of one speculative step.

Node 0 is the pending root.
"""

from dataclasses import dataclass, fields
from functools import cached_property
from typing import TypeVar

from specverify.reference.malformed import Malformed

ShapeT = TypeVar("ShapeT", bound="Shape")


def check_parents(parent: tuple[int, ...]) -> None:
    """Raise Malformed unless `parent` is one rooted tree in dummy-root form.

    Node 0 is the root and its own parent, so no negative index exists; every other node reaches node 0. A parent may
    stand after its children (EAGLE-Pangu, section on tree tensorization: any order that passes the checks).
    """
    if not parent:
        raise Malformed("parent", "a tree has at least its root")
    if parent[0] != 0:
        raise Malformed("parent[0]", f"the root is its own parent (0), not {parent[0]}")
    for node, parent_node in enumerate(parent):
        if not 0 <= parent_node < len(parent):
            raise Malformed(f"parent[{node}]", f"{parent_node} is not a node of this {len(parent)}-node tree")
    reached = [False] * len(parent)
    reached[0] = True
    # Nodes that are known to reach the root are not walked again.
    for node in range(len(parent)):
        path = []
        ancestor = node
        while not reached[ancestor]:
            if ancestor in path:
                raise Malformed(f"parent[{node}]", "the parents form a circle that never reaches the root")
            path.append(ancestor)
            ancestor = parent[ancestor]
        for walked_node in path:
            reached[walked_node] = True


@dataclass(frozen=True)
class Shape:
    """The parents of a tree without its tokens, and the properties that follow from them."""

    parent: tuple[int, ...]

    def __post_init__(self) -> None:
        check_parents(self.parent)

    def __len__(self) -> int:
        return len(self.parent)

    @cached_property
    def depth(self) -> tuple[int, ...]:
        """Number of edges between the root and each node."""
        known_depths = {0: 0}
        for node in range(len(self)):
            path = [node]
            while path[-1] not in known_depths:
                path.append(self.parent[path[-1]])
            known = path.pop()
            for distance, below in enumerate(reversed(path), start=1):
                known_depths[below] = known_depths[known] + distance
        return tuple(known_depths[node] for node in range(len(self)))

    def path(self, node: int) -> tuple[int, ...]:
        """Nodes from the root to `node`, both included."""
        upwards = [node]
        while node:
            node = self.parent[node]
            upwards.append(node)
        return tuple(reversed(upwards))

    @cached_property
    def children(self) -> tuple[tuple[int, ...], ...]:
        """Children of each node, in row order, which is the order in which rules try them."""
        children: list[list[int]] = [[] for _ in self.parent]
        for node, parent_node in enumerate(self.parent):
            # The root is its own parent and nobody's child.
            if node:
                children[parent_node].append(node)
        return tuple(tuple(nodes) for nodes in children)

    @cached_property
    def branches(self) -> bool:
        """Whether a node has more than one child."""
        return any(len(children) > 1 for children in self.children)

    @cached_property
    def ordered(self) -> bool:
        """Whether each parent comes before its children in row order."""
        return all(parent < node for node, parent in enumerate(self.parent) if node)

    @cached_property
    def leaves(self) -> tuple[int, ...]:
        """Nodes without children, in row order."""
        return tuple(node for node, children in enumerate(self.children) if not children)

    @property
    def height(self) -> int:
        """Depth of the deepest node."""
        return max(self.depth)

    def subtree(self: ShapeT, nodes: list[int]) -> ShapeT:
        """The subtree of `nodes`, in that order, each with its own token or rank.

        `nodes` begins with the root and holds the parent of each of its nodes.
        """
        row_of = {node: row for row, node in enumerate(nodes)}
        values = {
            field.name: tuple(getattr(self, field.name)[node] for node in nodes)
            for field in fields(self)
            if field.name != "parent"
        }
        return type(self)(parent=tuple(row_of[self.parent[node]] for node in nodes), **values)


@dataclass(frozen=True)
class Tree(Shape):
    """A tree of tokens: `parent[i]` and `token[i]` for each node i.

    Node 0 is the root: the last token already emitted, whose KV is not yet written ("root pending"). In a script,
    the engine's own pending token replaces `token[0]` from the second step on.

    >>> Tree(parent=(0, 0, 1), token=(5, 7, 7)).path(2)
    (0, 1, 2)
    """

    token: tuple[int, ...] = ()

    def __post_init__(self) -> None:
        super().__post_init__()
        if len(self.token) != len(self.parent):
            raise Malformed("token", f"{len(self.token)} tokens for {len(self.parent)} nodes")
        for node, token in enumerate(self.token):
            if token < 0:
                raise Malformed(f"token[{node}]", f"{token} is not a token id")

    def with_root(self, root: int) -> "Tree":
        """The same tree with `root` as its pending token."""
        return Tree(self.parent, (root, *self.token[1:]))

    def tokens_to(self, node: int) -> tuple[int, ...]:
        """Tokens from the root to `node`, both included."""
        return tuple(self.token[ancestor] for ancestor in self.path(node))

    def renumber(self, order: tuple[int, ...]) -> "Tree":
        """The same tree with node `order[i]` in row i; `order[0]` must be 0."""
        row_of = {node: row for row, node in enumerate(order)}
        return Tree(tuple(row_of[self.parent[node]] for node in order), tuple(self.token[node] for node in order))

    @property
    def has_twins(self) -> bool:
        """Whether two siblings carry the same token, so that which of them is accepted depends on row order."""
        return any(len({self.token[node] for node in children}) < len(children) for children in self.children)


@dataclass(frozen=True)
class RankTree(Shape):
    """A static tree: node i is the `rank[i]`-th best child (0 = best) of its parent, as in published choice lists.

    A chain has rank 0 everywhere.
    """

    rank: tuple[int, ...] = ()

    def __post_init__(self) -> None:
        super().__post_init__()
        if len(self.rank) != len(self.parent):
            raise Malformed("rank", f"{len(self.rank)} ranks for {len(self.parent)} nodes")
        for node, rank in enumerate(self.rank):
            if rank < 0 or (node == 0 and rank != 0):
                raise Malformed(f"rank[{node}]", f"{rank} is not a rank (the root's is 0)")
        for node, children in enumerate(self.children):
            if len({self.rank[child] for child in children}) < len(children):
                raise Malformed("rank", f"two children of node {node} share a rank")
