"""Amplification: how much of the roundings inside a model a row shows.

All weights are changed a little. A norm behind a nearly vanishing sum shows many times what other rows show; so may
the scores by which rows choose experts and columns.
"""

from collections.abc import Callable, Iterable, Iterator, Mapping
from dataclasses import dataclass, replace
from typing import Protocol, runtime_checkable

import numpy as np

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


def amplification(
    evaluate: Callable[[Parameters], Evaluator], parameters: Parameters, context: tuple[int, ...], tree: Tree
) -> RowMovements | None:
    """How far each row of logits and of attention outputs moves when all weights change a little.

    Each weight is multiplied by 1 + `PERTURBED` * (a normal number); the change is the rms over a row's numbers and
    over `PERTURBATIONS` such models. None where the evaluator holds no weights (plain transformers).
    """
    if not parameters.state:
        return None
    rows = own_choices(evaluate(parameters), context, tree)
    if rows.present:
        # A change of weights must not change what a row takes: its numbers would then jump.
        parameters = with_choices(parameters, context, tree, rows)
    base = evaluate(parameters).nodes(context, tree)
    return movement(base, (neighbour.nodes(context, tree) for neighbour in perturbed_evaluators(evaluate, parameters)))


def movement(base: Nodes, neighbours: Iterable[Nodes]) -> RowMovements:
    """How far the rows of the PERTURBATIONS `neighbours` lie from those of `base`, over PERTURBED."""
    logits, attended = np.zeros(base.logits.shape[:-1]), np.zeros(base.attended.shape[:-1])
    for neighbour in neighbours:
        logits += np.mean(np.square((neighbour.logits - base.logits) / PERTURBED), axis=-1)
        attended += np.mean(np.square((neighbour.attended - base.attended) / PERTURBED), axis=-1)
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


def perturbed_evaluators(evaluate: Callable[[Parameters], Evaluator], parameters: Parameters) -> Iterator[Evaluator]:
    """Evaluators of PERTURBATIONS models whose weights differ a little from `parameters`, each in its own way."""
    for seed in range(PERTURBATIONS):
        yield evaluate(perturb_weights(parameters, seed))


def perturb_weights(parameters: Parameters, seed: int) -> Parameters:
    """`parameters` with each weight multiplied by 1 + `PERTURBED` * (a normal number of the generator `seed`).

    Values of tanh in activations are multiplied likewise: their roundings are no roundings of a weight.
    """
    if parameters.rounded is not None:
        # Rows keep the codes that are known, whose numbers would else jump.
        parameters = replace(parameters, rounded=replace(parameters.rounded, is_exact=False))
    if isinstance(parameters.state, PerturbableWeights):
        return replace(parameters, state=parameters.state.perturbed(seed, PERTURBED))
    state = perturb_state(parameters.state, seed)
    widest = max(max(weights.shape, default=0) for weights in state.values())
    normal = np.random.default_rng((seed, widest)).standard_normal
    return replace(parameters, state=state | {TANH_ROUNDINGS: PERTURBED * normal(widest)})


def perturb_state(state: State, seed: int) -> dict[str, Array]:
    """`state` with each weight multiplied by 1 + `PERTURBED` * (a normal number of the generator `seed`)."""
    normal = np.random.default_rng(seed).standard_normal
    perturbed = dict[str, Array]()
    for name, weights in state.items():
        # In place: the weights of a checkpoint are too large to lie in memory beside three arrays of their size.
        factors = np.asarray(normal(weights.shape))
        factors *= PERTURBED
        factors += 1
        factors *= weights
        perturbed[name] = factors
    return perturbed
