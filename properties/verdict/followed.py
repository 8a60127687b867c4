"""The oracle with the experts that the backend chose.

A row whose scores of experts are nearly equal may go through either expert, and its numbers with it. So a run is judged
as every other stage is: on the choice that the backend made. Where its traces show the experts of its rows
(`specverify.reference.trace.Scored.routed`), the oracle takes the same ones; `attention.experts-best` judges the choice
itself.
"""

from collections.abc import Iterable
from typing import Protocol, runtime_checkable

import numpy as np

from specverify.properties.verdict.invariant import Oracle
from specverify.reference.architecture import Model
from specverify.reference.case import Case
from specverify.reference.malformed import Malformed
from specverify.reference.oracle.choices import Choices, choices_of
from specverify.reference.oracle.evaluator import Routing
from specverify.reference.oracle.model import Nodes
from specverify.reference.trace import Array, Kv, Step
from specverify.reference.tree import Tree

NOISE = {"float64": 5 * 2.0**-53, "float32": 5 * 2.0**-24, "bfloat16": 1.65 * 2.0**-8, "float16": 1.65 * 2.0**-11}
"""The least error of scores, relative to their rms, for one layer: that of logits (`tolerance.closeness.PRIOR`)."""

ROUNDOFF = {"float64": 2.0**-53, "float32": 2.0**-24, "bfloat16": 2.0**-8, "float16": 2.0**-11}
"""Unit roundoff of each working dtype (`tolerance.bounds.UNIT`)."""

TIE_SIGMA = 8.0
"""Largest gap of a tie between experts, in these units; that of tokens (`tolerance.ties.TIE_SIGMA`)."""


MOVED = 6.0
"""Largest gap of a tie in a row whose scores amplify roundings, in the movement of its scores.

It is counted for a change of all weights by the unit roundoff, as that of other rows (`tolerance.amplification.ROWS`).
Of some 100 ties of clean runs on checkpoints the widest was 3.5.
"""


def sigma(dtype: str, layers: int) -> float:
    """The error of scores that rounding makes in so many layers, relative to their rms: the unit of margins."""
    return float(np.sqrt(layers) * NOISE[dtype])


@runtime_checkable
class Follows(Protocol):
    """An oracle that can take the experts which a backend chose; plain transformers in its place cannot."""

    def follows(self, case: Case) -> bool:
        """Whether it can for the target of `case`."""
        ...

    def following(self, model: Model, choices: Choices) -> Oracle:
        """The oracle whose target `model` takes the experts of `choices`."""
        ...

    def routing(self, case: Case, context: tuple[int, ...], tree: Tree) -> Routing | None:
        """The scores of experts for the rows of `context` and of `tree`."""
        ...

    def score_movement(self, case: Case, context: tuple[int, ...], tree: Tree) -> Array | None:
        """How far scores move when all weights change a little, over their rms: [layers, rows]."""
        ...

    def gaps_choosing(self, case: Case, context: tuple[int, ...], tree: Tree, chosen: Array) -> Array | None:
        """How much scores must change before `chosen` is the choice of each row: [layers, rows], over their rms."""
        ...

    def nodes_choosing(self, case: Case, context: tuple[int, ...], tree: Tree, chosen: Array) -> Nodes:
        """The numbers of `tree` if the rows of `context` and `tree` take the experts `chosen`."""
        ...

    def kv_choosing(self, case: Case, tokens: tuple[int, ...], chosen: Array) -> Kv | None:
        """The columns of `tokens` if their rows take the experts `chosen`."""
        ...


def tie_units(case: Case, oracle: Follows, context: tuple[int, ...], tree: Tree) -> Array | None:
    """How far the roundings of the working dtype move the scores of each row, over their rms: [layers, rows]."""
    movement = oracle.score_movement(case, context, tree)
    return None if movement is None else ROUNDOFF[case.dtype] * movement


def tie_limits(dtype: str, units: Array) -> Array:
    """The largest gap of a tie in each row, over the rms of scores, from `tie_units`."""
    return np.maximum(TIE_SIGMA * sigma(dtype, len(units)), MOVED * units)


def can_follow(case: Case, oracle: Oracle) -> bool:
    """Whether `oracle` can take the experts that a backend chose on the target of `case`."""
    return case.model.mixes_rows and isinstance(oracle, Follows) and oracle.follows(case)


def without_choices(oracle: Oracle) -> Oracle:
    """`oracle` without any choices of a backend."""
    base: Oracle = getattr(oracle, "base", oracle)
    return base


