"""LayerSpan: some layers of a checkpoint alone, run by the oracle on given residual streams.

The streams are an engine's own, taken before the first of the layers. No other weight is read: a text's rows have
numbers in place of tokens, and the table of given streams stands where the embedding would.
"""

from collections.abc import Iterator, Sequence
from dataclasses import dataclass, replace

import numpy as np

from specverify.reference.architecture import Checkpoint
from specverify.reference.malformed import Malformed
from specverify.reference.oracle.amplification import PERTURBATIONS, PERTURBED, Change, perturb_weights
from specverify.reference.oracle.choices import KINDS, Choices, RowChoices
from specverify.reference.oracle.formulas.routers import UNKNOWN
from specverify.reference.oracle.parameters import LAYER, Parameters, parameters_by_layer
from specverify.reference.oracle.scored_choices import ScoredChoices, scored_choices
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
        evaluator, trees = self._evaluator(text, nodes, steps)
        # The first state is the input of layer 0, and each layer's output follows.
        of_nodes = [
            evaluator.node_states(tuple(range(step.context)), tree)[self.last]
            for step, tree in zip(steps, trees, strict=True)
        ]
        return evaluator.states(tuple(range(len(text))))[self.last], of_nodes

    def output_movements(
        self, text: Array, nodes: Sequence[Array], steps: Sequence[SpanStep]
    ) -> tuple[Array, list[Array]]:
        """How far each row of `outputs` moves when all weights and streams change a little, over the relative change.

        Rms over a row's numbers and over PERTURBATIONS changes: [positions], and [nodes] of each step. The rows take
        the same experts and columns in all of them.
        """
        fixed = [
            replace(step, choices=self.choices(text, entering, step))
            for entering, step in zip(nodes, steps, strict=True)
        ]
        base = self.outputs(text, nodes, fixed)
        squares = [np.zeros(len(rows)) for rows in (base[0], *base[1])]
        for neighbour, (changed_text, *changed_nodes) in self._neighbours([text, *nodes]):
            changed = neighbour.outputs(changed_text, changed_nodes, fixed)
            for square, rows, own in zip(squares, (changed[0], *changed[1]), (base[0], *base[1]), strict=True):
                square += np.mean(np.square((rows - own) / PERTURBED), axis=-1)
        of_text, *of_nodes = [np.sqrt(square / PERTURBATIONS) for square in squares]
        return of_text, of_nodes

    def choices(self, text: Array, entering: Array, step: SpanStep) -> RowChoices:
        """Choices of the rows of the text above a tree and of the tree: known ones, else by their scores.

        UNKNOWN in layers outside of the span; `entering` are the streams of the nodes, [nodes, hidden].
        """
        scored = {kind: self.scored_choices(kind, text, entering, step) for kind in KINDS}
        arch = self.parameters.architecture
        chosen = {}
        for kind, of_span in scored.items():
            if of_span is not None:
                every = np.full((arch.layers, *of_span.chosen.shape[1:]), UNKNOWN)
                every[self.first : self.last] = of_span.chosen
                chosen[kind] = every
        return RowChoices(**chosen, codes=step.choices.codes)

    def scored_choices(
        self, kind: str, text: Array, entering: Array, step: SpanStep, rows: list[int] | None = None
    ) -> ScoredChoices | None:
        """The scores of one kind of choice in the layers of the span, of the rows of a text and of a tree below it.

        None for a family without such a choice; `text` and `entering` are streams before the first layer. `rows` are
        those to score, by default all.
        """
        evaluator, (tree,) = self._evaluator(text[: step.context], [entering], [step])
        return scored_choices(kind, evaluator, tuple(range(step.context)), tree, range(self.first, self.last), rows)

    def score_movements(
        self, kind: str, text: Array, nodes: Sequence[Array], steps: Sequence[SpanStep]
    ) -> list[Array] | None:
        """How far such scores move when weights and streams change a little, over their rms: [span's layers, rows].

        An array for each step; all of them are asked of one changed span after the other.
        """
        fixed = [
            replace(step, choices=self.choices(text, entering, step))
            for entering, step in zip(nodes, steps, strict=True)
        ]
        base = self._scores(kind, text, nodes, fixed)
        if base is None:
            return None
        squares = [np.zeros(scored.chosen.shape[:2]) for scored in base]
        for neighbour, (changed_text, *changed_nodes) in self._neighbours([text, *nodes]):
            changed = neighbour._scores(kind, changed_text, changed_nodes, fixed)
            assert changed is not None
            for square, own, moved in zip(squares, base, changed, strict=True):
                square += own.squared_change(moved)
        return [np.sqrt(square / PERTURBATIONS) / PERTURBED for square in squares]

    def _scores(
        self, kind: str, text: Array, nodes: Sequence[Array], steps: Sequence[SpanStep]
    ) -> list[ScoredChoices] | None:
        scored = [self.scored_choices(kind, text, *pair) for pair in zip(nodes, steps, strict=True)]
        present = [choices for choices in scored if choices is not None]
        return present if len(present) == len(scored) else None

    def _neighbours(self, streams: Sequence[Array]) -> Iterator[tuple["LayerSpan", list[Array]]]:
        """PERTURBATIONS spans whose weights differ a little from these, each with `streams` that differ likewise.

        An engine rounds the stream itself at each sum; in a whole model the embedding's changed weights stand for it.
        Rows that are alike are rounded alike, so that a channel changes by the same factor in all of them.
        """
        for seed in range(PERTURBATIONS):
            factors = 1 + PERTURBED * np.random.default_rng(seed).standard_normal(streams[0].shape[-1])
            yield (
                replace(self, parameters=perturb_weights(self.parameters, Change(seed))),
                [rows * factors for rows in streams],
            )

    def _evaluator(
        self, text: Array, nodes: Sequence[Array], steps: Sequence[SpanStep]
    ) -> tuple[SharedPrefix, list[Tree]]:
        """The layers on a table of the given streams, and the steps' trees with numbers of rows as their tokens."""
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
        parameters = replace(self.parameters, state=state, choices=known)
        return SharedPrefix(parameters, range(self.first, self.last)), trees


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
