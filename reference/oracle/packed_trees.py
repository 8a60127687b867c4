"""Packed trees: the trees of successive steps as one tree, so that one forward scores them all.

The trees of a request hang from one text: each root follows an accepted path of an earlier tree. The packed tree has a
node for each text, wherever it occurs: a row depends on its text alone.
"""

from collections.abc import Sequence
from dataclasses import dataclass, field

from specverify.reference.tree import Tree

PlacedTree = tuple[tuple[int, ...], Tree]
"""A tree with the context that it hangs from."""


Children = dict[tuple[int, int], int]
"""The node that follows another one with a token, by the two; node END is the end of the context."""

END = -1


@dataclass(frozen=True)
class PackedTrees:
    """Trees as one tree behind the context of the first of them.

    Attributes:
        context: That context.
        tree: The tree of all texts; its nodes stand behind their parents.
        children: Its nodes by parent and token.
    """

    context: tuple[int, ...]
    tree: Tree
    children: Children = field(repr=False)

    def nodes_of(self, context: tuple[int, ...], tree: Tree) -> list[int] | None:
        """The node here of each node of `tree` behind `context`; None where a text has none."""
        above = _end_of(self.children, self.context, context)
        if above is None:
            return None
        nodes: dict[int, int] = {}
        for node, parent in _from_root(tree):
            found = self.children.get((above if node == 0 else nodes[parent], tree.token[node]))
            if found is None:
                return None
            nodes[node] = found
        return [nodes[node] for node in range(len(tree))]

    def nodes_along(self, tokens: tuple[int, ...], start: int) -> list[int]:
        """The nodes of `tokens` from place `start` on, as far as there are any."""
        length = len(self.context)
        if start < length or tokens[:length] != self.context:
            return []
        return _path(self.children, tokens[length:])[start - length :]


def placed(context: tuple[int, ...], tree: Tree) -> PackedTrees:
    """A single tree behind `context` as a pack; twins, which have one text, are one node."""
    children: Children = {}
    by_text: dict[int, int] = {}
    for node, parent in _from_root(tree):
        key = END if node == 0 else by_text[parent], tree.token[node]
        by_text[node] = children.setdefault(key, node)
    return PackedTrees(context, tree, children)


def _from_root(tree: Tree) -> list[tuple[int, int]]:
    """The nodes of `tree` with their parents, each behind its parent."""
    nodes = sorted(range(len(tree)), key=lambda node: tree.depth[node])
    return [(node, tree.parent[node]) for node in nodes]


def _path(children: Children, tokens: tuple[int, ...]) -> list[int]:
    """The nodes of the text `tokens` behind the context, as far as there are any."""
    path: list[int] = []
    for token in tokens:
        node = children.get((path[-1] if path else END, token))
        if node is None:
            break
        path.append(node)
    return path


def _end_of(children: Children, context: tuple[int, ...], text: tuple[int, ...]) -> int | None:
    """The node at the end of `text`, which begins with `context`; END for the context itself, None without a node."""
    length = len(context)
    if text[:length] != context:
        return None
    path = _path(children, text[length:])
    if len(path) < len(text) - length:
        return None
    return path[-1] if path else END


def packed(steps: Sequence[PlacedTree], most_rows: int) -> PackedTrees | None:
    """The first trees of `steps` that follow each other, as one tree of at most `most_rows` nodes.

    A tree follows where the trees before it have the nodes of its context. None where no second tree follows.
    """
    context = steps[0][0]
    # By node, in the order in which they were made.
    parents: list[int] = []
    tokens: list[int] = []
    children: Children = {}
    num_trees = 0
    for step_context, tree in steps:
        above = _end_of(children, context, step_context)
        is_second_root = bool(parents) and above == END and (END, tree.token[0]) not in children
        if above is None or is_second_root:
            break
        nodes: dict[int, int] = {}
        new: list[tuple[int, int]] = []
        for node, parent in _from_root(tree):
            key = above if node == 0 else nodes[parent], tree.token[node]
            if key not in children:
                children[key] = len(parents) + len(new)
                new.append(key)
            nodes[node] = children[key]
        if num_trees and len(parents) + len(new) > most_rows:
            for key in new:
                del children[key]
            break
        parents += [max(0, parent) for parent, _ in new]
        tokens += [token for _, token in new]
        num_trees += 1
    return None if num_trees < 2 else PackedTrees(context, Tree(tuple(parents), tuple(tokens)), children)
