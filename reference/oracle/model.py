"""The target by definition: every path a plain sequence from scratch, position by position, with no cache and no mask.

Root mean square norm (arXiv 1910.07467), rotary attention with grouped queries (2305.13245), SwiGLU (2002.05202);
chunks, layers without rotary embedding and their temperature as in Llama 4 (transformers `models/llama4`).
"""

from dataclasses import dataclass
from functools import lru_cache

import numpy as np

from reference.architecture import Architecture, Checkpoint, Model, Seeded
from reference.malformed import Malformed
from reference.oracle import rotary
from reference.oracle.checkpoint import UnreadableCheckpoint, identify, read
from reference.trace import Array, Kv
from reference.tree import Tree
from reference.weights import seeded


@dataclass(frozen=True, eq=False)
class Parameters:
    """A model ready to compute: its architecture and its state dict in float64, weight matrices as [out, in]."""

    architecture: Architecture
    state: dict[str, Array]

    @property
    def head(self) -> Array:
        """The matrix from the last hidden state to logits, [vocabulary, hidden]; a tied head is the embedding."""
        return self.state["model.embed_tokens.weight" if self.architecture.tied else "lm_head.weight"]


@dataclass(frozen=True)
class Nodes:
    """The target's results at each node of a tree.

    Attributes:
        logits: float64 [nodes, vocabulary].
        attended: float64 [layers, heads, nodes, head_dim]; attention's output before the output projection.
    """

    logits: Array
    attended: Array


@dataclass(frozen=True)
class Inputs:
    """The inputs of attention at each node, after norms, rotary embedding and temperature.

    Attributes:
        queries: float64 [layers, heads, nodes, head_dim].
        keys: float64 [layers, kv_heads, context + nodes, head_dim]; the context's columns come first.
        values: As `keys`.
    """

    queries: Array
    keys: Array
    values: Array


def load(model: Model, dtype: str) -> Parameters:
    """The parameters a case of working dtype `dtype` runs: rounded to it as an engine would, then held in float64.

    Raises:
        UnreadableCheckpoint: the checkpoint cannot be read, or is not the one the case knows by digest.
        Malformed: a weight is too large for `dtype`.
    """
    return _built_in(model) if isinstance(model, Seeded) else _from_disk(model, dtype)


@lru_cache(maxsize=64)
def _built_in(model: Seeded) -> Parameters:
    # Seeded weights are exact in every working dtype (weights.representable): nothing to round.
    return Parameters(model.architecture, seeded(model))


@lru_cache(maxsize=2)
def _from_disk(model: Checkpoint, dtype: str) -> Parameters:
    # Two: a target and a draft. One of 135M parameters takes 1.1 GB.
    found = identify(model.source)
    if found.digest != model.digest:
        raise UnreadableCheckpoint(
            f"{model.source}: its digest is {found.digest}, the case was made with {model.digest}; "
            "point it to the original checkpoint"
        )
    architecture, state = read(model.source)
    for name, weight in state.items():
        state[name] = rounded(weight, dtype, name)
        state[name].flags.writeable = False
    return Parameters(architecture, state)


def rounded(weight: Array, dtype: str, name: str = "weight") -> Array:
    """`weight` (float64, finite) as `dtype` holds it, to nearest even, in float64 again.

    The 16-bit types are reached through float32, as torch converts them.

    Raises:
        Malformed: a weight overflows `dtype`.
    """
    if dtype == "float64":
        return weight
    with np.errstate(over="ignore"):
        single = weight.astype(np.float32)
        if dtype == "bfloat16":
            bits = single.view(np.uint32)
            even = (bits >> np.uint32(16)) & np.uint32(1)
            nearest = (bits + np.uint32(0x7FFF) + even) & np.uint32(0xFFFF0000)
            narrow = nearest.view(np.float32)
        else:
            narrow = single.astype(dtype)
    wide: Array = narrow.astype(np.float64)
    if not np.isfinite(wide).all():
        raise Malformed("dtype", f"{name} holds {np.abs(weight).max():g}, too large for {dtype}")
    return wide


def rms_norm(x: Array, gain: Array, eps: float) -> Array:
    """`x` [..., n] over its root mean square along the last axis, times `gain` [n]."""
    mean_square = np.einsum("...i,...i->...", x, x)[..., None] / x.shape[-1]
    normed: Array = x / np.sqrt(mean_square + eps) * gain
    return normed


