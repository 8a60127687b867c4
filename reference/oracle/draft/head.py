"""The proposal of a head with a decoder layer, from scratch on the true states.

At each step the rows of all committed tokens are computed anew, then those of each node's path, one after the other.
No row is kept between steps. A row attends to itself and all rows above it. Where the head's alignment leaves rows of
accepted nodes as they are, the draft names them (`LayerHead.own_rows`): each is computed anew from the output of the
row before it.
"""

from abc import ABC, abstractmethod
from collections.abc import Callable
from dataclasses import dataclass, replace

import numpy as np

from specverify.reference.architecture import Rope
from specverify.reference.draft import Draft
from specverify.reference.draft.hidden import HeadInput
from specverify.reference.draft.layer_head import LayerHead
from specverify.reference.oracle.draft.level_by_level import PathScores, tree_of
from specverify.reference.oracle.draft.question import Question
from specverify.reference.oracle.formulas import rotary
from specverify.reference.oracle.formulas.block_attention import block_attention
from specverify.reference.oracle.formulas.layer import gated_block, linear, rms_norm
from specverify.reference.oracle.parameters import parameters_outside_layers
from specverify.reference.trace import Array, Drafted, Step, frozen
from specverify.reference.tree import Tree

EVERYTHING = (0, 0)
"""The reach of a row that attends to all rows above it: neither window nor chunk."""


@dataclass(frozen=True)
class Past:
    """The rows above: of each layer rotated keys and values [rows, kv_heads, head_dim], and the last run's outputs.

    The outputs are those of the last layer, [some, hidden].
    """

    keys: tuple[Array, ...]
    values: tuple[Array, ...]
    outputs: Array

    @property
    def output(self) -> Array:
        """The output of the last row, [hidden]."""
        last: Array = self.outputs[-1]
        return last


class HeadFormulas(ABC):
    """The formulas of one kind of head, with its weights.

    Attributes:
        prefix: The prefix of the names of the decoder layer.
        further_prefixes: The prefixes of the layers after it, plain Llama layers.
        unrotated: The layers without rotary embedding, counted from 0.
    """

    prefix: str
    further_prefixes: tuple[str, ...] = ()
    unrotated: tuple[int, ...] = ()

    def __init__(self, draft: LayerHead, question: Question) -> None:
        assert question.target is not None
        self.draft = draft
        self.layer = draft.layer
        self.state = question.weights_of(draft.weights)
        target_parameters = parameters_outside_layers(question.target, question.dtype)
        self.target = target_parameters
        # A head with an embedding of its own brings it along.
        self.embedding = self.state.get("embed_tokens.weight", target_parameters.state["model.embed_tokens.weight"])
        self.target_head = target_parameters.head

    @abstractmethod
    def target_states(self, hidden: Array) -> Array:
        """The target's hidden states [rows, width] as the head holds them, [rows, hidden]."""

    @abstractmethod
    def enter(self, embedded: Array, states: Array) -> tuple[Array, Array]:
        """The input of attention [rows, ...] and the residual [rows, hidden] of rows of tokens and states."""

    @abstractmethod
    def score(self, output: Array) -> Array:
        """The scores of outputs [..., hidden]: [..., draft vocabulary]."""

    @abstractmethod
    def feed_back(self, output: Array) -> Array:
        """The state that the rows below a row with this output hold, [hidden]."""

    def feed_forward(self, layer: int, x: Array, first: int) -> Array:
        """The feed-forward block of `layer` of its normed input [rows, hidden]; the first row has number `first`."""
        return gated_block(x, self.state, f"{self.prefixes[layer]}.mlp")

    @property
    def prefixes(self) -> tuple[str, ...]:
        """The prefixes of all layers."""
        return (self.prefix, *self.further_prefixes)

    def norm(self, x: Array, name: str) -> Array:
        """`x` [..., hidden] through the norm `name`."""
        return rms_norm(x, self.state[f"{name}.weight"], self.layer.norm_eps)

    def empty_past(self) -> Past:
        """The past of the first row."""
        empty = (np.empty((0, self.layer.kv_heads, self.layer.head_dim)),) * (1 + len(self.further_prefixes))
        return Past(empty, empty, np.empty((0, 0)))

    def embed(self, tokens: tuple[int, ...], first: int) -> Array:
        """What rows read of their tokens, [rows, hidden]; the first row has the number `first`.

        A head that sees images reads the target's embeddings of them: of the token that the row holds, which may stand
        a column behind the row's number.
        """
        rows: Array = self.embedding[list(tokens)]
        if not self.draft.sees_images:
            return rows
        return self.target.with_images(rows, np.arange(first, first + len(tokens)) + self.draft.lead)

    def rotary_table(self, positions: Array) -> tuple[Array, Array]:
        """Cosine and sine [rows, head_dim / 2] of rows of these numbers; see `rotary.table`."""
        frequencies = rotary.frequencies(self.layer.rope or Rope(self.layer.theta), self.layer.head_dim, 0, 0)
        if not self.draft.sees_images or not self.layer.sections:
            return rotary.table(positions, *frequencies)
        places = rotary.grid_positions(self.target.images, positions)
        return rotary.grid_table(self.layer.sections, places, *frequencies)

    def extend(self, past: Past, tokens: tuple[int, ...], states: Array, first: int | None = None) -> Past:
        """The past after further rows, of these tokens beside these states [rows, hidden].

        The first row has the position `first`, by default the number of rows above it.
        """
        num_above = len(past.keys[0])
        first = num_above if first is None else first
        x, residual = self.enter(self.embed(tokens, first), states)
        output = residual
        keys, values = list[Array](), list[Array]()
        for number, prefix in enumerate(self.prefixes):
            if number:
                x = self.norm(output, f"{prefix}.input_layernorm")
            key, value, output = self._layer(number, x, output, past.keys[number], past.values[number], first)
            keys.append(key)
            values.append(value)
        return Past(tuple(keys), tuple(values), output)

    def _layer(
        self, number: int, x: Array, residual: Array, keys: Array, values: Array, first: int
    ) -> tuple[Array, Array, Array]:
        """Keys and values of all rows, and the outputs [rows, hidden] of the rows whose attention reads `x`."""
        layer, num_above, prefix = self.layer, len(keys), self.prefixes[number]
        positions = np.arange(first, first + len(x))
        cos, sin = self.rotary_table(positions)

        def project(name: str) -> Array:
            y: Array = linear(x, self.state, f"{prefix}.self_attn.{name}_proj").reshape(len(x), -1, layer.head_dim)
            return y

        def rotate(y: Array) -> Array:
            if number in self.unrotated:
                return y
            by_row: Array = rotary.turn(y.swapaxes(0, 1), cos, sin).swapaxes(0, 1)
            return by_row

        queries = rotate(project("q"))
        keys = np.concatenate([keys, rotate(project("k"))])
        values = np.concatenate([values, project("v")])
        scaled = queries.swapaxes(0, 1) / np.sqrt(layer.head_dim)
        mixed = block_attention(scaled, keys.swapaxes(0, 1), values.swapaxes(0, 1), EVERYTHING, 0.0, None)
        r = residual + linear(mixed.swapaxes(0, 1).reshape(len(x), -1), self.state, f"{prefix}.self_attn.o_proj")
        y = self.norm(r, f"{prefix}.post_attention_layernorm")
        return keys, values, r + self.feed_forward(number, y, num_above)


