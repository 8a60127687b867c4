"""LayerSpan: some layers of a checkpoint alone, run by the oracle on given residual streams.

The streams are an engine's own, taken before the first of the layers. No other weight is read: a text's rows have
numbers in place of tokens, and the table of given streams stands where the embedding would.
"""

from collections.abc import Sequence
from dataclasses import dataclass, replace

import numpy as np

from specverify.reference.architecture import Checkpoint
from specverify.reference.malformed import Malformed
from specverify.reference.oracle.choices import Choices, RowChoices
from specverify.reference.oracle.parameters import LAYER, Parameters, parameters_by_layer
from specverify.reference.oracle.shared_prefix import SharedPrefix
from specverify.reference.trace import Array
from specverify.reference.tree import Tree

TABLES = ("model.embed_tokens.weight", "lm_head.weight")
"""Weights with a row for each token, in whose place the given streams stand; no logits of a span are read."""


@dataclass(frozen=True)
class SpanStep:
    """A tree whose rows run through a span.

    Attributes:
        context: The number of rows of the text above it.
        tree: The tree; its tokens are not read.
        choices: The experts and columns that the rows of text and tree take, where they are known.
    """

    context: int
    tree: Tree
    choices: RowChoices


@dataclass(frozen=True)
class LayerSpan:
    """The layers `first` to `last` - 1 of a checkpoint.

    Attributes:
        parameters: Their weights in float64, rounded to the working dtype first; none of other layers.
        first: The first layer, from 0.
        last: The layer behind the last one.
    """

    parameters: Parameters
    first: int
    last: int

    def outputs(self, text: Array, nodes: Sequence[Array], steps: Sequence[SpanStep]) -> tuple[Array, list[Array]]:
        """The residual streams after the last layer, of the text's rows [positions, hidden] and of each step's nodes.

        Args:
            text: The streams before the first layer by position, [positions, hidden].
            nodes: Those of the nodes of each step, [nodes, hidden].
            steps: The steps, each behind the first rows of the text.
        """
        width = self.parameters.architecture.hidden_size
        # A row's token is its number in this table.
        table = np.concatenate([text, *nodes]).astype(np.float64)
        outer = {"model.norm.weight": np.ones(width), "model.norm.bias": np.zeros(width)}
        state = {**self.parameters.state, **dict.fromkeys(TABLES, table), **outer}
        begins = len(text) + np.cumsum([0, *map(len, nodes)])
        trees = [
            Tree(step.tree.parent, tuple(range(begin, begin + len(step.tree))))
            for step, begin in zip(steps, begins.tolist(), strict=False)
        ]
        choices = Choices(self.parameters.architecture.layers)
        for step, tree in zip(steps, trees, strict=True):
            choices.add(tuple(range(step.context)), tree, step.choices)
        known = choices if any(step.choices.present for step in steps) else None
        evaluator = SharedPrefix(replace(self.parameters, state=state, choices=known), range(self.first, self.last))
        # The first state is the input of layer 0, and each layer's output follows.
        of_nodes = [
            evaluator.node_states(tuple(range(step.context)), tree)[self.last]
            for step, tree in zip(steps, trees, strict=True)
        ]
        return evaluator.states(tuple(range(len(text))))[self.last], of_nodes


def load_span(model: Checkpoint, dtype: str, first: int, last: int) -> LayerSpan:
    """The layers `first` to `last` - 1 of `model`, as an engine of working dtype `dtype` holds them.

    Raises:
        UnreadableCheckpoint: The checkpoint cannot be read, or does not have the digest that the case names.
        Malformed: There are no such layers, or they read more than the residual stream before them.
    """
    by_layer = parameters_by_layer(model, dtype)
    check_span(by_layer, first, last)
    state = {}
    for name in by_layer.state:
        layer = LAYER.match(name)
        if layer is not None and first <= int(layer[1]) < last:
            state[name] = by_layer.state[name]
    return LayerSpan(replace(by_layer, state=state, embedding_scale=1.0), first, last)


def check_span(parameters: Parameters, first: int, last: int) -> None:
    """Refuse layers that there are not, and those that read what no residual stream holds.

    Raises:
        Malformed: with the reason.
    """
    arch = parameters.architecture
    if not 0 <= first < last <= arch.layers:
        raise Malformed("layers", f"{first}:{last} is no part of the layers 0:{arch.layers}")
    if parameters.formulas.layer_inputs is not None:
        raise Malformed("layers", f"{arch.family} layers read embeddings of their own beside the residual stream")
    if arch.rope.kind == "longrope":
        raise Malformed("layers", "longrope turns rows anew when a text grows long, which a part cannot follow")
    borrowed = [layer for layer in range(first, last) if arch.kv_sources[layer] < first]
    if borrowed:
        source = arch.kv_sources[borrowed[0]]
        raise Malformed("layers", f"layer {borrowed[0]} reads keys and values of layer {source}: begin there")
    if parameters.formulas.indexer is not None and not arch.layer_heads(first).index_dim:
        raise Malformed("layers", f"layer {first} reads columns that an earlier layer chooses: begin at that one")