def follow(case: Case, oracle: Oracle, steps: Iterable[Step]) -> Oracle:
    """`oracle` with the experts that `steps` show on the target of `case`, and no others."""
    if not can_follow(case, oracle):
        return oracle
    assert isinstance(oracle, Follows)
    choices = choices_of(steps)
    return without_choices(oracle) if choices is None else oracle.following(case.model, choices)


def follow_step(case: Case, oracle: Oracle, step: Step) -> Oracle:
    """`oracle` with the experts of `step` in its rows: a text may be run twice, and take others the second time."""
    routed = routed_of(step)
    if routed is None or step.drafted is None or not can_follow(case, oracle):
        return oracle
    choices = getattr(oracle, "choices", None)
    if (
        isinstance(choices, Choices)
        and choices.experts_per_row == routed.shape[2]
        and choices.layers == routed.shape[0]
    ):
        own_choices = choices.experts_of(step.context, step.drafted.tree)
        if own_choices.shape == routed.shape and np.array_equal(np.where(routed < 0, own_choices, routed), own_choices):
            return oracle
    return follow(case, oracle, [step])


def routed_of(step: Step) -> Array | None:
    """The experts of the rows of `step`, [layers, context + nodes, taken]; None where they are not shown."""
    return None if step.scored is None else step.scored.routed


def shift(case: Case, oracle: Oracle, base: Step, variant: Step) -> tuple[Nodes, Nodes] | None:
    """The oracle's numbers of two steps of a backend, each with its own experts.

    What lies between them is no difference of the backend. None where both took the same, or do not show them, or
    where `variant` took experts that no tie explains.
    """
    base_experts, variant_experts = routed_of(base), routed_of(variant)
    if (
        base_experts is None
        or variant_experts is None
        or base.drafted is None
        or variant.drafted is None
        or not can_follow(case, oracle)
    ):
        return None
    if (
        base.context == variant.context
        and base.drafted.tree == variant.drafted.tree
        and np.array_equal(base_experts, variant_experts)
    ):
        return None
    assert isinstance(oracle, Follows)
    try:
        if not _is_tied(case, oracle, variant.context, variant.drafted.tree, variant_experts):
            return None
        first = oracle.nodes_choosing(case, base.context, base.drafted.tree, base_experts)
        return first, oracle.nodes_choosing(case, variant.context, variant.drafted.tree, variant_experts)
    except Malformed:
        return None


def kv_shift(case: Case, oracle: Oracle, base: Step, variant: Step) -> tuple[Kv, Kv] | None:
    """The oracle's columns behind two steps of a backend on one text, each with its own experts; see `shift`."""
    base_commit, variant_commit = _committed_experts(base), _committed_experts(variant)
    if (
        base_commit is None
        or variant_commit is None
        or not can_follow(case, oracle)
        or base_commit[0] != variant_commit[0]
    ):
        return None
    if np.array_equal(base_commit[1], variant_commit[1]):
        return None
    assert isinstance(oracle, Follows)
    try:
        tokens, chosen = variant_commit
        chain = Tree((0, *range(len(tokens) - 1)), tokens)
        if not _is_tied(case, oracle, (), chain, chosen):
            return None
        pair = oracle.kv_choosing(case, *base_commit), oracle.kv_choosing(case, *variant_commit)
    except Malformed:
        return None
    return None if pair[0] is None or pair[1] is None else (pair[0], pair[1])


def _is_tied(case: Case, oracle: Follows, context: tuple[int, ...], tree: Tree, chosen: Array) -> bool:
    """Whether each row took experts that are its best up to a tie."""
    gaps = oracle.gaps_choosing(case, context, tree, chosen)
    if gaps is None or (gaps <= TIE_SIGMA * sigma(case.dtype, len(gaps))).all():
        return gaps is not None
    choices = Choices(chosen.shape[0], chosen.shape[2])
    choices.add(context, tree, chosen)
    follower = oracle.following(case.model, choices)
    assert isinstance(follower, Follows)
    units = tie_units(case, follower, context, tree)
    return units is not None and bool((gaps <= tie_limits(case.dtype, units)).all())


def _committed_experts(step: Step) -> tuple[tuple[int, ...], Array] | None:
    """The tokens that are committed behind `step`, and the experts of their rows."""
    routed = routed_of(step)
    if routed is None or step.drafted is None or step.accepted is None or step.committed is None:
        return None
    tree = step.drafted.tree
    context = len(step.context)
    if any(not 0 <= node < len(tree) for node in step.accepted.path):
        return None
    rows = [*range(context), *(context + node for node in step.accepted.path)][: step.committed.length]
    tokens = (*step.context, *(tree.token[node] for node in step.accepted.path))[: step.committed.length]
    return (tokens, routed[:, rows]) if tokens and len(tokens) == step.committed.length else None
