"""Evaluator: the interface through which the oracle runs a model.

The naive evaluator (`PathByPath`) and the prefix-sharing one (`SharedPrefix`) have it.
"""

from typing import Protocol

from reference.oracle.model import Inputs, Nodes
from reference.oracle.parameters import Parameters
from reference.trace import Array, Kv
from reference.tree import Tree


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
