"""The oracle with the experts, columns and codes that the backend chose.

A row whose scores of experts are nearly equal may go through either expert, and its numbers with it. Likewise may a row
attend to either of two columns whose index scores are nearly equal. So a run is judged as every other stage is: on the
choice that the backend made. Where its traces show the experts or columns of its rows
(`specverify.reference.trace.Scored`, `routed` and `indexed`), the oracle takes the same ones. `attention.experts-best`
and `attention.columns-best` judge the choices themselves. A cache that rounds keys and values has such a choice too,
between the two codes beside a number near their border (`Scored.stored`): the oracle takes the code that is shown if
its own number is near enough, and its own code elsewhere (`specverify.reference.oracle.formulas.rounded_columns`), so
that a wrong code is told by the invariants of columns and attention.
"""

from collections.abc import Iterable
from typing import Protocol, runtime_checkable

import numpy as np

from specverify.properties.verdict.invariant import Oracle
from specverify.reference.case import Case
from specverify.reference.malformed import Malformed
from specverify.reference.oracle.choices import KINDS, SHOWN, Choices, RowChoices, choices_of, choices_shown, same_width
from specverify.reference.oracle.formulas.routers import UNKNOWN
from specverify.reference.oracle.model import Nodes
from specverify.reference.oracle.scored_choices import ScoredChoices
from specverify.reference.trace import Array, Kv, Step
from specverify.reference.tree import Tree

NOISE = {"float64": 5 * 2.0**-53, "float32": 5 * 2.0**-24, "bfloat16": 1.65 * 2.0**-8, "float16": 1.65 * 2.0**-11}
"""The least error of scores, relative to their rms, for one layer: that of logits (`tolerance.closeness.PRIOR`)."""

ROUNDOFF = {"float64": 2.0**-53, "float32": 2.0**-24, "bfloat16": 2.0**-8, "float16": 2.0**-11}
"""Unit roundoff of each working dtype (`tolerance.bounds.UNIT`)."""

TIE_SIGMA = 8.0
"""Largest gap of a tie between experts or columns, in these units; that of tokens (`tolerance.ties.TIE_SIGMA`)."""


MOVED = 6.0
"""Largest gap of a tie in a row whose scores amplify roundings, in the movement of its scores.

It is counted for a change of all weights by the unit roundoff, as that of other rows (`tolerance.amplification.ROWS`).
Of some 100 ties of experts in clean runs on checkpoints the widest was 3.5, of some 700 of columns on drawn models 3.0.
"""


def sigma(dtype: str, layers: int) -> float:
    """The error of scores that rounding makes in so many layers, relative to their rms: the unit of margins."""
    return float(np.sqrt(layers) * NOISE[dtype])


@runtime_checkable
class Follows(Protocol):
    """An oracle that can take what a backend chose; plain transformers in its place cannot.

    A kind of choice is one of `specverify.reference.oracle.choices.KINDS`.
    """

    def follows(self, case: Case) -> bool:
        """Whether it can for the target of `case`."""
        ...

    def following(self, case: Case, choices: Choices) -> Oracle:
        """The oracle that takes what `choices` says in rows of the target of `case`, stored as its layout says."""
        ...

    def scored_choices(
        self, kind: str, case: Case, context: tuple[int, ...], tree: Tree, rows: list[int] | None = None
    ) -> ScoredChoices | None:
        """The scores of one kind of choice for `rows` of `context` and `tree`, all by default.

        None for a target without such a choice.
        """
        ...

    def score_movement(self, kind: str, case: Case, context: tuple[int, ...], tree: Tree) -> Array | None:
        """How far such scores move when all weights change a little, over their rms: [layers, rows]."""
        ...

    def gaps_choosing(
        self, kind: str, case: Case, context: tuple[int, ...], tree: Tree, rows: RowChoices
    ) -> Array | None:
        """How much scores must change before `rows` is the choice of each row: [layers, rows], over their rms."""
        ...

    def nodes_choosing(self, case: Case, context: tuple[int, ...], tree: Tree, rows: RowChoices) -> Nodes:
        """The numbers of `tree` if the rows of `context` and `tree` take `rows`."""
        ...

    def kv_choosing(self, case: Case, tokens: tuple[int, ...], rows: RowChoices) -> Kv | None:
        """The columns of `tokens` if their rows take `rows`."""
        ...


def tie_units(kind: str, case: Case, oracle: Follows, context: tuple[int, ...], tree: Tree) -> Array | None:
    """How far the roundings of the working dtype move the scores of each row, over their rms: [layers, rows]."""
    movement = oracle.score_movement(kind, case, context, tree)
    return None if movement is None else ROUNDOFF[case.dtype] * movement


def tie_limits(dtype: str, units: Array) -> Array:
    """The largest gap of a tie in each row, over the rms of scores, from `tie_units`."""
    return np.maximum(TIE_SIGMA * sigma(dtype, len(units)), MOVED * units)


def can_follow(case: Case, oracle: Oracle) -> bool:
    """Whether `oracle` can take what a backend chose on the target of `case`."""
    has_choices = case.model.chooses or case.layout.rounding is not None
    return has_choices and isinstance(oracle, Follows) and oracle.follows(case)


def without_choices(oracle: Oracle) -> Oracle:
    """`oracle` without any choices of a backend."""
    base: Oracle = getattr(oracle, "base", oracle)
    return base


