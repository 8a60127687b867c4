"""The proposal of a head with a decoder layer, from scratch on the true states.

At each step the rows of all committed tokens are computed anew, then those of each node's path, one after the other.
No row is kept between steps, and no mask is used: a row attends to a list of the rows above it.
"""

from abc import ABC, abstractmethod
from dataclasses import dataclass, replace

import numpy as np

from reference.architecture import Rope
from reference.draft.hidden import HeadInput
from reference.draft.layer_head import LayerHead
from reference.oracle.draft.level_by_level import tree_of
from reference.oracle.draft.question import Question
from reference.oracle.formulas import rotary
from reference.oracle.formulas.layer import linear, rms_norm, silu
from reference.oracle.model import attention
from reference.oracle.parameters import load, load_head
from reference.trace import Array, Drafted, frozen
from reference.tree import Tree


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


class Formulas(ABC):
    """The formulas of one kind of head, with its weights.

    Attributes:
        at: The prefix of the names of the decoder layer.
        further: The prefixes of the layers after it, plain Llama layers.
    """

    at: str
    further: tuple[str, ...] = ()

    def __init__(self, draft: LayerHead, question: Question) -> None:
        assert question.target is not None
        self.draft = draft
        self.layer = draft.layer
        self.state = load_head(draft.weights, question.target, question.dtype)
        shared = load(question.target, question.dtype)
        # A head with an embedding of its own brings it along.
        self.embedding = self.state.get("embed_tokens.weight", shared.state["model.embed_tokens.weight"])
        self.target_head = shared.head

    @abstractmethod
    def of_target(self, hidden: Array) -> Array:
        """The target's hidden states [rows, width] as the head holds them, [rows, hidden]."""

    @abstractmethod
    def entered(self, embedded: Array, held: Array) -> tuple[Array, Array]:
        """The input of attention [rows, ...] and the residual [rows, hidden] of rows of tokens and states."""

    @abstractmethod
    def scored(self, output: Array) -> Array:
        """The scores of an output [hidden]: [draft vocabulary]."""

    @abstractmethod
    def fed_back(self, output: Array) -> Array:
        """The state that the rows below a row with this output hold, [hidden]."""

    def normed(self, x: Array, name: str) -> Array:
        """`x` [..., hidden] through the norm `name`."""
        return rms_norm(x, self.state[f"{name}.weight"], self.layer.norm_eps)

    def none(self) -> Past:
        """The past of the first row."""
        empty = (np.empty((0, self.layer.kv_heads, self.layer.head_dim)),) * (1 + len(self.further))
        return Past(empty, empty, np.empty((0, 0)))

    def embedded(self, tokens: tuple[int, ...], first: int) -> Array:
        """The embeddings [rows, hidden] of the tokens of rows, the first of which has the position `first`."""
        rows: Array = self.embedding[list(tokens)]
        return rows

    def below(self, past: Past, tokens: tuple[int, ...], held: Array, first: int | None = None) -> Past:
        """The past after further rows, of these tokens beside these states [rows, hidden].

        The first row has the position `first`, by default the number of rows above it.
        """
        above = len(past.keys[0])
        first = above if first is None else first
        x, residual = self.entered(self.embedded(tokens, first), held)
        key, value, output = self._layer(self.at, x, residual, past.keys[0], past.values[0], first)
        keys, values = [key], [value]
        for at, above_keys, above_values in zip(self.further, past.keys[1:], past.values[1:], strict=True):
            normed = self.normed(output, f"{at}.input_layernorm")
            key, value, output = self._layer(at, normed, output, above_keys, above_values, first)
            keys.append(key)
            values.append(value)
        return Past(tuple(keys), tuple(values), output)

    def _layer(
        self, at: str, x: Array, residual: Array, keys: Array, values: Array, first: int
    ) -> tuple[Array, Array, Array]:
        """Keys and values of all rows, and the outputs [rows, hidden] of the rows whose attention reads `x`."""
        layer, above = self.layer, len(keys)
        positions = np.arange(first, first + len(x))
        cos, sin = rotary.table(positions, *rotary.frequencies(layer.rope or Rope(layer.theta), layer.head_dim, 0, 0))

        def project(name: str) -> Array:
            y: Array = linear(x, self.state, f"{at}.self_attn.{name}_proj").reshape(len(x), -1, layer.head_dim)
            return y

        def turned(y: Array) -> Array:
            by_row: Array = rotary.turn(y.swapaxes(0, 1), cos, sin).swapaxes(0, 1)
            return by_row

        queries = turned(project("q"))
        keys = np.concatenate([keys, turned(project("k"))])
        values = np.concatenate([values, project("v")])
        scale = 1 / np.sqrt(layer.head_dim)
        mixed = [
            attention(query, keys[: above + row + 1], values[: above + row + 1], scale)
            for row, query in enumerate(queries)
        ]
        r = residual + linear(np.array(mixed).reshape(len(x), -1), self.state, f"{at}.self_attn.o_proj")
        y = self.normed(r, f"{at}.post_attention_layernorm")
        gate, up = (linear(y, self.state, f"{at}.mlp.{name}_proj") for name in ("gate", "up"))
        return keys, values, r + linear(silu(gate) * up, self.state, f"{at}.mlp.down_proj")


def proposed_by(head: Formulas, question: Question) -> Drafted:
    """The tree that the head proposes, with its scores; the bare root where no token before the root has a state."""
    draft, tokens, hidden = head.draft, question.tokens, question.hidden
    assert hidden is not None
    if not len(hidden):
        return Drafted(Tree((0,), tokens[-1:]))
    root: tuple[int, ...] = ()
    paths = {root: head.below(head.none(), tokens[1:], head.of_target(hidden))}

    def past(path: tuple[int, ...]) -> Past:
        if path not in paths:
            above = past(path[:-1])
            paths[path] = head.below(above, path[-1:], head.fed_back(above.output)[None])
        return paths[path]

    def score(below: list[tuple[int, ...]]) -> Array:
        return np.stack([head.scored(past(path).output) for path in below])

    drafted = tree_of(draft, draft.shape, len(head.target_head), question, score, draft.fixed)
    return replace(drafted, given=HeadInput(draft.reads, 0, tokens[1:], frozen(hidden)))
