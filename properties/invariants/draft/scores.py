"""The scores of a draft, compared with those of its definition from scratch."""

from collections.abc import Iterator
from dataclasses import replace

import numpy as np

from specverify.properties.invariants.draft.hidden_states import step_from_scratch
from specverify.properties.tolerance.amplification import MAX_AMPLIFICATION, excuses_row, explained_distance
from specverify.properties.tolerance.bounds import UNIT
from specverify.properties.tolerance.closeness import rms
from specverify.properties.verdict.finding import Comparisons, Finding, Reads
from specverify.properties.verdict.invariant import Oracle, Unobserved
from specverify.reference.case import Case
from specverify.reference.draft.layer_head import LayerHead
from specverify.reference.sampling import Stops
from specverify.reference.trace import Array, Drafted, Stage
from specverify.reference.tree import Tree

DRAFT_SIGMA = 60.0
"""A-priori sigma of draft logits, in unit roundoffs times their rms; no control run measures the draft's error."""

DRAFT_K = 6.0
"""Largest rms distance between a row of draft logits and the oracle's, in sigmas."""


def score_distance(observed: Array, expected: Array) -> float:
    """The rms distance of two rows of a draft's scores; infinite where they can draft unlike tokens.

    A token that cannot be drafted has the score minus infinity. NaN counts as an infinite distance.
    """
    impossible = np.isneginf(expected)
    if not np.array_equal(np.isneginf(observed), impossible):
        return np.inf
    return float(rms(observed[~impossible] - expected[~impossible]))


def restarted_case(case: Case, tokens: tuple[int, ...], number: int = 0) -> Case:
    """`case` as one step with `tokens` as its prompt, so that its draft starts fresh at this point, step `number`."""
    draft = case.draft
    table = case.draft.dispatch
    if table is not None:  # the batch of that step, which is the last known one after the end of the list
        draft = draft.in_batches(table.batches[number : number + 1] or table.batches[-1:])
    return replace(case, prompt=tokens, draft=draft, steps=1, stops=Stops(max_new_tokens=1))


def scores_of(case: Case, oracle: Oracle, context: tuple[int, ...], tree: Tree) -> Array | None:
    """The scores of the draft's definition at the nodes of `tree`; None where it has no row to score.

    A head scores nodes with children alone; the rows of others are NaN.
    """
    if case.draft.model is None:
        step = step_from_scratch(case, oracle, context, tree)
        assert step is not None
        assert step.drafted is not None
        return step.drafted.logits
    alone = case.drafting_case
    scored = oracle(alone.rebased(context, tree)).steps[0].scored
    assert scored is not None
    logits: Array = scored.logits[:, np.array(case.draft.vocabulary or range(case.draft.model.vocab_size))]
    return logits


def scores_below(case: Case, oracle: Oracle, context: tuple[int, ...], tree: Tree, levels: int) -> Array | None:
    """`scores_of` `tree`, with the rows of all nodes above level `levels`, whether they have children or not."""
    # The tree was cut to its chunk before; a pool of pages may lack room for the longer one, and plays no part here.
    scores = scores_of(
        replace(case, layout=case.layout.as_plain), oracle, context, with_further_leaves(case, tree, levels)
    )
    return None if scores is None else scores[: len(tree)]


def confidence_below(case: Case, oracle: Oracle, context: tuple[int, ...], tree: Tree, levels: int) -> Array | None:
    """The log-probabilities that a confidence head gives the children of each node of `tree`, as `scores_below`."""
    longer = with_further_leaves(case, tree, levels)
    step = step_from_scratch(replace(case, layout=case.layout.as_plain), oracle, context, longer)
    if step is None or step.drafted is None or step.drafted.confidence is None:
        return None
    confidence: Array = step.drafted.confidence[: len(tree)]
    return confidence


def with_further_leaves(case: Case, tree: Tree, levels: int) -> Tree:
    """`tree` with a child below each of its leaves above level `levels`, behind all its nodes."""
    first = (case.draft.vocabulary or (0,))[0]
    leaves = [node for node in range(len(tree)) if not tree.children[node] and tree.depth[node] < levels]
    return Tree((*tree.parent, *leaves), (*tree.token, *(first for _ in leaves)))


