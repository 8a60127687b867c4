"""Amplification: how much of the roundings inside a model a row shows.

All weights are changed a little. A norm behind a nearly vanishing sum shows many times what other rows show; so may
the scores by which rows choose experts and columns.
"""

from collections.abc import Callable, Iterable, Iterator, Mapping
from dataclasses import dataclass, replace
from typing import Protocol, runtime_checkable

import numpy as np

from specverify.reference.architecture import Model, Seeded
from specverify.reference.oracle.choices import KINDS, RowChoices
from specverify.reference.oracle.evaluator import Evaluator
from specverify.reference.oracle.formulas.layer import TANH_ROUNDINGS, State
from specverify.reference.oracle.model import Nodes
from specverify.reference.oracle.parameters import Parameters
from specverify.reference.oracle.scored_choices import own_choices, own_codes, scored_choices, with_choices
from specverify.reference.trace import Array
from specverify.reference.tree import Tree

PERTURBED = 2.0**-24
"""Relative size of the changes of weights by which `amplification` probes a model, small enough for linear answers."""

UNIT_CHANGES = {"bfloat16": 2.0**-8, "float16": 2.0**-11}
"""The unit roundoffs of 16 bits, which are changes of weights so large that a row may answer beyond a straight line.

Where a sum nearly vanishes before a norm, a row of a right engine in bfloat16 lay 5.5 times as far off as the linear
answer to a change by its unit roundoff, and 1.5 times as far as the answer to that change itself.
"""


@dataclass(frozen=True)
class Change:
    """A change of all weights: each is multiplied by 1 + `size` * (a normal number of the generator `seed`)."""

    seed: int
    size: float = PERTURBED


PERTURBATIONS = 4
"""Number of random changes of all weights that `amplification` averages over."""


@dataclass(frozen=True)
class RowMovements:
    """Rms changes of the rows at the nodes of a tree, over the relative change of weights that made them.

    Attributes:
        logits: [nodes].
        attended: [layers, heads, nodes]; zeros in layers without attention.
    """

    logits: Array
    attended: Array


def sizes_of_change(model: Model, dtype: str) -> tuple[float, ...]:
    """The sizes of changes that say how far a row of `model` in `dtype` may be off, of which the largest answer counts.

    Of checkpoints the linear answer alone: a change of another size takes as much memory again.
    """
    return (PERTURBED, UNIT_CHANGES[dtype]) if dtype in UNIT_CHANGES and isinstance(model, Seeded) else (PERTURBED,)


def amplification(
    evaluate: Callable[[Parameters], Evaluator],
    parameters: Parameters,
    context: tuple[int, ...],
    tree: Tree,
    sizes: tuple[float, ...] = (PERTURBED,),
) -> RowMovements | None:
    """How far each row of logits and of attention outputs moves when all weights change a little.

    Each weight is multiplied by 1 + size * (a normal number); the change is the rms over a row's numbers and over
    `PERTURBATIONS` such models, by the one of `sizes` that moves the row farthest. None where the evaluator holds no
    weights (plain transformers).
    """
    if not parameters.state:
        return None
    rows = own_choices(evaluate(parameters), context, tree)
    if rows.present:
        # A change of weights must not change what a row takes: its numbers would then jump.
        parameters = with_choices(parameters, context, tree, rows)
    base = evaluate(parameters).nodes(context, tree)
    movements = [
        movement(base, (near.nodes(context, tree) for near in perturbed_evaluators(evaluate, parameters, size)), size)
        for size in sizes
    ]
    return RowMovements(
        np.max([moved.logits for moved in movements], axis=0), np.max([moved.attended for moved in movements], axis=0)
    )


