"""Evaluator: the interface through which the oracle runs a model.

The naive evaluator (`PathByPath`) and the prefix-sharing one (`SharedPrefix`) have it.
"""

from collections.abc import Sequence
from typing import Protocol, runtime_checkable

import numpy as np

from specverify.reference.family.recurrent import RecurrentState
from specverify.reference.oracle.formulas.levels import levels_of
from specverify.reference.oracle.model import Inputs, Nodes, stack_layers
from specverify.reference.oracle.packed_trees import PlacedTree
from specverify.reference.oracle.parameters import Parameters
from specverify.reference.trace import Array, Kv
from specverify.reference.tree import Tree


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


@runtime_checkable
class PackingEvaluator(Protocol):
    """An evaluator that scores the trees of several steps in one forward."""

    def expect(self, steps: Sequence[PlacedTree]) -> None:
        """Take the trees that are asked for next, each with its context, in this order."""
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
