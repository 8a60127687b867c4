"""The accepted path as a path of the drafted tree, asked without any scores."""

from collections.abc import Iterator

from specverify.properties.verdict.finding import Comparisons, Finding
from specverify.properties.verdict.invariant import Fact, Invariant, Oracle, Unobserved, needing
from specverify.properties.verdict.shown_tree import names_tokens, shown_tree
from specverify.properties.verdict.subject import Subject
from specverify.reference.case import Case
from specverify.reference.trace import Accepted, Stage
from specverify.reference.tree import Tree

NAME = "acceptance.path-in-tree"


def path_in_tree(case: Case, oracle: Oracle, subject: Subject) -> Iterator[Fact]:
    """Accepted nodes lead from the root downwards, and a step emits their tokens and the bonus.

    Where a stop cuts the block is judged by `lossless.stops`.
    """
    hidden = False
    for number, step in enumerate(subject(case).steps):
        if step.accepted is None:
            continue
        tree = shown_tree(step)
        if tree is None:
            hidden = True
            continue
        yield Comparisons(len(step.accepted.path))
        stray = _stray(number, tree, step.accepted)
        if stray is not None:
            yield stray
            continue
        if step.emitted is None or not names_tokens(step):
            continue
        block = (*(tree.token[node] for node in step.accepted.path[1:]), step.accepted.bonus)
        tokens = step.emitted.tokens
        yield Comparisons(len(tokens))
        if tokens != block[: len(tokens)]:
            yield Finding(NAME, Stage.EMITTED, number, {"side": "tokens"}, block, tokens)
    if hidden:
        raise Unobserved("the backend does not reveal its trees")


def _stray(number: int, tree: Tree, accepted: Accepted) -> Finding | None:
    """The finding at the first accepted node that is no child of the node accepted before it."""
    above: int | None = None
    for node in accepted.path:
        where: dict[str, int | str] = {"node": node, "side": "path"}
        if above is None:
            if node != 0:
                return Finding(NAME, Stage.ACCEPTED, number, where, "the root", f"node {node}")
        elif not 0 < node < len(tree) or tree.parent[node] != above:
            inside = 0 < node < len(tree)
            observed = "the root" if node == 0 else "no node"
            if inside:
                observed = f"a child of node {tree.parent[node]}"
            return Finding(NAME, Stage.ACCEPTED, number, where, f"a child of node {above}", observed)
        above = node
    return None


INVARIANTS = (
    Invariant(
        NAME,
        "Each accepted node is a child of the one before it, and the step emits their tokens and the bonus.",
        needing(Stage.ACCEPTED),
        path_in_tree,
    ),
)
