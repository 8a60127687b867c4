"""Evaluator: the interface through which the oracle runs a model.

The naive evaluator (`PathByPath`) and the prefix-sharing one (`SharedPrefix`) have it. `routing` says by which scores
the rows of a model with experts choose them. The choice jumps where two scores are equal: a row there may go through
either expert, and its numbers with it. `amplification` says how much of the roundings inside a
model a row shows: a norm behind a nearly vanishing sum shows many times what other rows show.
"""

from collections.abc import Callable, Iterable, Iterator, Mapping
from dataclasses import dataclass, replace
from typing import Protocol, runtime_checkable

import numpy as np

from specverify.reference.family.recurrent import RecurrentState
from specverify.reference.oracle.choices import Choices
from specverify.reference.oracle.formulas.layer import TANH_ROUNDINGS, State
from specverify.reference.oracle.formulas.levels import levels_of
from specverify.reference.oracle.formulas.routers import UNKNOWN, Router
from specverify.reference.oracle.model import Inputs, Nodes, stack_layers
from specverify.reference.oracle.parameters import Parameters
from specverify.reference.trace import Array, Kv
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


class Evaluator(Protocol):
    """A model in float64."""

    parameters: Parameters

    def nodes(self, context: tuple[int, ...], tree: Tree) -> Nodes:
        """Logits and attention outputs of each node: those of running `context` and the node's path in sequence."""
        ...

    def inputs(self, context: tuple[int, ...], tree: Tree) -> Inputs:
        """The inputs of attention at each node, in the run that `nodes` describes."""
        ...

    def states(self, tokens: tuple[int, ...]) -> Array:
        """The residual stream of running `tokens` in sequence: float64 [layers + 2, len(tokens), hidden size].

        The first entry is the input of layer 0, then comes the output of each layer, last the output of the last norm.
        """
        ...

    def node_states(self, context: tuple[int, ...], tree: Tree) -> Array:
        """The residual stream at each node, that of running `context` and the node's path in sequence.

        float64 [layers + 2, nodes, hidden size], with the first axis as in `states`.
        """
        ...

    def kv(self, tokens: tuple[int, ...]) -> Kv:
        """Rotated keys and values of running `tokens` in sequence."""
        ...


@runtime_checkable
class RecurrentEvaluator(Protocol):
    """An evaluator that knows the recurrent state behind a text."""

    def recurrent(self, tokens: tuple[int, ...]) -> RecurrentState | None:
        """The recurrent state behind `tokens`; None for a model without layers that have one."""
        ...


def recurrent_state(evaluator: Evaluator, tokens: tuple[int, ...]) -> RecurrentState | None:
    """The recurrent state behind `tokens`; None for a model without any, and for an evaluator that does not know it."""
    return evaluator.recurrent(tokens) if isinstance(evaluator, RecurrentEvaluator) else None


def latent_kv(evaluator: Evaluator, tokens: tuple[int, ...]) -> Kv | None:
    """The latent rows of running `tokens` in sequence, [layers, 1, T, ...]: latent vectors as keys, rotated as values.

    None where the evaluator has no weights to make them of.
    """
    parameters, length = evaluator.parameters, len(tokens)
    arch, rows = parameters.architecture, parameters.formulas.latent_rows
    if rows is None or not parameters.state:
        return None
    latent_rows, states = [], evaluator.states(tokens)
    for layer in range(arch.layers):
        cos, sin = parameters.rotary_table(np.arange(length), *parameters.frequencies(layer, length))
        normed = parameters.attention_input(layer, states[layer])
        latent, rotated = rows(arch, parameters.state, layer, normed, cos, sin)
        indexer = parameters.formulas.indexer
        if indexer is not None and arch.layer_heads(layer).index_dim:  # the index key stands behind the latent vector
            index_keys = indexer.keys(arch, parameters.state, layer, normed, cos, sin)
            latent = np.concatenate([latent, index_keys], axis=-1)
        latent_rows.append((parameters.host_copy(latent[None]), parameters.host_copy(rotated[None])))
    keys, values = zip(*latent_rows, strict=True)
    return Kv(stack_layers(keys, 1, max(layer.shape[-1] for layer in keys)), np.stack(values))


