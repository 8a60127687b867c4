"""The formulas of decoder layers, and the ones in which model families differ.

Root mean square norm (arXiv 1910.07467), LayerNorm (1607.06450), grouped queries (2305.13245), gated feed-forward
blocks (2002.05202), soft caps (2408.00118), temperature by position (2501.19399). A formula in which families differ is
a field of `Formulas`; `specverify.reference.oracle.family` holds each family's choice.
"""

from collections.abc import Callable, Mapping
from dataclasses import dataclass

import numpy as np

from specverify.reference.architecture import Architecture, Rope
from specverify.reference.oracle.formulas import rotary
from specverify.reference.oracle.formulas.recurrence import Recurrence
from specverify.reference.oracle.formulas.routers import Router
from specverify.reference.trace import Array

State = Mapping[str, Array]
"""The weights of a model by name, matrices as [out, in]."""

Unary = Callable[[Array], Array]
Activation = Callable[[Array, State], Array]


def rms_norm(x: Array, gain: Array, eps: float) -> Array:
    """`x` [..., n] divided by its root mean square along the last axis, times `gain` [n]."""
    mean_square = np.einsum("...i,...i->...", x, x)[..., None] / x.shape[-1]
    normed: Array = x / np.sqrt(mean_square + eps) * gain
    return normed


def layer_norm(x: Array, gain: Array, eps: float) -> Array:
    """`x` [..., n] less its mean along the last axis, then normed by `rms_norm`."""
    return rms_norm(x - x.mean(axis=-1, keepdims=True), gain, eps)


def linear(x: Array, state: State, name: str) -> Array:
    """`x` [..., in] through the projection `name` -> [..., out], with its bias where the architecture has one."""
    # State dicts hold matrices as [out, in].
    y: Array = x @ state[f"{name}.weight"].T
    bias = state.get(f"{name}.bias")
    return y if bias is None else y + bias


def silu(x: Array, _: State | None = None) -> Array:
    """`x` times its sigmoid, which no roundings of its own change much."""
    with np.errstate(over="ignore"):  # exp(-x) may be infinite, and x / inf is the limit
        gated: Array = x / (1 + np.exp(-x))
    return gated


def sigmoid(x: Array) -> Array:
    """1 / (1 + exp(-x))."""
    with np.errstate(over="ignore"):  # exp(-x) may be infinite, and 1 / inf is the limit
        share: Array = 1 / (1 + np.exp(-x))
    return share


TANH_ROUNDINGS = "roundings of tanh"
"""The entry of a state dict by which `gelu_tanh` changes the values of tanh, relative to them: [at least the width].

No model has it but a perturbed one (`specverify.reference.oracle.amplification.perturb_weights`).
"""


def gelu_tanh(x: Array, state: State) -> Array:
    """The Gaussian error linear unit in its tanh form (arXiv 1606.08415, section 2).

    Far below 0 its 1 + tanh is the difference of two nearly equal numbers, so that a rounding of tanh is most of it.
    """
    bent = np.tanh(np.sqrt(2 / np.pi) * (x + 0.044715 * x**3))
    roundings = state.get(TANH_ROUNDINGS)
    if roundings is not None:
        bent = bent * (1 + roundings[: x.shape[-1]])
    gated: Array = 0.5 * x * (1 + bent)
    return gated


def first_visible(reach: tuple[int, int], position: int) -> int:
    """The first position that `position` may attend to, in a layer of this window and chunk (`Architecture.reaches`).

    >>> [first_visible(reach, 9) for reach in ((0, 0), (3, 0), (0, 4))]
    [0, 7, 8]
    """
    window, chunk = reach
    if chunk:
        return position - position % chunk
    return max(0, position + 1 - window) if window else 0


def soft_cap(scores: Array, cap: float) -> Array:
    """Scaled scores after the soft cap `cap` (`Architecture.score_cap`); a cap of 0 returns them unchanged.

    >>> [float(round(score, 3)) for score in soft_cap(np.array([0.0, 1.0, -50.0]), 2.0)]
    [0.0, 0.924, -2.0]
    """
    if not cap:
        return scores
    # Apply before the mask: tanh would turn a hidden column's -inf into -cap.
    squeezed: Array = cap * np.tanh(scores / cap)
    return squeezed


