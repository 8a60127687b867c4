"""Invariants of the lowered tree: its index arrays, compared entry by entry.

Lowering turns a drafted tree into arrays: parents, depths, positions, slots, masks, child and sibling links. A backend
may show some of them only. An invariant then compares those that are there, and is unobserved without the arrays that
its statement begins with (MAIN), whatever else it compared.
"""

from collections.abc import Iterator

import numpy as np

from specverify.properties.tolerance.closeness import true_step
from specverify.properties.verdict.finding import Comparisons, Finding
from specverify.properties.verdict.invariant import Fact, Invariant, Oracle, Unobserved, needing
from specverify.properties.verdict.shown_tree import shown_tree, step_showing
from specverify.properties.verdict.subject import Subject
from specverify.reference.case import Case
from specverify.reference.trace import UNKNOWN_POSITION, Array, Lowered, Stage
from specverify.reference.tree import Tree

NEEDS = needing(Stage.LOWERED)

MAIN = {
    "structure.parent-range": ("parent",),
    "structure.depth-consistent": ("depth",),
    "structure.validity-closed": ("valid",),
    "structure.ancestor-table": ("ancestor",),
    "structure.mask-is-ancestry": ("visible",),
    "structure.positions-are-depth": ("position",),
    "structure.positions-on-axes": ("axes",),
    "structure.links-walk-the-tree": ("next_token", "next_sibling"),
}
"""The arrays without which an invariant is unobserved."""

OF_DRAFTED = ("structure.parent-range", "structure.validity-closed")
"""Invariants that compare rows with the drafted tree; the others take the tree of the rows where none is shown."""


class _LoweredStep:
    """A step as the backend lowered it (`lowered`), beside the oracle's lowering of the same tree (`expected`)."""

    def __init__(self, name: str, step: int, tree: Tree, context: int, lowered: Lowered, expected: Lowered) -> None:
        self.name = name
        self.step = step
        self.tree = tree
        self.context = context
        self.lowered = lowered
        self.expected = expected
        self.nodes = len(tree)
        self.rows = self.nodes if lowered.rows is None else lowered.rows

    def finding(self, expected: object, observed: object, **where: int | str) -> Finding:
        return Finding(self.name, Stage.LOWERED, self.step, where, expected, observed)

    def compare_field(self, field: str) -> Iterator[Finding | Comparisons]:
        """Findings for each row of the tree whose entry in `field`, if it is shown, differs from the oracle's."""
        if getattr(self.lowered, field) is None:
            return
        yield Comparisons(self.nodes)
        observed, true = getattr(self.lowered, field)[: self.nodes], getattr(self.expected, field)[: self.nodes]
        if observed.shape[0] < self.nodes:
            yield self.finding(f"{self.nodes} rows", f"{observed.shape[0]} rows", side=field)
            return
        for row in np.flatnonzero(observed != true).tolist():
            yield self.finding(int(true[row]), int(observed[row]), row=row, side=field)

    def out_of_range(self, field: str, array: Array | None) -> Iterator[Finding]:
        """Findings for each entry of `array`, if it is shown, that is not the index of a row."""
        if array is None:
            return
        for index in np.argwhere((array < 0) | (array >= self.rows)).tolist():
            yield self.finding(f"0..{self.rows - 1}", int(array[tuple(index)]), row=index[0], side=field)


def _steps(name: str, case: Case, oracle: Oracle, subject: Subject) -> Iterator[_LoweredStep]:
    """Each lowered step beside the oracle's; raises Unobserved at the end if a step did not show all that it takes."""
    hidden_field: str | None = None
    for number, step in enumerate(subject(case).steps):
        if step.lowered is None:
            continue
        tree = shown_tree(step)
        if tree is None or (step.drafted is None and name in OF_DRAFTED):
            hidden_field = "drafted.tree"
            continue
        if step.drafted is None:
            tree = Tree(tree.parent, (0,) * len(tree))  # tokens that no stage vouches for may be no tokens at all
        true = true_step(case, oracle, step_showing(step, tree), number).lowered
        if true is not None:
            yield _LoweredStep(name, number, tree, len(step.context), step.lowered, true)
        hidden_field = next(
            (
                f"lowered.{field}"
                for field in MAIN[name]
                if getattr(step.lowered, field) is None and (true is None or getattr(true, field) is not None)
            ),
            hidden_field,
        )
    if hidden_field is not None:
        raise Unobserved(f"the backend does not reveal {hidden_field}")


