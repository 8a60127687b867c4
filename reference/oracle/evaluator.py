"""How the oracle runs a model: the interface that the naive and the prefix-sharing evaluator have in common."""

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
        """The inputs of attention at each node of that run."""
        ...

    def states(self, tokens: tuple[int, ...]) -> Array:
        """The residual stream of running `tokens` in sequence: float64 [layers + 2, len(tokens), hidden size].

        First what enters layer 0, then what leaves each layer, last the output of the last norm.
        """
        ...

    def kv(self, tokens: tuple[int, ...]) -> Kv:
        """Rotated keys and values of running `tokens` in sequence."""
        ...
