"""The confidences of a draft that has a head for them, compared with those of its definition."""

from collections.abc import Iterator

import numpy as np

from specverify.properties.invariants.draft.scores import DRAFT_K, confidence_below, draft_sigma, scores_of
from specverify.properties.tolerance.amplification import MAX_AMPLIFICATION, excuses_row
from specverify.properties.verdict.finding import Comparisons, Finding
from specverify.properties.verdict.followed import follow_step
from specverify.properties.verdict.invariant import Fact, Oracle
from specverify.reference.case import Case
from specverify.reference.trace import Array, Stage, Step


def compare_confidences(name: str, case: Case, oracle: Oracle, number: int, step: Step) -> Iterator[Fact]:
    """A finding where the confidence at a node with children is not what the draft's head gives on the drafted tree.

    The confidences are log-probabilities: one moves by at most what the head's logit does, and a logit's noise is that
    of the draft's scores, which read the same states.
    """
    drafted = step.drafted
    assert drafted is not None
    if drafted.confidence is None:
        return
    tree = drafted.tree
    oracle = follow_step(case, oracle, step)
    true = confidence_below(case, oracle, step.context, tree, 0)
    scores = scores_of(case, oracle, step.context, tree)
    if true is None or scores is None:  # without a row a head drafts nothing
        return
    inner_nodes = [node for node in range(len(tree)) if tree.children[node]]
    yield Comparisons(len(inner_nodes))
    if drafted.confidence.shape != true.shape:
        where: dict[str, int | str] = {"side": "shape of confidences"}
        yield Finding(name, Stage.DRAFTED, number, where, str(true.shape), str(drafted.confidence.shape))
        return
    limit = DRAFT_K * draft_sigma(case, scores)

    def confidences(reference: Oracle) -> Array | None:
        return confidence_below(case, reference, step.context, tree, 0)

    for node in inner_nodes:
        distance = float(np.nan_to_num(abs(drafted.confidence[node] - true[node]), nan=np.inf))
        away = distance / limit
        excused = away <= MAX_AMPLIFICATION and excuses_row(oracle, confidences, (node,), distance, case, True)
        if away > 1 and not excused:
            where = {"node": node, "side": "confidence"}
            yield Finding(name, Stage.DRAFTED, number, where, float(true[node]), float(drafted.confidence[node]), away)
            return