def linear(x: Array, state: dict[str, Array], name: str) -> Array:
    """`x` [..., in] through the projection `name` -> [..., out], with its bias where the architecture has one."""
    y: Array = x @ state[f"{name}.weight"].T
    bias = state.get(f"{name}.bias")
    return y if bias is None else y + bias


def silu(x: Array) -> Array:
    """`x` times its sigmoid."""
    with np.errstate(over="ignore"):  # exp(-x) may be infinite, and x / inf is the limit
        gated: Array = x / (1 + np.exp(-x))
    return gated


def swiglu(x: Array, state: dict[str, Array], at: str) -> Array:
    """The gated feed-forward block of the layer `at`: [..., hidden] -> [..., hidden]."""
    gate, up = linear(x, state, f"{at}.mlp.gate_proj"), linear(x, state, f"{at}.mlp.up_proj")
    return linear(silu(gate) * up, state, f"{at}.mlp.down_proj")


def first_seen(reach: tuple[int, int], position: int) -> int:
    """Where the sight of `position` begins in a layer of this window and chunk (`Architecture.reaches`).

    >>> [first_seen(reach, 9) for reach in ((0, 0), (3, 0), (0, 4))]
    [0, 7, 8]
    """
    window, chunk = reach
    if chunk:
        return position - position % chunk
    return max(0, position + 1 - window) if window else 0


def turned(arch: Architecture, x: Array, cos: Array, sin: Array) -> Array:
    """Queries or keys `x` [..., T, head_dim] of a rotated layer after the rotary table, and Llama 4's norm."""
    if arch.family != "llama4":
        return rotary.turn(x, cos, sin)
    y = rotary.turn_neighbours(x, cos, sin)
    return rms_norm(y, np.ones(arch.head_dim), arch.norm_eps) if arch.qk_norm else y