def states_of_rows(draft: LayerHead, hidden: Array) -> Array:
    """Of the states `hidden` [tokens but the root, width], those of the rows of all tokens: [rows, width]."""
    positions = [draft.position_of_state(row) for row in range(len(hidden) + draft.fuses_first)]
    states: Array = hidden[positions]
    return states


def committed_past(head: HeadFormulas, tokens: tuple[int, ...], states: Array) -> Past:
    """The past after the rows of `tokens` beside the target's `states` [rows, width], or beside the head's own."""
    past = head.empty_past()
    first = 0
    for row in (*head.draft.own_rows, len(tokens)):
        last = min(row, len(tokens))
        if last > first:
            past = head.extend(past, tokens[first:last], head.target_states(states[first:last]))
        if row < len(tokens):
            past = head.extend(past, tokens[row : row + 1], head.feed_back(past.output)[None])
        first = row + 1
    return past


def own_rows_after(draft: Draft, step: Step) -> tuple[int, ...]:
    """The rows of the head's own after `step`: those before, and the rows of accepted nodes that the head keeps.

    The head has run the nodes whose children it has scored. An accepted path may end in a leaf whose twin was run: the
    kept rows are those above its last node.
    """
    drafted, accepted, emitted = step.drafted, step.accepted, step.emitted
    if not isinstance(draft, LayerHead) or draft.alignment != "last" or drafted is None or drafted.given is None:
        return ()
    given = drafted.given
    if not draft.runs_nodes or drafted.logits is None or accepted is None or emitted is None or not emitted.tokens:
        return given.own_rows
    last = accepted.path[: len(emitted.tokens)][-1]
    num_rows = given.first + len(given.tokens)
    num_kept = sum(not np.isnan(drafted.logits[node]).any() for node in drafted.tree.path(last)[1:])
    return (*given.own_rows, *range(num_rows, num_rows + num_kept))


def propose_by_head(head: HeadFormulas, question: Question) -> Drafted:
    """The tree that the head proposes, with its scores; the bare root where no token before the root has a state."""
    return propose_by_paths(head, question, lambda above: ScoresOfPaths(head, above))


class ScoresOfPaths:
    """The scores of a head behind paths below the root, each with a row for every token of it."""

    def __init__(self, head: HeadFormulas, above: Past) -> None:
        self._head = head
        self._pasts: dict[tuple[int, ...], Past] = {(): above}

    def __call__(self, paths: list[tuple[int, ...]]) -> Array:
        """The scores behind each of `paths`, [paths, draft vocabulary]."""
        # One product for all paths: the matrix of the vocabulary is read once.
        return self._head.score(np.stack([self._past(path).output for path in paths]))

    def _past(self, path: tuple[int, ...]) -> Past:
        """The past after the rows of `path`."""
        if path not in self._pasts:
            past_of_parent = self._past(path[:-1])
            state = self._head.feed_back(past_of_parent.output)[None]
            self._pasts[path] = self._head.extend(past_of_parent, path[-1:], state)
        return self._pasts[path]


def propose_by_paths(head: HeadFormulas, question: Question, scores_above: Callable[[Past], PathScores]) -> Drafted:
    """See `propose_by_head`; `scores_above` gives the scores of paths below the rows of all committed tokens."""
    draft, tokens, hidden = head.draft, question.tokens, question.hidden
    assert hidden is not None
    if not len(hidden):
        return Drafted(Tree((0,), tokens[-1:]))
    row_tokens, row_states = draft.row_tokens(tokens), states_of_rows(draft, hidden)
    score = scores_above(committed_past(head, row_tokens, row_states))
    drafted = tree_of(draft, draft.shape, len(head.target_head), question, score, draft.fixed)
    head_input = HeadInput(draft.reads, 0, row_tokens, frozen(row_states), own_rows=draft.own_rows)
    return replace(drafted, given=head_input)
