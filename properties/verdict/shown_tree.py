"""The tree of a step, as far as a trace shows it: as drafted, or as the rows of its lowering give it."""

from dataclasses import replace

from specverify.reference.malformed import Malformed
from specverify.reference.trace import Drafted, Lowered, Step
from specverify.reference.tree import Tree


def shown_tree(step: Step) -> Tree | None:
    """The drafted tree of `step`; without it, the tree of the valid rows of its lowering; None where neither is shown.

    Its tokens are zeros where no stage names them (`names_tokens`).
    """
    if step.drafted is not None:
        return step.drafted.tree
    return None if step.lowered is None else _tree_of_rows(step.lowered)


def names_tokens(step: Step) -> bool:
    """Whether `step` shows the tokens of its tree."""
    return step.drafted is not None or (step.lowered is not None and step.lowered.token is not None)


def step_showing(step: Step, tree: Tree) -> Step:
    """`step` with `tree` as its drafted tree, where it shows none of its own."""
    return step if step.drafted is not None else replace(step, drafted=Drafted(tree))


def _tree_of_rows(lowered: Lowered) -> Tree | None:
    """The tree of the valid rows; None where the rows are not shown, or are none that begin with a root."""
    if lowered.parent is None or lowered.valid is None:
        return None  # without `valid`, rows of padding look like children of the root
    nodes = int(lowered.valid.sum())
    if not lowered.valid[:nodes].all():
        return None
    parent = tuple(lowered.parent[:nodes].tolist())
    token = (0,) * nodes if lowered.token is None else tuple(lowered.token[:nodes].tolist())
    try:
        return Tree(parent, token)
    except Malformed:
        return None
