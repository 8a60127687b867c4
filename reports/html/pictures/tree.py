"""The picture of a tree of drafted tokens: places of nodes and edges for an SVG.

The root stands on the left, deeper nodes to the right of it, and the branches one below the other.
"""

from collections import Counter
from dataclasses import dataclass

from specverify.reference.tree import Tree
from specverify.reports.drawing import LEVELS, drawn_ancestors, drawn_nodes
from specverify.reports.format import plural
from specverify.reports.tree_scene import Scene

STEP, LINE = 168, 58
"""Pixels from one depth to the next, and from one leaf to the next."""

WIDE, HIGH = 128, 38
"""Pixels of the box of a node."""

EDGE = 20
"""Pixels between the outermost nodes and the frame, with room for a mark above a node."""

MOST = 14
"""The largest tree, in nodes, that is drawn whole at first."""

MOST_WHOLE = 128
"""The largest tree that is drawn whole for a reader who asks."""

ACCEPTED, REJECTED, PROPOSED = "accepted", "rejected", "proposed"
"""The states of a node: taken over into the output, thrown away, or not known."""


@dataclass(frozen=True)
class Node:
    """A node: its number, token and state, and its place in pixels.

    Attributes:
        state: One of ACCEPTED, REJECTED, PROPOSED.
        here: Whether the finding is about this node.
        x, y: The place of the upper left corner of its box.
        below: The number of nodes below it that are not drawn.
        due: `must be accepted` or `must be rejected` where its state is the wrong one, else empty.
    """

    number: int
    token: int
    state: str
    here: bool
    x: int
    y: int
    below: int = 0
    due: str = ""

    @property
    def words(self) -> str:
        """The node in words."""
        mark = f", {self.due}" if self.due else ""
        mark += ", the node of the difference" if self.here else ""
        return f"node {self.number}, token {self.token}, {self.state}{mark}"


@dataclass(frozen=True)
class Edge:
    """The line from the box of a node to that of one below it; `gap` if nodes between the two are not drawn."""

    x1: int
    y1: int
    x2: int
    y2: int
    accepted: bool
    gap: bool


@dataclass(frozen=True)
class Sight:
    """A red arrow from a node to another one which it sees, or misses, against the rules."""

    x1: int
    y1: int
    x2: int
    y2: int
    bend: int
    words: str


@dataclass(frozen=True)
class TreePicture:
    """The picture, with its size in pixels.

    Attributes:
        title: What the tree is, in a few words.
        description: The whole tree in words.
        nodes, edges: The parts that are drawn.
        sight: The arrow of a wrong cell of the mask, where both of its nodes are drawn.
        left_out: The number of nodes that are not drawn.
        width, height: The size in pixels.
    """

    title: str
    description: str
    nodes: tuple[Node, ...]
    edges: tuple[Edge, ...]
    sight: Sight | None
    left_out: int
    width: int
    height: int

    @property
    def states(self) -> list[str]:
        """The states that occur, in the order of the legend."""
        shown_states = {node.state for node in self.nodes}
        return [state for state in (ACCEPTED, REJECTED, PROPOSED) if state in shown_states]


def tree_picture(
    scene: Scene,
    title: str,
    wrong_cell: tuple[int, int, bool] | None = None,
    due_path: tuple[int, ...] | None = None,
    most: int = MOST,
) -> TreePicture | None:
    """The picture of a scene's tree, or None where no tree is known.

    Args:
        scene: The tree with its accepted path and its marked node.
        title: What the tree is, in a few words.
        wrong_cell: A wrong cell of the mask: a node, the node that it sees or misses, and whether it sees it. The first
            of them is then the marked node.
        due_path: The path that must be accepted, where that is known and differs.
        most: The approximate limit of drawn nodes.
    """
    tree = scene.tree
    if tree is None:
        return None
    here = scene.node if wrong_cell is None else wrong_cell[0]
    drawn = drawn_nodes(tree, scene.path or (), here, most, LEVELS if most == MOST else most)
    ancestors = drawn_ancestors(tree, drawn)
    num_hidden = Counter(ancestors[node] for node in range(len(tree)) if node not in drawn)
    places = _places(tree, drawn, ancestors)
    nodes = tuple(
        Node(
            node,
            tree.token[node],
            _state(scene, node),
            node == here,
            *places[node],
            num_hidden[node],
            _due_words(scene, node, due_path),
        )
        for node in sorted(drawn)
    )
    accepted = set(scene.path or ())
    edges = tuple(
        Edge(
            places[ancestors[node]][0] + WIDE,
            places[ancestors[node]][1] + HIGH // 2,
            places[node][0],
            places[node][1] + HIGH // 2,
            {node, ancestors[node]} <= accepted,
            ancestors[node] != tree.parent[node],
        )
        for node in sorted(drawn)
        if node
    )
    return TreePicture(
        title,
        _description(nodes, len(tree) - len(drawn)),
        nodes,
        edges,
        _sight(wrong_cell, places),
        len(tree) - len(drawn),
        max(x for x, _ in places.values()) + WIDE + 64,
        max(y for _, y in places.values()) + HIGH + 8,
    )


def _sight(wrong_cell: tuple[int, int, bool] | None, places: dict[int, tuple[int, int]]) -> Sight | None:
    if wrong_cell is None or wrong_cell[0] == wrong_cell[1] or not {wrong_cell[0], wrong_cell[1]} <= set(places):
        return None
    (x1, y1), (x2, y2) = places[wrong_cell[0]], places[wrong_cell[1]]
    words = f"node {wrong_cell[0]} {'sees' if wrong_cell[2] else 'misses'} node {wrong_cell[1]}"
    # Beside the boxes, where no edge runs: at the right end of both.
    return Sight(x1 + WIDE, y1 + HIGH // 2, x2 + WIDE, y2 + HIGH // 2, max(x1, x2) + WIDE + 44, words)


def _due_words(scene: Scene, node: int, due_path: tuple[int, ...] | None) -> str:
    if due_path is None or scene.path is None or (node in due_path) == (node in scene.path):
        return ""
    return "must be accepted" if node in due_path else "must be rejected"


def _state(scene: Scene, node: int) -> str:
    if scene.path is None:
        return PROPOSED
    return ACCEPTED if node in scene.path else REJECTED


def _places(tree: Tree, drawn: set[int], ancestors: dict[int, int]) -> dict[int, tuple[int, int]]:
    """The corner of each drawn node: leaves on lines of their own, any other node in the middle of its children."""
    children_of: dict[int, list[int]] = {node: [] for node in drawn}
    level = {0: 0}
    for node in sorted(drawn - {0}, key=lambda drawn_node: (tree.depth[drawn_node], drawn_node)):
        children_of[ancestors[node]].append(node)
        level[node] = level[ancestors[node]] + 1
    line: dict[int, float] = {}
    next_line = 0
    # Depth first without recursion: a chain may be longer than Python's stack.
    stack = [(0, False)]
    while stack:
        node, is_entered = stack.pop()
        children = children_of[node]
        if not children:
            line[node], next_line = float(next_line), next_line + 1
        elif is_entered:
            line[node] = (line[children[0]] + line[children[-1]]) / 2
        else:
            stack.append((node, True))
            stack += [(child, False) for child in reversed(children)]
    return {node: (EDGE + STEP * level[node], EDGE + round(LINE * line[node])) for node in drawn}


def _description(nodes: tuple[Node, ...], left_out: int) -> str:
    parts = [node.words for node in nodes]
    parts += [f"{plural(left_out, 'node')} left out"] if left_out else []
    return "; ".join(parts) + "."