def parent_range(case: Case, oracle: Oracle, subject: Subject) -> Iterator[Fact]:
    """Every parent index names a row; the root is its own parent; every row has its node's parent and token."""
    for look in _steps("structure.parent-range", case, oracle, subject):
        yield from look.out_of_range("parent", look.lowered.parent)
        yield from look.compare_field("parent")
        yield from look.compare_field("token")


def depth_consistent(case: Case, oracle: Oracle, subject: Subject) -> Iterator[Fact]:
    """Depth is the number of edges to the root."""
    for look in _steps("structure.depth-consistent", case, oracle, subject):
        yield from look.compare_field("depth")


def validity_closed(case: Case, oracle: Oracle, subject: Subject) -> Iterator[Fact]:
    """The tree's rows are valid and padding rows are not, so that no valid row has an invalid parent."""
    for look in _steps("structure.validity-closed", case, oracle, subject):
        if look.lowered.valid is None:
            continue
        yield Comparisons(look.rows)
        expected_valid = np.arange(look.rows) < look.nodes
        for row in np.flatnonzero(look.lowered.valid != expected_valid).tolist():
            yield look.finding(bool(expected_valid[row]), bool(look.lowered.valid[row]), row=row)
        # A tree larger than the padding of the layout keeps its own size.
        padded = max(look.nodes, case.layout.padded_nodes)
        if look.rows != padded:
            yield look.finding(f"{padded} rows", f"{look.rows} rows", side="rows")


def ancestor_table(case: Case, oracle: Oracle, subject: Subject) -> Iterator[Fact]:
    """Entry d of a row is the row's ancestor at depth d; it is 0 beyond the row's own depth and in padding rows."""
    for look in _steps("structure.ancestor-table", case, oracle, subject):
        if look.lowered.ancestor is None:
            continue
        yield Comparisons(look.rows)
        yield from look.out_of_range("ancestor", look.lowered.ancestor)
        for row in range(look.rows):
            path = look.tree.path(row) if row < look.nodes else ()
            for depth, observed in enumerate(look.lowered.ancestor[row].tolist()):
                ancestor = path[depth] if depth < len(path) else 0
                if observed != ancestor:
                    yield look.finding(ancestor, observed, row=row, depth=depth)


def mask_is_ancestry(case: Case, oracle: Oracle, subject: Subject) -> Iterator[Fact]:
    """In every layer's mask, a row sees the context and its own path inside the window, and no other column."""
    for look in _steps("structure.mask-is-ancestry", case, oracle, subject):
        # Layers with one kind of window may share a mask array; a shared pair of arrays is compared once.
        compared_layers: dict[int, int] = {}
        if look.lowered.visible is None or look.expected.visible is None:
            continue
        for layer, (mask, true) in enumerate(zip(look.lowered.visible, look.expected.visible, strict=True)):
            if id(mask) in compared_layers and look.expected.visible[compared_layers[id(mask)]] is true:
                continue
            compared_layers[id(mask)] = layer
            yield Comparisons(look.nodes)
            expected_mask = np.zeros((look.nodes, look.context + look.rows), dtype=bool)
            # The reference may be another backend, whose mask has padding rows and columns of its own.
            expected_mask[:, : look.context + look.nodes] = true[: look.nodes, : look.context + look.nodes]
            if mask.shape != (look.rows, look.context + look.rows):
                yield look.finding(
                    str((look.rows, look.context + look.rows)), str(mask.shape), layer=layer, side="shape"
                )
                continue
            for row, column in np.argwhere(mask[: look.nodes] != expected_mask).tolist():
                yield look.finding(
                    "visible" if expected_mask[row, column] else "hidden",
                    "visible" if mask[row, column] else "hidden",
                    layer=layer,
                    row=row,
                    column=column,
                    **_column(column, look.context, look.nodes),
                )


