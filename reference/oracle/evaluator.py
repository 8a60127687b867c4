"""Evaluator: the interface through which the oracle runs a model.

The naive evaluator (`PathByPath`) and the prefix-sharing one (`SharedPrefix`) have it. `routing` says by which scores
the rows of a model with experts choose them. The choice jumps where two scores are equal: a row there may go through
either expert, and its numbers with it. `amplification` says how much of the roundings inside a
model a row shows: a norm behind a nearly vanishing sum shows many times what other rows show.
"""

from collections.abc import Callable, Iterable, Iterator
from dataclasses import dataclass, replace
from typing import Protocol, runtime_checkable

import numpy as np

from reference.family.recurrent import RecurrentState
from reference.oracle.choices import Choices
from reference.oracle.formulas.levels import levels_of
from reference.oracle.formulas.routers import UNKNOWN, Router
from reference.oracle.model import Inputs, Nodes
from reference.oracle.parameters import Parameters
from reference.trace import Array, Kv
from reference.tree import Tree

PERTURBED = 2.0**-24
"""Relative size of the changes of weights by which `amplification` probes a model, small enough for linear answers."""

PERTURBATIONS = 4
"""Number of random changes of all weights that `amplification` averages over."""


@dataclass(frozen=True)
class Amplified:
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
class Recurring(Protocol):
    """An evaluator that knows the recurrent state behind a text."""

    def recurrent(self, tokens: tuple[int, ...]) -> RecurrentState | None:
        """The recurrent state behind `tokens`; None for a model without layers that have one."""
        ...


def recurrent_state(evaluator: Evaluator, tokens: tuple[int, ...]) -> RecurrentState | None:
    """The recurrent state behind `tokens`; None for a model without any, and for an evaluator that does not know it."""
    return evaluator.recurrent(tokens) if isinstance(evaluator, Recurring) else None


def latent_kv(evaluator: Evaluator, tokens: tuple[int, ...]) -> Kv | None:
    """The latent rows of running `tokens` in sequence, [layers, 1, T, ...]: latent vectors as keys, rotated as values.

    None where the evaluator has no weights to make them of.
    """
    parameters, length = evaluator.parameters, len(tokens)
    arch, rows = parameters.architecture, parameters.formulas.latent_rows
    if rows is None or not parameters.state:
        return None
    found, states = [], evaluator.states(tokens)
    for layer in range(arch.layers):
        cos, sin = parameters.rotary_table(np.arange(length), *parameters.frequencies(layer, length))
        normed = parameters.attention_input(layer, states[layer])
        found.append(rows(arch, parameters.state, layer, normed, cos, sin))
    latent, rotated = (np.stack(kind)[:, None] for kind in zip(*found, strict=True))
    return Kv(latent, rotated)


def recurred_tree(parameters: Parameters, layer: int, x: Array, tree: Tree) -> Array:
    """`Parameters.recurred` of the rows `x` [nodes, hidden] of a whole tree, whose root follows no token."""
    order, levels = levels_of(tree)
    above = [-1, *(int(path[-2]) for level in levels[1:] for path in level.paths)]
    _, added = parameters.recurred(layer, x[order], parameters.start(), above)
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

    def gaps(self, others: Array) -> Array:
        """`Router.gaps` of the experts `others` [layers, context + nodes, taken]; 0 in layers without experts."""
        return self._by_layer(0.0, lambda router, layer: router.gaps(others[layer]))

    def _by_layer(self, without: float, ask: Callable[[Router, int], Array]) -> Array:
        rows = self.chosen.shape[1]
        return np.stack(
            [
                np.full(rows, without) if router is None else ask(router, layer)
                for layer, router in enumerate(self.routers)
            ]
        )


