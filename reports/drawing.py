"""The drawing of a tree as text: node numbers, tokens, and accepted nodes.

A mark points to the node of the finding.
"""

from collections import Counter
from collections.abc import Iterable, Sequence

from rich.text import Text
from rich.tree import Tree as Branches

from specverify.reference.tree import Tree
from specverify.reports.format import plural
from specverify.reports.layout80 import plain_text

MARK = "◀"
"""The mark of the node at which the difference lies."""

ROWS = 20
"""The largest tree, in nodes, that is drawn whole, unless it is too deep."""

LEVELS = 8
"""The deepest tree that is drawn whole; each level takes four columns."""


def draw(tree: Tree, accepted: Sequence[int] | None = None, marked: int | None = None, rows: int = ROWS) -> str:
    """The tree, one line per node, with children below their parent in row order.

    Without `accepted` no node is called accepted or REJECTED. In a tree of more than about `rows` nodes only the marked
    node, its path, its neighbours and the accepted path are drawn; `(+N below)` and `… N nodes left out` count every
    other node once.
    """
    drawn = drawn_nodes(tree, accepted or (), marked, rows)
    ancestors = drawn_ancestors(tree, drawn)
    left_out = Counter(ancestor for node, ancestor in ancestors.items() if node not in drawn)
    bridges = {
        node: ancestor
        for node, ancestor in ancestors.items()
        if node in drawn and node and ancestor != tree.parent[node]
    }
    bridged = _bridge_sizes(tree, drawn, bridges)
    picture: dict[int, Branches] = {}
    gaps: dict[tuple[int, int], Branches] = {}
    for node in sorted(drawn, key=lambda drawn_node: (tree.depth[drawn_node], drawn_node)):
        hidden = left_out[node] - sum(size for (ancestor, _), size in bridged.items() if ancestor == node)
        label = Text(_label(tree, node, accepted, marked, hidden))
        if node == 0:
            picture[node] = Branches(label, highlight=False)
        elif node in bridges:
            # One line for each gap, below which all drawn nodes of the left-out subtree hang.
            key = (bridges[node], _first_below(tree, node, bridges[node]))
            if key not in gaps:
                gaps[key] = picture[key[0]].add(Text(f"… {plural(bridged[key], 'node')} left out"))
            picture[node] = gaps[key].add(label)
        else:
            picture[node] = picture[tree.parent[node]].add(label)
    _sort_by_row(picture, gaps, tree)
    # Wider than a page, because the page folds the drawing's long lines itself.
    text = plain_text(picture[0], width=400)
    hidden = len(tree) - len(drawn)
    return text + (f"{hidden} of {len(tree)} nodes left out\n" if hidden else "")


def _label(tree: Tree, node: int, accepted: Sequence[int] | None, marked: int | None, hidden: int) -> str:
    """The line of one node."""
    words = [f"{node} token {tree.token[node]}"]
    if accepted is not None:
        words.append("accepted" if node in accepted else "REJECTED")
    if hidden:
        words.append(f"(+{hidden} below)")
    if node == marked:
        words.append(MARK)
    return "  ".join(words)


def drawn_nodes(tree: Tree, accepted: Iterable[int], marked: int | None, rows: int, levels: int = LEVELS) -> set[int]:
    """The nodes that are drawn: all of a small tree, otherwise those around the marked node and the accepted path."""
    all_nodes = set(range(len(tree)))
    if len(tree) <= rows and tree.height <= levels:
        return all_nodes
    drawn = {0}
    accepted_path = list(accepted)
    # The path's beginning and its end.
    drawn.update(accepted_path[:3], accepted_path[-1:])
    if marked is not None:
        path = tree.path(marked)
        drawn.update(path[:2], path[-3:])
        family = tree.children[tree.parent[marked]] if marked else ()
        if family:
            index = family.index(marked)
            drawn.update(family[max(0, index - 2) : index + 3])
    # The top of the tree fills up to half of the room.
    for node in sorted(all_nodes, key=lambda top_node: (tree.depth[top_node], top_node)):
        if len(drawn) >= rows // 2 or tree.depth[node] > 2:
            break
        drawn.add(node)
    # A row saying that one node is left out would take the room of that node.
    ancestors = drawn_ancestors(tree, drawn)
    lone_siblings = {tree.parent[node] for node in drawn if node and tree.parent[tree.parent[node]] == ancestors[node]}
    return drawn | {node for node in lone_siblings if node not in drawn and len(tree.children[node]) == 1}


def drawn_ancestors(tree: Tree, drawn: set[int]) -> dict[int, int]:
    """The nearest drawn proper ancestor of every node; the root's is the root."""
    ancestors = {0: 0}
    for node in sorted(range(1, len(tree)), key=lambda descendant: tree.depth[descendant]):
        parent = tree.parent[node]
        ancestors[node] = parent if parent in drawn else ancestors[parent]
    return ancestors


def _first_below(tree: Tree, node: int, ancestor: int) -> int:
    """The child of `ancestor` on the way down to `node`."""
    while tree.parent[node] != ancestor:
        node = tree.parent[node]
    return node


def _bridge_sizes(tree: Tree, drawn: set[int], bridges: dict[int, int]) -> dict[tuple[int, int], int]:
    """The number of left-out nodes in each subtree that is left out above drawn nodes."""
    tops = {(ancestor, _first_below(tree, node, ancestor)) for node, ancestor in bridges.items()}
    counts: Counter[tuple[int, int]] = Counter()
    for ancestor, top in tops:
        stack = [top]
        while stack:
            node = stack.pop()
            if node not in drawn:
                counts[ancestor, top] += 1
                stack.extend(tree.children[node])
    return counts


def _sort_by_row(picture: dict[int, Branches], gaps: dict[tuple[int, int], Branches], tree: Tree) -> None:
    """Sort siblings, and the gaps that stand for siblings, by their rows."""
    row = {id(branch): node for node, branch in picture.items()}
    row.update({id(branch): top for (_, top), branch in gaps.items()})
    for branch in (*picture.values(), *gaps.values()):
        branch.children.sort(key=lambda child: row[id(child)])