def movement(base: Nodes, neighbours: Iterable[Nodes], size: float = PERTURBED) -> RowMovements:
    """How far the rows of the PERTURBATIONS `neighbours` lie from those of `base`, over their `size` of change."""
    logits, attended = np.zeros(base.logits.shape[:-1]), np.zeros(base.attended.shape[:-1])
    for neighbour in neighbours:
        logits += np.mean(np.square((neighbour.logits - base.logits) / size), axis=-1)
        attended += np.mean(np.square((neighbour.attended - base.attended) / size), axis=-1)
    return RowMovements(np.sqrt(logits / PERTURBATIONS), np.sqrt(attended / PERTURBATIONS))


def score_movements(
    evaluate: Callable[[Parameters], Evaluator], parameters: Parameters, context: tuple[int, ...], tree: Tree
) -> dict[str, Array]:
    """How far the scores of each kind of choice move when all weights change a little, over their rms.

    [layers, context + nodes] by kind. The change is the rms over a row's scores, over the relative change of weights;
    see `amplification`. Zeros in layers without such a choice; a kind that the family does not have is left out.
    """
    evaluator = evaluate(parameters)
    scored_by_kind = {kind: scored_choices(kind, evaluator, context, tree) for kind in KINDS}
    base = {kind: scored for kind, scored in scored_by_kind.items() if scored is not None}
    if not base:
        return {}
    rows = RowChoices(
        **{kind: scored.chosen for kind, scored in base.items()}, codes=own_codes(evaluator, context, tree)
    )
    fixed_parameters = with_choices(parameters, context, tree, rows)
    squares = {kind: np.zeros(scored.chosen.shape[:2]) for kind, scored in base.items()}
    for neighbour in perturbed_evaluators(evaluate, fixed_parameters):
        for kind, scored in base.items():
            changed = scored_choices(kind, neighbour, context, tree)
            assert changed is not None
            squares[kind] += scored.squared_change(changed)
    return {kind: np.sqrt(square / PERTURBATIONS) / PERTURBED for kind, square in squares.items()}


@runtime_checkable
class PerturbableWeights(Protocol):
    """A state dict that makes its perturbed weights when they are read, without a second copy of all in memory."""

    def perturbed(self, seed: int, size: float) -> Mapping[str, Array]:
        """The same weights, each multiplied by 1 + `size` * (a normal number of a generator of `seed`)."""
        ...


def perturbed_evaluators(
    evaluate: Callable[[Parameters], Evaluator], parameters: Parameters, size: float = PERTURBED
) -> Iterator[Evaluator]:
    """Evaluators of PERTURBATIONS models whose weights differ by `size` from `parameters`, each in its own way."""
    for seed in range(PERTURBATIONS):
        yield evaluate(perturb_weights(parameters, Change(seed, size)))


def perturb_weights(parameters: Parameters, change: Change) -> Parameters:
    """`parameters` with the `change` of each weight.

    Values of tanh in activations are multiplied likewise: their roundings are no roundings of a weight.
    """
    if parameters.rounded is not None:
        # Rows keep the codes that are known, whose numbers would else jump.
        parameters = replace(parameters, rounded=replace(parameters.rounded, is_exact=False))
    if isinstance(parameters.state, PerturbableWeights):
        return replace(parameters, state=parameters.state.perturbed(change.seed, change.size))
    state = perturb_state(parameters.state, change)
    widest = max(max(weights.shape, default=0) for weights in state.values())
    normal = np.random.default_rng((change.seed, widest)).standard_normal
    return replace(parameters, state=state | {TANH_ROUNDINGS: change.size * normal(widest)})


def perturb_state(state: State, change: Change) -> dict[str, Array]:
    """`state` with the `change` of each weight."""
    normal = np.random.default_rng(change.seed).standard_normal
    perturbed = dict[str, Array]()
    for name, weights in state.items():
        # In place: the weights of a checkpoint are too large to lie in memory beside three arrays of their size.
        factors = np.asarray(normal(weights.shape))
        factors *= change.size
        factors += 1
        factors *= weights
        perturbed[name] = factors
    return perturbed