def recurrent_outputs(parameters: Parameters, layer: int, x: Array, tree: Tree) -> Array:
    """`Parameters.recurred` of the rows `x` [nodes, hidden] of a whole tree, whose root follows no token."""
    order, levels = levels_of(tree)
    above = [-1, *(int(path[-2]) for level in levels[1:] for path in level.paths)]
    _, added = parameters.run_recurrence(layer, x[order], parameters.start(), above)
    return added[np.argsort(order)]


@dataclass(frozen=True)
class Routing:
    """The scores of experts in every layer, for the rows of a context and of a tree below it.

    Attributes:
        routers: For each layer its scores, [context + nodes, experts]; None for a layer without experts.
        chosen: The experts that the rows took, [layers, context + nodes, taken]; UNKNOWN in layers without experts.
    """

    routers: tuple[Router | None, ...]
    chosen: Array

    def chosen_by_scores(self, layer: int) -> Array:
        """The experts that the scores of `layer` choose, whatever its rows took, [context + nodes, taken]."""
        router = self.routers[layer]
        return self.chosen[layer] if router is None else router.chosen

    def margins(self) -> Array:
        """`Router.margins`, [layers, context + nodes]; infinity in layers without experts."""
        return self._by_layer(np.inf, lambda router, layer: router.margins())

    def gaps(self, experts: Array) -> Array:
        """`Router.gaps` of `experts` [layers, context + nodes, taken]; 0 in layers without experts."""
        return self._by_layer(0.0, lambda router, layer: router.gaps(experts[layer]))

    def _by_layer(self, default: float, measure: Callable[[Router, int], Array]) -> Array:
        rows = self.chosen.shape[1]
        return np.stack(
            [
                np.full(rows, default) if router is None else measure(router, layer)
                for layer, router in enumerate(self.routers)
            ]
        )


def routing(evaluator: Evaluator, context: tuple[int, ...], tree: Tree) -> Routing | None:
    """The scores of experts for the tokens of `context` and then the nodes of `tree`.

    None for a family without experts, and for an evaluator that holds no weights (plain transformers).
    """
    num_context, parameters = len(context), evaluator.parameters
    if parameters.formulas.experts is None or not parameters.state:
        return None
    # The context as a chain, with the tree below its last token: one run gives the states of every row.
    tree_parents = tuple(
        num_context + parent if node else max(0, num_context - 1) for node, parent in enumerate(tree.parent)
    )
    whole_tree = Tree(
        (0, *range(num_context - 1), *tree_parents) if num_context else tree.parent, (*context, *tree.token)
    )
    states, attended = evaluator.node_states((), whole_tree), evaluator.nodes((), whole_tree).attended
    routers: list[Router | None] = []
    for layer in range(parameters.architecture.layers):
        residual = states[layer]
        if layer not in parameters.architecture.unattended:
            residual = parameters.after_attention(
                layer, residual, attended[layer].swapaxes(0, 1).reshape(len(whole_tree), -1)
            )
        if layer in parameters.architecture.recurrent:
            residual = residual + recurrent_outputs(parameters, layer, states[layer], whole_tree)
        router = parameters.router(layer, states[layer], residual)
        routers.append(None if router is None else router.converted(parameters.host_copy))
    experts_per_row = next((router.experts_per_row for router in routers if router is not None), 0)
    known_experts = parameters.chosen_experts((), whole_tree)
    chosen = np.full((len(routers), len(whole_tree), experts_per_row), UNKNOWN)
    for layer, router in enumerate(routers):
        if router is not None:
            chosen[layer] = router.follow(None if known_experts is None else known_experts[layer])
    return Routing(tuple(routers), chosen)


