"""The law after each node, computed from the backend's own logits.

Invariants of sampled cases compare it with the laws that the backend reveals. On rows on which rounding may change the
set of tokens that top-k, top-p or min-p keeps (`near_edge`), any of those sets is right, and no other.
"""

from collections.abc import Callable, Iterable

import numpy as np

from specverify.properties.tolerance.bounds import UNIT
from specverify.properties.tolerance.ties import is_decided
from specverify.reference.case import Case
from specverify.reference.oracle import processing
from specverify.reference.trace import Array, Step

CLOSE = {"float64": 1e-9, "float32": 2e-5, "bfloat16": 2e-5, "float16": 2e-5}
"""Largest error of a probability on the same logits, by working dtype; engines process in float32 or better."""

LANES = 8
"""Least number of partial sums in a softmax; the sum over V numbers then rounds V / LANES times."""

EDGE = {"float64": 1e-11, "float32": 1e-4, "bfloat16": 1e-4, "float16": 1e-4}
"""Relative distance to keeping another set of tokens, below which either set is right."""


def law_tolerance(case: Case) -> float:
    """Largest error of a probability in `case`: CLOSE, plus the rounding of a sum over the vocabulary.

    The relative error of torch's float32 softmax over 49,152 tokens was measured as 3e-5.
    """
    engine = UNIT["float64" if case.dtype == "float64" else "float32"]
    return CLOSE[case.dtype] + engine * case.model.vocab_size / LANES


def output_before(case: Case, step: Step) -> tuple[int, ...]:
    """The tokens emitted before `step`, its pending root included."""
    assert step.drafted is not None
    # Context and root are all tokens so far, of which the prompt is the beginning.
    return (*step.context, step.drafted.tree.token[0])[len(case.prompt) :]


def node_scores(case: Case, step: Step) -> Callable[[int, Array], Array]:
    """The function that makes of a node of `step` and its logits [V] the scores [V] whose best is chosen if greedy."""
    assert step.drafted is not None
    tree, output = step.drafted.tree, output_before(case, step)

    def scores_of(node: int, row: Array) -> Array:
        path = output + tree.tokens_to(node)[1:]
        return processing.scores(row, case.sampling, case.stops, case.prompt, path)

    return scores_of


def stretched(case: Case, sigma: float) -> float:
    """The noise of scores whose logits have the noise `sigma`: a repetition penalty stretches it with the logits."""
    penalty = case.sampling.repetition_penalty
    return sigma * max(penalty, 1.0 / penalty)


def are_decided(case: Case, step: Step, nodes: Iterable[int], sigma: float) -> bool:
    """Whether no greedy choice at `nodes` of `step` is a near-tie, after the processing of logits that decides it."""
    assert step.scored is not None
    scores_of, logits = node_scores(case, step), step.scored.logits
    return all(is_decided(scores_of(node, logits[node]), stretched(case, sigma)) for node in nodes)


def laws(case: Case, step: Step) -> Array:
    """The law after each node [nodes, vocabulary], by definition, from the backend's own logits."""
    assert step.drafted is not None
    assert step.scored is not None
    tree = step.drafted.tree
    output = output_before(case, step)
    rows = [
        processing.law(row, case.sampling, case.stops, case.prompt, output + tree.tokens_to(node)[1:])
        for node, row in enumerate(step.scored.logits)
    ]
    return np.stack(rows)


def near_edge(case: Case, logits: Array, path: tuple[int, ...], output: tuple[int, ...]) -> bool:
    """Whether an engine's rounding may make its processors keep another set of tokens in this row."""
    margin = processing.margin(logits, case.sampling, case.stops, case.prompt, output + path)
    return margin < EDGE[case.dtype]


def is_law_near_edge(case: Case, logits: Array, path: tuple[int, ...], output: tuple[int, ...], law: Array) -> bool:
    """Whether `law` [V] is what the processors may leave of `logits`, on whichever side of an edge rounding takes it.

    It is near an edge, keeps the most probable tokens, as many as an error of EDGE allows, and gives each its share.
    Tokens with less than `law_tolerance` do not count: whether they are kept cannot be told.
    """
    if not near_edge(case, logits, path, output) or not np.isfinite(law).all() or not (law > 0).any():
        return False
    error, tolerance = EDGE[case.dtype], law_tolerance(case)
    sizes = processing.kept_sizes(logits, case.sampling, case.stops, case.prompt, output + path, error)
    is_kept = law > 0
    shares = sizes.p / sizes.p[is_kept].sum()
    if not np.abs(law - np.where(is_kept, shares, 0.0)).max() <= tolerance:
        return False
    is_visible = shares > tolerance
    kept, dropped = shares[is_visible & is_kept], shares[is_visible & ~is_kept]
    if len(kept) and len(dropped) and kept.min() < (1.0 - error) * dropped.max():
        return False
    num_visible = len(kept) + len(dropped)
    return min(sizes.fewest, num_visible) <= len(kept) <= min(sizes.most, num_visible)