def follow(case: Case, oracle: Oracle, steps: Iterable[Step]) -> Oracle:
    """`oracle` with the choices that `steps` show on the target of `case`, and no others."""
    if not can_follow(case, oracle):
        return oracle
    assert isinstance(oracle, Follows)
    choices = choices_of(steps)
    return without_choices(oracle) if choices is None else oracle.following(case, choices)


def follow_step(case: Case, oracle: Oracle, step: Step) -> Oracle:
    """`oracle` with the choices of `step` in its rows: a text may be run twice, and take others the second time."""
    rows = rows_shown(step)
    if not rows.present or step.drafted is None or not can_follow(case, oracle):
        return oracle
    choices = getattr(oracle, "choices", None)
    if isinstance(choices, Choices) and _agree(rows, choices.of(step.context, step.drafted.tree)):
        return oracle
    return follow(case, oracle, [step])


def rows_shown(step: Step) -> RowChoices:
    """The choices that `step` shows of the rows of its context and tree."""
    return RowChoices() if step.scored is None else choices_shown(step.scored)


def _agree(rows: RowChoices, known: RowChoices) -> bool:
    """Whether `known` holds all that `rows` say."""
    for kind in SHOWN:
        row_choices, own = rows.of(kind), known.of(kind)
        if row_choices is None:
            continue
        if own is None or own.shape[:2] != row_choices.shape[:2]:
            return False
        row_choices, own = same_width(row_choices, own)
        is_silent = (row_choices == UNKNOWN).all(axis=-1, keepdims=True)
        if not np.array_equal(np.where(is_silent, own, row_choices), own):
            return False
    return True


def shift(case: Case, oracle: Oracle, base: Step, variant: Step) -> tuple[Nodes, Nodes] | None:
    """The oracle's numbers of two steps of a backend, each with its own choices.

    What lies between them is no difference of the backend. None where both chose the same, or do not show it, or
    where `variant` chose what no tie explains.
    """
    base_rows, variant_rows = rows_shown(base), rows_shown(variant)
    if not _are_of_like_kinds(base_rows, variant_rows) or not can_follow(case, oracle):
        return None
    if base.drafted is None or variant.drafted is None:
        return None
    same_text = base.context == variant.context and base.drafted.tree == variant.drafted.tree
    if same_text and base_rows.same(variant_rows):
        return None
    assert isinstance(oracle, Follows)
    try:
        if not _is_tied(case, oracle, variant.context, variant.drafted.tree, variant_rows):
            return None
        first = oracle.nodes_choosing(case, base.context, base.drafted.tree, base_rows)
        return first, oracle.nodes_choosing(case, variant.context, variant.drafted.tree, variant_rows)
    except Malformed:
        return None


def _are_of_like_kinds(first: RowChoices, second: RowChoices) -> bool:
    """Whether both show choices, and of the same kinds."""
    return first.present and all((first.of(kind) is None) == (second.of(kind) is None) for kind in SHOWN)


def kv_shift(case: Case, oracle: Oracle, base: Step, variant: Step) -> tuple[Kv, Kv] | None:
    """The oracle's columns behind two steps of a backend on one text, each with its own choices; see `shift`."""
    base_commit, variant_commit = _committed_choices(base), _committed_choices(variant)
    if base_commit is None or variant_commit is None or base_commit[0] != variant_commit[0]:
        return None
    (tokens, base_rows), (_, variant_rows) = base_commit, variant_commit
    if not _are_of_like_kinds(base_rows, variant_rows) or not can_follow(case, oracle) or base_rows.same(variant_rows):
        return None
    assert isinstance(oracle, Follows)
    try:
        chain = Tree((0, *range(len(tokens) - 1)), tokens)
        if not _is_tied(case, oracle, (), chain, variant_rows):
            return None
        pair = oracle.kv_choosing(case, tokens, base_rows), oracle.kv_choosing(case, tokens, variant_rows)
    except Malformed:
        return None
    return None if pair[0] is None or pair[1] is None else (pair[0], pair[1])


def _is_tied(case: Case, oracle: Follows, context: tuple[int, ...], tree: Tree, rows: RowChoices) -> bool:
    """Whether each row made choices that are its best up to a tie."""
    return all(_is_tied_in(kind, case, oracle, context, tree, rows) for kind in KINDS if rows.of(kind) is not None)


def _is_tied_in(kind: str, case: Case, oracle: Follows, context: tuple[int, ...], tree: Tree, rows: RowChoices) -> bool:
    gaps = oracle.gaps_choosing(kind, case, context, tree, rows)
    if gaps is None or (gaps <= TIE_SIGMA * sigma(case.dtype, len(gaps))).all():
        return gaps is not None
    choices = Choices(rows.layers)
    choices.add(context, tree, rows)
    follower = oracle.following(case, choices)
    assert isinstance(follower, Follows)
    units = tie_units(kind, case, follower, context, tree)
    return units is not None and bool((gaps <= tie_limits(case.dtype, units)).all())


def _committed_choices(step: Step) -> tuple[tuple[int, ...], RowChoices] | None:
    """The tokens that are committed behind `step`, and the choices of their rows."""
    step_choices = rows_shown(step)
    if not step_choices.present or step.drafted is None or step.accepted is None or step.committed is None:
        return None
    tree = step.drafted.tree
    context = len(step.context)
    if any(not 0 <= node < len(tree) for node in step.accepted.path):
        return None
    rows = [*range(context), *(context + node for node in step.accepted.path)][: step.committed.length]
    tokens = (*step.context, *(tree.token[node] for node in step.accepted.path))[: step.committed.length]
    return (tokens, step_choices.of_rows(rows)) if tokens and len(tokens) == step.committed.length else None