def temperature(arch: Architecture, layer: int, positions: Array) -> Array:
    """Factors of the queries of `layer` at `positions` [T]: float64 [T], 1 but for tempered layers without rotary."""
    if not arch.floor_scale or layer not in arch.unrotated:
        return np.ones(len(positions))
    scale: Array = 1 + arch.attn_scale * np.log(1 + (positions + 1) // arch.floor_scale)
    return scale


def capped(scores: Array, cap: float) -> Array:
    """Scaled scores after the soft cap `cap` (`Architecture.score_cap`); themselves where it is 0.

    >>> [float(round(score, 3)) for score in capped(np.array([0.0, 1.0, -50.0]), 2.0)]
    [0.0, 0.924, -2.0]
    """
    if not cap:
        return scores
    squeezed: Array = cap * np.tanh(scores / cap)
    return squeezed


def attention(query: Array, keys: Array, values: Array, cap: float = 0.0) -> Array:
    """One position's look at what it sees: query [heads, d], keys and values [seen, kv_heads, d] -> [heads, d]."""
    grouped = query.reshape(keys.shape[1], -1, query.shape[-1])
    scores = capped(np.einsum("kgd,skd->kgs", grouped, keys) / np.sqrt(query.shape[-1]), cap)
    weights = np.exp(scores - scores.max(axis=-1, keepdims=True))
    weights /= weights.sum(axis=-1, keepdims=True)
    mixed: Array = np.einsum("kgs,skd->kgd", weights, values).reshape(query.shape)
    return mixed


@dataclass(frozen=True)
class _Sequence:
    """One sequence run from scratch; the last two are what its final position yields."""

    keys: Array  # [layers, kv_heads, T, head_dim], rotated
    values: Array  # [layers, kv_heads, T, head_dim]
    queries: Array  # [layers, heads, head_dim]
    attended: Array  # [layers, heads, head_dim]
    logits: Array  # [vocabulary]
    states: Array  # [layers + 2, T, hidden size]; see Evaluator.states


class PathByPath:
    """The naive oracle: each node's row is the last one of its own sequence, run from scratch."""

    def __init__(self, parameters: Parameters) -> None:
        self.parameters = parameters

    def nodes(self, context: tuple[int, ...], tree: Tree) -> Nodes:
        """Logits and attention of every node of `tree`, hanging from the tokens of `context` (possibly none).

        Raises:
            Malformed: the model's rotary frequencies change between the context and the deepest node.
        """
        arch, height = self.parameters.architecture, tree.height
        rotary.check_span(arch.rope, arch.max_positions, len(context), len(context) + height + 1)
        runs = [self._run((*context, *tree.tokens_to(node))) for node in range(len(tree))]
        return Nodes(
            np.stack([run.logits for run in runs]),
            np.stack([run.attended for run in runs], axis=2),
        )

    def inputs(self, context: tuple[int, ...], tree: Tree) -> Inputs:
        """The inputs of attention at every node of `tree`: its own row of its own sequence."""
        runs = [self._run((*context, *tree.tokens_to(node))) for node in range(len(tree))]
        above = len(context)
        return Inputs(
            np.stack([run.queries for run in runs], axis=2),
            np.concatenate([runs[0].keys[:, :, :above], *(run.keys[:, :, -1:] for run in runs)], axis=2),
            np.concatenate([runs[0].values[:, :, :above], *(run.values[:, :, -1:] for run in runs)], axis=2),
        )

    def states(self, tokens: tuple[int, ...]) -> Array:
        """See `Evaluator`."""
        if not tokens:
            arch = self.parameters.architecture
            return np.empty((arch.layers + 2, 0, arch.hidden_size))
        return self._run(tokens).states

    def kv(self, tokens: tuple[int, ...]) -> Kv:
        """Rotated keys and values of the sequence `tokens`."""
        if not tokens:
            arch = self.parameters.architecture
            empty = np.empty((arch.layers, arch.kv_heads, 0, arch.head_dim))
            return Kv(empty, empty)
        run = self._run(tokens)
        return Kv(run.keys, run.values)

    def _run(self, tokens: tuple[int, ...]) -> _Sequence:
        arch, state = self.parameters.architecture, self.parameters.state
        length = len(tokens)
        positions = np.arange(length)
        cos, sin = rotary.table(positions, *rotary.frequencies(arch.rope, arch.head_dim, arch.max_positions, length))

        def project(x: Array, layer: int, name: str) -> Array:
            """[T, hidden] -> [T, heads of `name`, head_dim]; queries and keys normed, rotated, tempered where asked."""
            at = f"model.layers.{layer}.self_attn.{name}"
            y: Array = linear(x, state, f"{at}_proj").reshape(length, -1, arch.head_dim)
            if name == "v":
                return y
            if f"{at}_norm.weight" in state:
                y = rms_norm(y, state[f"{at}_norm.weight"], arch.norm_eps)
            if layer not in arch.unrotated:
                y = turned(arch, y.swapaxes(0, 1), cos, sin).swapaxes(0, 1)
            return y * temperature(arch, layer, positions)[:, None, None] if name == "q" else y

        x = state["model.embed_tokens.weight"][list(tokens)]
        states = [x]
        kept_keys, kept_values, asked, attended = [], [], [], []
        for layer, reach in enumerate(arch.reaches):
            at = f"model.layers.{layer}"
            normed = rms_norm(x, state[f"{at}.input_layernorm.weight"], arch.norm_eps)
            queries, keys, values = (project(normed, layer, name) for name in "qkv")
            mixed = np.empty_like(queries)
            for t in range(length):
                first = first_seen(reach, t)
                mixed[t] = attention(queries[t], keys[first : t + 1], values[first : t + 1], arch.score_cap)
            x = x + linear(mixed.reshape(length, -1), state, f"{at}.self_attn.o_proj")
            x = x + swiglu(rms_norm(x, state[f"{at}.post_attention_layernorm.weight"], arch.norm_eps), state, at)
            states.append(x)
            kept_keys.append(keys.swapaxes(0, 1))
            kept_values.append(values.swapaxes(0, 1))
            asked.append(queries[-1])
            attended.append(mixed[-1])
        states.append(rms_norm(x, state["model.norm.weight"], arch.norm_eps))
        return _Sequence(
            np.stack(kept_keys),
            np.stack(kept_values),
            np.stack(asked),
            np.stack(attended),
            self.parameters.head @ states[-1][-1],
            np.stack(states),
        )