def with_choices(parameters: Parameters, context: tuple[int, ...], tree: Tree, experts: Array) -> Parameters:
    """`parameters` of which the rows of `context` and `tree` take `experts` [layers, rows, taken]."""
    choices = Choices(experts.shape[0], experts.shape[2])
    choices.add(context, tree, experts)
    return replace(parameters, choices=choices)


def amplification(
    evaluate: Callable[[Parameters], Evaluator], parameters: Parameters, context: tuple[int, ...], tree: Tree
) -> RowMovements | None:
    """How far each row of logits and of attention outputs moves when all weights change a little.

    Each weight is multiplied by 1 + `PERTURBED` * (a normal number); the change is the rms over a row's numbers and
    over `PERTURBATIONS` such models. None where the evaluator holds no weights (plain transformers).
    """
    if not parameters.state:
        return None
    scores = routing(evaluate(parameters), context, tree)
    if scores is not None:
        # A change of weights must not change the experts of a row, whose numbers would then jump.
        parameters = with_choices(parameters, context, tree, scores.chosen)
    base = evaluate(parameters).nodes(context, tree)
    return movement(base, (neighbour.nodes(context, tree) for neighbour in perturbed_evaluators(evaluate, parameters)))


def movement(base: Nodes, neighbours: Iterable[Nodes]) -> RowMovements:
    """How far the rows of the PERTURBATIONS `neighbours` lie from those of `base`, over PERTURBED."""
    logits, attended = np.zeros(base.logits.shape[:-1]), np.zeros(base.attended.shape[:-1])
    for neighbour in neighbours:
        logits += np.mean(np.square((neighbour.logits - base.logits) / PERTURBED), axis=-1)
        attended += np.mean(np.square((neighbour.attended - base.attended) / PERTURBED), axis=-1)
    return RowMovements(np.sqrt(logits / PERTURBATIONS), np.sqrt(attended / PERTURBATIONS))


def score_movement(
    evaluate: Callable[[Parameters], Evaluator], parameters: Parameters, context: tuple[int, ...], tree: Tree
) -> Array | None:
    """How far the scores of experts move when all weights change a little, over their rms: [layers, context + nodes].

    The change is the rms over a row's scores, over the relative change of weights; see `amplification`. Zeros in layers
    without experts; None for a family without experts.
    """
    base = routing(evaluate(parameters), context, tree)
    if base is None:
        return None
    fixed_parameters = with_choices(parameters, context, tree, base.chosen)
    movements = np.zeros(base.chosen.shape[:2])
    for neighbour in perturbed_evaluators(evaluate, fixed_parameters):
        scores = routing(neighbour, context, tree)
        assert scores is not None
        for layer, (base_router, moved_router) in enumerate(zip(base.routers, scores.routers, strict=True)):
            if base_router is not None and moved_router is not None:
                change = (moved_router.scores - base_router.scores) / PERTURBED / base_router.size
                movements[layer] += np.mean(np.square(change), axis=-1)
    return np.sqrt(movements / PERTURBATIONS)


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
    if isinstance(parameters.state, PerturbableWeights):
        return replace(parameters, state=parameters.state.perturbed(seed, PERTURBED))
    state = perturb_state(parameters.state, seed)
    widest = max(max(weights.shape, default=0) for weights in state.values())
    normal = np.random.default_rng((seed, widest)).standard_normal
    return replace(parameters, state=state | {TANH_ROUNDINGS: PERTURBED * normal(widest)})


def perturb_state(state: State, seed: int) -> dict[str, Array]:
    """`state` with each weight multiplied by 1 + `PERTURBED` * (a normal number of the generator `seed`)."""
    normal = np.random.default_rng(seed).standard_normal
    return {name: weights * (1 + PERTURBED * normal(weights.shape)) for name, weights in state.items()}