def temperature(arch: Architecture, layer: int, positions: Array) -> Array:
    """Factors of the queries of `layer` at `positions` [T]: float64 [T].

    They differ from 1 only in layers without rotary embedding, and only where the architecture has a floor scale.
    """
    if not arch.floor_scale or layer not in arch.unrotated:
        return np.ones(len(positions))
    # As in transformers' Llama4TextAttention, which also counts positions from 0.
    scale: Array = 1 + arch.attn_scale * np.log(1 + (positions + 1) // arch.floor_scale)
    return scale


def rotate_halves(arch: Architecture, x: Array, cos: Array, sin: Array) -> Array:
    """Queries or keys `x` [..., T, head_dim] turned by the rotary table; dimension i turns with i + head_dim / 2."""
    return rotary.turn(x, cos, sin)


def gated_block(x: Array, state: State, prefix: str, activation: Activation = silu) -> Array:
    """The gated feed-forward block `prefix` (arXiv 2002.05202) of `x` [..., hidden]: [..., hidden]."""
    gate, up = (linear(x, state, f"{prefix}.{name}_proj") for name in ("gate", "up"))
    return linear(activation(gate, state) * up, state, f"{prefix}.down_proj")


def head_size_scale(arch: Architecture) -> float:
    """The factor of products of queries and keys: 1 over the square root of the head size."""
    return float(1 / np.sqrt(arch.head_dim))


@dataclass(frozen=True)
class Experts:
    """The formulas of layers with experts.

    Attributes:
        router: The scores of a layer's experts for rows [T, hidden] of its normed input; None for a layer without.
        mix: The block [T, hidden] of the same rows, from their scores and the experts [T, taken] that each takes.
    """

    router: Callable[[Architecture, State, int, Array], Router | None]
    mix: Callable[[Architecture, State, int, Array, Router, Array], Array]


@dataclass(frozen=True)
class Indexer:
    """The formulas of layers whose rows attend to the columns that an indexer chooses.

    Attributes:
        keys: The index keys [T, width] of rows [T, hidden] of the normed input of attention, with the rotary table.
        queries: The index queries [T, heads, width] of such rows, and the weights [T, heads] of their heads.
        score: The scores [C] of columns for the weights [heads] of one row and its products.
    """

    keys: Callable[[Architecture, State, int, Array, Array, Array], Array]
    queries: Callable[[Architecture, State, int, Array, Array, Array], tuple[Array, Array]]
    score: Callable[[Array, Array], Array]

    def products(self, queries: Array, keys: Array) -> Array:
        """The products [heads, C] of one row's queries [heads, width] with index keys [C, width]."""
        products: Array = queries @ keys.T
        return products


def best_columns(scores: Array, count: int) -> Array:
    """The indices of the `count` greatest scores, ascending; among equal ones the first columns are taken.

    >>> best_columns(np.array([0.0, 2.0, 1.0, 2.0, 1.0]), 3).tolist()
    [1, 2, 3]
    """
    return np.sort(np.argsort(-scores, kind="stable")[:count])


@dataclass(frozen=True)
class Formulas:
    """The formulas in which families differ; the defaults are Llama's.

    Attributes:
        gain: From a norm's weight to the factor by which the norm multiplies.
        activation: The activation of the gate in the feed-forward block.
        rotate: From queries or keys of a layer with rotary embedding, and the rotary table, to the turned ones.
        score_scale: The factor of the products of queries and keys.
        embedding_scale: The factor of embeddings.
        layer_input_scale: The factor of the embeddings that enter each layer.
        layer_inputs: From the tokens [T], the input [T, hidden] of the first layer and that factor, in the working
            dtype, to what enters the end of each layer beside the residual stream, [layers, T, width]; None for a
            family without.
        after_layer: From the residual stream [T, hidden] behind the feed-forward block of a layer, and what enters
            there, to the output of the layer; None for a family in which it is the output.
        embedding_rounded: Whether engines hold this factor in the working dtype.
        logits: From the products of hidden states and head [..., vocabulary] to logits.
        rope: The rotary embedding of a layer.
        norms_after_rotation: Whether the norms of queries and keys come after rotary embedding.
        project: From the normed input [T, hidden] of attention to queries, keys or values [T, heads, width], where
            these are no single projections; None elsewhere.
        latent_rows: What a latent cache holds of such rows; None for a family without latent attention.
        output_gate: From the normed input [T, hidden] of attention to the factors of its output before the output
            projection, [T, heads * head_dim]; None for a family without such a gate.
        recurrence: The formulas of layers with a recurrent state; None for a family without such layers.
        query_factors: Factors of the queries of a layer at positions [T]: float64 [T].
        attention_scale: The factor of what attention adds to the residual stream, where that of blocks is another.
        residual_scale: The factor of what a block adds to the residual stream.
        feed_forward: The feed-forward block of a layer from its normed input [T, hidden]; None for the gated block.
        experts: The formulas of layers with experts; None for a family without.
        indexer: The formulas of the indexer of columns; None for a family without.
    """

    gain: Unary = lambda weight: weight
    activation: Activation = silu
    rotate: Callable[[Architecture, Array, Array, Array], Array] = rotate_halves
    score_scale: Callable[[Architecture], float] = head_size_scale
    embedding_scale: Callable[[Architecture], float] = lambda arch: 1.0
    layer_input_scale: Callable[[Architecture], float] = lambda arch: 1.0
    layer_inputs: Callable[[Architecture, State, Array, Array, float], Array | None] | None = None
    after_layer: Callable[[Architecture, State, int, Array, Array | None], Array] | None = None
    embedding_rounded: bool = True
    logits: Callable[[Architecture, Array], Array] = lambda arch, scored: scored
    rope: Callable[[Architecture, int], Rope] = lambda arch, layer: arch.rope
    norms_after_rotation: bool = False
    project: Callable[[Architecture, State, int, str, Array], Array] | None = None
    latent_rows: Callable[[Architecture, State, int, Array, Array, Array], tuple[Array, Array]] | None = None
    output_gate: Callable[[Architecture, State, int, Array], Array] | None = None
    recurrence: Recurrence | None = None
    query_factors: Callable[[Architecture, int, Array], Array] = temperature
    attention_scale: Callable[[Architecture], float] = lambda arch: 1.0
    residual_scale: Callable[[Architecture], float] = lambda arch: 1.0
    feed_forward: Callable[[Architecture, State, int, Array], Array] | None = None
    experts: Experts | None = None
    indexer: Indexer | None = None


LLAMA = Formulas()
"""The formulas of Llama, which most families share."""