def _column(column: int, context: int, nodes: int) -> dict[str, int | str]:
    """The contents of a KV column: a context position, a node, or padding."""
    if column < context:
        return {"position": column}
    return {"node": column - context} if column - context < nodes else {"side": "padding"}


def positions_are_depth(case: Case, oracle: Oracle, subject: Subject) -> Iterator[Fact]:
    """A row's position is the context's length plus its depth; its KV slot is its own and past the context."""
    for look in _steps("structure.positions-are-depth", case, oracle, subject):
        yield from look.compare_field("position")
        slots = [] if look.lowered.slot is None else look.lowered.slot.tolist()
        for row, slot in enumerate(slots):
            if slot < look.context:
                yield look.finding(f"past {look.context - 1}", slot, row=row, side="slot")
            elif slots.index(slot) != row:
                yield look.finding(
                    "a slot of its own", f"that of row {slots.index(slot)}", row=row, slot=slot, side="slot"
                )


def positions_on_axes(case: Case, oracle: Oracle, subject: Subject) -> Iterator[Fact]:
    """On time, height and width every column has the position that the grids of the prompt's images give its token.

    Committed columns have that of the row which wrote them: of a prefill, of a decode or of an earlier tree. A target
    of one axis has nothing to compare.
    """
    for look in _steps("structure.positions-on-axes", case, oracle, subject):
        if look.expected.axes is None:
            yield Comparisons(0)
            continue
        if look.lowered.axes is None:
            continue
        columns = look.context + look.nodes
        yield Comparisons(columns)
        if look.lowered.axes.shape[1] < columns:
            yield look.finding(f"{columns} columns", f"{look.lowered.axes.shape[1]} columns", side="axes")
            continue
        observed, true = look.lowered.axes[:, :columns], look.expected.axes[:, :columns]
        for column in np.flatnonzero(((observed != true) & (observed != UNKNOWN_POSITION)).any(axis=0)).tolist():
            yield look.finding(
                true[:, column].tolist(),
                observed[:, column].tolist(),
                column=column,
                **_column(column, look.context, look.nodes),
            )


def links_walk_the_tree(case: Case, oracle: Oracle, subject: Subject) -> Iterator[Fact]:
    """next_token and next_sibling list each node's children in row order; retrieve_index gives each node's row."""
    for look in _steps("structure.links-walk-the-tree", case, oracle, subject):
        yield from look.compare_field("next_token")
        yield from look.compare_field("next_sibling")
        yield from look.compare_field("retrieve_index")


INVARIANTS = (
    Invariant(
        "structure.parent-range",
        "Every parent index names a row, the root is its own parent, and each row has the drafted parent and token.",
        NEEDS,
        parent_range,
    ),
    Invariant(
        "structure.depth-consistent", "A row's depth is its number of edges to the root.", NEEDS, depth_consistent
    ),
    Invariant(
        "structure.validity-closed",
        "Exactly the tree's rows are valid, so no valid row hangs from an invalid one.",
        NEEDS,
        validity_closed,
    ),
    Invariant(
        "structure.ancestor-table",
        "The ancestor table holds each row's ancestors by depth, and 0 wherever there is none.",
        NEEDS,
        ancestor_table,
    ),
    Invariant(
        "structure.mask-is-ancestry",
        "Each row sees the context and its own root path inside the layer's window, and no other column.",
        NEEDS,
        mask_is_ancestry,
    ),
    Invariant(
        "structure.positions-are-depth",
        "A row's position is the context length plus its depth, and its KV slot is its own.",
        NEEDS,
        positions_are_depth,
    ),
    Invariant(
        "structure.positions-on-axes",
        "Every column has the position on three axes that the grids of the prompt's images give its token.",
        NEEDS,
        positions_on_axes,
    ),
    Invariant(
        "structure.links-walk-the-tree",
        "The child and sibling links visit every node under its parent, in row order.",
        NEEDS,
        links_walk_the_tree,
    ),
)