def routing(evaluator: Evaluator, context: tuple[int, ...], tree: Tree) -> Routing | None:
    """The scores of experts for the tokens of `context` and then the nodes of `tree`.

    None for a family without experts, and for an evaluator that holds no weights (plain transformers).
    """
    above, parameters = len(context), evaluator.parameters
    if parameters.formulas.experts is None or not parameters.state:
        return None
    # The context as a chain, with the tree below its last token: one run gives the states of every row.
    below = tuple(above + parent if node else max(0, above - 1) for node, parent in enumerate(tree.parent))
    whole = Tree((0, *range(above - 1), *below) if above else tree.parent, (*context, *tree.token))
    states, attended = evaluator.node_states((), whole), evaluator.nodes((), whole).attended
    routers: list[Router | None] = []
    for layer in range(parameters.architecture.layers):
        between = states[layer]
        if layer not in parameters.architecture.unattended:
            between = parameters.between(layer, between, attended[layer].swapaxes(0, 1).reshape(len(whole), -1))
        if layer in parameters.architecture.recurrent:
            between = between + recurred_tree(parameters, layer, states[layer], whole)
        routers.append(parameters.router(layer, between))
    taken = next((router.taken for router in routers if router is not None), 0)
    known = parameters.chosen((), whole)
    chosen = np.full((len(routers), len(whole), taken), UNKNOWN)
    for layer, router in enumerate(routers):
        if router is not None:
            chosen[layer] = router.followed(None if known is None else known[layer])
    return Routing(tuple(routers), chosen)


def choosing(parameters: Parameters, context: tuple[int, ...], tree: Tree, chosen: Array) -> Parameters:
    """`parameters` of which the rows of `context` and `tree` take the experts `chosen` [layers, rows, taken]."""
    choices = Choices(chosen.shape[0], chosen.shape[2])
    choices.add(context, tree, chosen)
    return replace(parameters, choices=choices)


def amplification(
    evaluate: Callable[[Parameters], Evaluator], parameters: Parameters, context: tuple[int, ...], tree: Tree
) -> Amplified | None:
    """How far each row of logits and of attention outputs moves when all weights change a little.

    Each weight is multiplied by 1 + `PERTURBED` * (a normal number); the change is the rms over a row's numbers and
    over `PERTURBATIONS` such models. None where the evaluator holds no weights (plain transformers).
    """
    if not parameters.state:
        return None
    routed = routing(evaluate(parameters), context, tree)
    if routed is not None:
        # A change of weights must not change the experts of a row, whose numbers would then jump.
        parameters = choosing(parameters, context, tree, routed.chosen)
    base = evaluate(parameters).nodes(context, tree)
    return movement(base, (other.nodes(context, tree) for other in perturbed(evaluate, parameters)))


def movement(base: Nodes, others: Iterable[Nodes]) -> Amplified:
    """How far the rows of the PERTURBATIONS `others` lie from those of `base`, over PERTURBED."""
    logits, attended = np.zeros(base.logits.shape[:-1]), np.zeros(base.attended.shape[:-1])
    for moved in others:
        logits += np.mean(np.square((moved.logits - base.logits) / PERTURBED), axis=-1)
        attended += np.mean(np.square((moved.attended - base.attended) / PERTURBED), axis=-1)
    return Amplified(np.sqrt(logits / PERTURBATIONS), np.sqrt(attended / PERTURBATIONS))


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
    fixed = choosing(parameters, context, tree, base.chosen)
    moved = np.zeros(base.chosen.shape[:2])
    for other in perturbed(evaluate, fixed):
        found = routing(other, context, tree)
        assert found is not None
        for layer, (one, two) in enumerate(zip(base.routers, found.routers, strict=True)):
            if one is not None and two is not None:
                change = (two.scores - one.scores) / PERTURBED / one.size
                moved[layer] += np.mean(np.square(change), axis=-1)
    return np.sqrt(moved / PERTURBATIONS)


def perturbed(evaluate: Callable[[Parameters], Evaluator], parameters: Parameters) -> Iterator[Evaluator]:
    """Evaluators of PERTURBATIONS models whose weights differ a little from `parameters`, each in its own way."""
    for seed in range(PERTURBATIONS):
        yield evaluate(changed(parameters, seed))


def changed(parameters: Parameters, seed: int) -> Parameters:
    """`parameters` with each weight multiplied by 1 + `PERTURBED` * (a normal number of the generator `seed`)."""
    normal = np.random.default_rng(seed).standard_normal
    state = {name: one * (1 + PERTURBED * normal(one.shape)) for name, one in parameters.state.items()}
    return replace(parameters, state=state)