def compare_score_rows(
    name: str, case: Case, oracle: Oracle, number: int, context: tuple[int, ...], drafted: Drafted
) -> Iterator[Finding | Comparisons]:
    """Findings where the draft's scores at a node with children are not its definition's on the drafted tree."""
    true = scores_of(case, oracle, context, drafted.tree)
    if true is None:  # without a row, a head draws nothing
        yield Comparisons()
        if len(drafted.tree) > 1:
            yield tree_finding(name, number, line(drafted.tree.subtree([0])), line(drafted.tree))
        return
    if drafted.logits is None:
        raise Unobserved("the backend does not reveal its draft's logits, which is all that can be compared of draws")
    sigma = draft_sigma(case, true)
    inner_nodes = [0, *(node for node in range(1, len(drafted.tree)) if drafted.tree.children[node])]
    yield Comparisons(len(inner_nodes))
    for node in inner_nodes:
        expected = true[node]
        away = score_distance(drafted.logits[node], expected) / (DRAFT_K * sigma)
        if away > 1 and not row_excused(case, oracle, context, drafted.tree, node, away * DRAFT_K * sigma, away):
            finding = scores_finding(name, case, number, node, expected, drafted.logits[node], away)
            yield reading_scores(finding, case, context, drafted.tree, node, DRAFT_K * sigma)
            return


def reading_scores(
    finding: Finding, case: Case, context: tuple[int, ...], tree: Tree, node: int, limit: float
) -> Finding:
    """`finding` with what a row of the draft's scores reads: its own model's rows, or a head's the target's states."""

    def row(oracle: Oracle) -> Array | None:
        scores = scores_of(case, oracle, context, tree)
        return None if scores is None else scores[node]

    source_case = case if case.draft.model is None else case.drafting_case
    by_head = case.draft.reads is not None
    return replace(finding, reads=Reads(source_case, context, tree, node, None, limit, row, by_head))


def row_excused(
    case: Case, oracle: Oracle, context: tuple[int, ...], tree: Tree, node: int, distance: float, away: float
) -> bool:
    """Whether the models' conditioning explains a row of scores `distance` off, `away` times what it may be.

    A head's row begins with the output of its parent's, so that errors grow along a path. Such a row may be up to
    MAX_AMPLIFICATION times as far off as conditioning explains of its parent's; others as their own limit. At depth d
    it has come through the head d + 1 times, which makes other errors each time, whereas a change of its weights is the
    same each time and may cancel: what conditioning explains is taken sqrt(d + 1) times. In a chain of 17 levels, a
    right engine lay 1.6 times what it explains off at the last, after 0.2 times at the root.
    """
    passes = 1 + tree.depth[node] if isinstance(case.draft, LayerHead) else 1

    def scores(reference: Oracle) -> Array | None:
        return scores_of(case, reference, context, tree)

    if not np.isfinite(away) or not excuses_row(oracle, scores, (node,), distance / passes**0.5, case, True):
        return False
    if away <= MAX_AMPLIFICATION:
        return True
    if not isinstance(case.draft, LayerHead) or node == 0:
        return False
    of_parent = explained_distance(oracle, scores, (tree.parent[node],), case, True) * tree.depth[node] ** 0.5
    return bool(distance <= MAX_AMPLIFICATION * of_parent)


def scores_finding(
    name: str, case: Case, number: int, node: int, expected: Array, observed: Array, away: float
) -> Finding:
    """The finding that a node's draft scores [draft vocabulary] lie `away` thresholds off, shown by the worst score.

    The finding's token is that score's draft id in the target's vocabulary. NaN counts as the worst score.
    """
    both = np.isneginf(observed) & np.isneginf(expected)
    apart = np.abs(np.subtract(observed, expected, out=np.zeros(len(expected)), where=~both))
    worst = int(np.nan_to_num(apart, nan=np.inf).argmax())
    vocabulary = case.draft.vocabulary
    token = vocabulary[worst] if vocabulary else worst
    where: dict[str, int | str] = {"node": node, "token": token, "side": "logits"}
    return Finding(name, Stage.DRAFTED, number, where, float(expected[worst]), float(observed[worst]), away)


def draft_sigma(case: Case, logits: Array) -> float:
    """The a-priori noise of draft logits [nodes, V] (NaN rows ignored, and tokens that cannot be drafted)."""
    rows = logits[~np.isnan(logits).any(axis=1)]
    scale = float(np.sqrt(np.mean(np.square(rows[~np.isneginf(rows)]))))
    return max(DRAFT_SIGMA * UNIT[case.dtype] * scale, 1e-10)


def line(tree: Tree) -> str:
    """A tree in one short line: `token<parent` for each node."""
    return " ".join(f"{token}<{parent}" for parent, token in zip(tree.parent, tree.token, strict=True))


def tree_finding(name: str, number: int, expected: str, observed: str) -> Finding:
    """The finding that another tree was drafted than expected."""
    return Finding(name, Stage.DRAFTED, number, {"side": "tree"}, expected, observed)
