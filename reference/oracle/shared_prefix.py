"""SharedPrefix: the naive oracle's answers, with work shared between paths.

Paths that share a prefix share its computation. Tests in tests/meta prove the answers equal.
"""

from dataclasses import dataclass

import numpy as np

from reference.oracle.formulas import rotary
from reference.oracle.formulas.layer import capped
from reference.oracle.formulas.levels import Level, levels_of
from reference.oracle.model import Inputs, Nodes, PathByPath, first_seen
from reference.oracle.parameters import Parameters
from reference.trace import Array, Kv
from reference.tree import Tree

BLOCK = 128
"""Context tokens that run through the layers at a time; this bounds the memory of a long prompt."""

REMEMBERED = 4
"""Number of contexts whose KV is kept."""


class _Context:
    """KV of one token sequence, float64 [layers, kv_heads, length, head_dim], in buffers that grow at the end only."""

    def __init__(self, parameters: Parameters, long: bool) -> None:
        arch = parameters.architecture
        self.long = long
        self.length = 0
        self.tokens: Array = np.empty(0, dtype=np.int64)
        self.keys: Array = np.empty((arch.layers, arch.kv_heads, 0, arch.head_dim))
        self.values: Array = np.empty((arch.layers, arch.kv_heads, 0, arch.value_dim))

    def shared(self, tokens: Array) -> int:
        """Length of the longest common prefix of this context and `tokens`."""
        both = min(self.length, len(tokens))
        differs = self.tokens[:both] != tokens[:both]
        return int(differs.argmax()) if differs.any() else both

    def reserve(self, source: "_Context", kept: int, needed: int) -> None:
        """Make room for `needed` tokens, the first `kept` of them copied from `source` (possibly itself)."""
        if self is source and needed <= len(self.tokens):
            return
        # Half as much again, so that a context growing token by token is copied rarely.
        room = max(64, needed + needed // 2)
        for name, axis in (("tokens", 0), ("keys", 2), ("values", 2)):
            old = getattr(source, name)
            new = np.empty((*old.shape[:axis], room, *old.shape[axis + 1 :]), old.dtype)
            head = (slice(None),) * axis + (slice(kept),)
            new[head] = old[head]
            setattr(self, name, new)
        self.length = kept


@dataclass(frozen=True)
class _Run:
    """A tree run below a context; `row` is the row of each node in breadth-first order."""

    nodes: Nodes
    row: Array
    held: _Context
    through: list[tuple[Array, ...]]  # queries, keys and values of each layer, by row
    states: list[Array]  # [nodes, hidden] each; see Evaluator.states


class SharedPrefix:
    """The evaluator in use: keeps the KV of recent contexts, and runs a tree level by level on top of one of them."""

    def __init__(self, parameters: Parameters) -> None:
        self.parameters = parameters
        self._scale = parameters.formulas.score_scale(parameters.architecture)
        self._recent: list[_Context] = []  # the latest used last
        self._states: list[tuple[tuple[int, ...], Array]] = []  # sequences with their states, the latest first
        self._frequencies: dict[tuple[bool, int], tuple[Array, float]] = {}
        self._last: tuple[tuple[int, ...], Tree, _Run] | None = None  # a step asks for its tree's logits, then states

    def nodes(self, context: tuple[int, ...], tree: Tree) -> Nodes:
        """Logits and attention of every node of `tree`, hanging from the tokens of `context` (possibly none).

        Raises:
            Malformed: the model's rotary frequencies change between the context and the deepest node.
        """
        return self._run(context, tree).nodes

    def inputs(self, context: tuple[int, ...], tree: Tree) -> Inputs:
        """The inputs of attention at every node of `tree`."""
        run = self._run(context, tree)
        queries, keys, values = (np.stack(kept)[:, :, run.row] for kept in zip(*run.through, strict=True))
        above = slice(len(context))
        return Inputs(
            queries,
            np.concatenate([run.held.keys[:, :, above], keys], axis=2),
            np.concatenate([run.held.values[:, :, above], values], axis=2),
            self._scale,
        )

    def _run(self, context: tuple[int, ...], tree: Tree) -> _Run:
        if self._last is None or self._last[:2] != (context, tree):
            self._last = (context, tree, self._run_anew(context, tree))
        return self._last[2]

    def _run_anew(self, context: tuple[int, ...], tree: Tree) -> _Run:
        order, levels = levels_of(tree)
        arch = self.parameters.architecture
        start = len(context)
        longest = start + len(levels)
        rotary.check_span(arch.rope, arch.max_positions, start, longest)
        held = self._context(context, rotary.is_long(arch.rope, longest))
        depth = np.repeat(np.arange(len(levels)), [level.last - level.first for level in levels])
        positions = start + depth
        x = self.parameters.embedded(np.array(tree.token)[order])
        attended = np.empty((arch.layers, arch.heads, len(order), arch.value_dim))
        through: list[tuple[Array, ...]] = []
        states = [x]
        for layer, reach in enumerate(arch.reaches):
            queries, keys, values = self._project(layer, x, held.long, positions)
            through.append((queries, keys, values))
            above = held.keys[layer, :, :start], held.values[layer, :, :start]
            sinks = self.parameters.sinks(layer)
            mixed = _tree_attention(queries * self._scale, *above, keys, values, levels, reach, arch.score_cap, sinks)
            attended[layer] = mixed
            x = self.parameters.finished(layer, x, _by_row(mixed))
            states.append(x)
        row = np.argsort(order)
        states = [state[row] for state in states]
        states.append(self.parameters.normed(states[-1], "model.norm"))
        return _Run(Nodes(self.parameters.logits(states[-1]), attended[:, :, row]), row, held, through, states)

    def states(self, tokens: tuple[int, ...]) -> Array:
        """See `Evaluator`: the states of a known beginning, and those of the rest as a chain of nodes below it."""
        if self.parameters.architecture.rope.kind == "longrope":  # a longer sequence may turn all its tokens otherwise
            return PathByPath(self.parameters).states(tokens)
        none = np.empty((self.parameters.architecture.layers + 2, 0, self.parameters.architecture.hidden_size))
        # The latest first, hence the longest of one request.
        known, states = next((one for one in self._states if tokens[: len(one[0])] == one[0]), ((), none))
        parts = [states]
        for at in range(len(known), len(tokens), BLOCK):
            block = tokens[at : at + BLOCK]
            parts.append(self.node_states(tokens[:at], Tree((0, *range(len(block) - 1)), block)))
        whole: Array = np.concatenate(parts, axis=1)
        if len(parts) > 1:
            self._states = [(tokens, whole), *self._states][:REMEMBERED]
        return whole

    def node_states(self, context: tuple[int, ...], tree: Tree) -> Array:
        """See `Evaluator`."""
        return np.stack(self._run(context, tree).states)

    def kv(self, tokens: tuple[int, ...]) -> Kv:
        """Rotated keys and values of the sequence `tokens`, as read-only views."""
        rope, length = self.parameters.architecture.rope, len(tokens)
        rotary.check_span(rope, self.parameters.architecture.max_positions, length, length)
        held = self._context(tokens, rotary.is_long(rope, length))
        keys, values = held.keys[:, :, :length], held.values[:, :, :length]
        keys.flags.writeable = values.flags.writeable = False
        return Kv(keys, values)

    def _context(self, tokens: tuple[int, ...], long: bool) -> _Context:
        """A context that begins with `tokens`: a remembered one, one that was extended, or a new branch."""
        wanted = np.array(tokens, dtype=np.int64)
        held, kept = _Context(self.parameters, long), 0
        for known in self._recent:
            shared = known.shared(wanted) if known.long == long else 0
            if shared >= kept and shared:
                held, kept = known, shared
        if kept < len(wanted):
            # A held context that continues differently stays, and its shared prefix is copied into a new one.
            source, held = held, _Context(self.parameters, long) if kept < held.length else held
            held.reserve(source, kept, len(wanted))
            for at in range(kept, len(wanted), BLOCK):
                self._append(held, wanted[at : at + BLOCK])
        if tokens:
            self._recent = [*(known for known in self._recent if known is not held), held][-REMEMBERED:]
        return held

    def _append(self, held: _Context, tokens: Array) -> None:
        """Run `tokens` through the layers behind the tokens that `held` has, causally, and keep their KV."""
        arch = self.parameters.architecture
        start, end = held.length, held.length + len(tokens)
        x = self.parameters.embedded(tokens)
        for layer, reach in enumerate(arch.reaches):
            queries, keys, values = self._project(layer, x, held.long, np.arange(start, end))
            held.keys[layer, :, start:end] = keys
            held.values[layer, :, start:end] = values
            if layer + 1 < arch.layers:  # the last layer's output for context tokens is never used
                seen = held.keys[layer, :, :end], held.values[layer, :, :end]
                sinks = self.parameters.sinks(layer)
                mixed = _block_attention(queries * self._scale, *seen, reach, arch.score_cap, sinks)
                x = self.parameters.finished(layer, x, _by_row(mixed))
        held.tokens[start:end] = tokens
        held.length = end

    def _project(self, layer: int, x: Array, long: bool, positions: Array) -> tuple[Array, Array, Array]:
        """Queries [heads, T, head_dim], keys and values [kv_heads, T, head_dim] of the rows `x` [T, hidden].

        `long` says whether the sequence takes longrope's long factors.
        """
        parameters, arch = self.parameters, self.parameters.architecture
        if (long, layer) not in self._frequencies:
            # Any length on the same side of longrope's switch gives the same table.
            length = arch.rope.original + 1 if long else 1
            self._frequencies[long, layer] = parameters.frequencies(layer, length)
        cos, sin = rotary.table(positions, *self._frequencies[long, layer])
        normed = parameters.attention_input(layer, x)
        queries, keys, values = (parameters.projected(layer, name, normed).swapaxes(0, 1) for name in "qkv")
        queries, keys = (parameters.turned(layer, name, y, cos, sin) for name, y in (("q", queries), ("k", keys)))
        return queries * parameters.formulas.query_factors(arch, layer, positions)[:, None], keys, values


def _by_row(mixed: Array) -> Array:
    """Attention [heads, T, head_dim] as the output projection reads it: [T, heads * head_dim]."""
    rows: Array = mixed.swapaxes(0, 1).reshape(mixed.shape[1], -1)
    return rows


def _block_attention(
    queries: Array, keys: Array, values: Array, reach: tuple[int, int], cap: float, sinks: Array | None
) -> Array:
    """Causal attention of the last T rows: queries [heads, T, d], keys and values [kv_heads, end, d], T <= end.

    Queries are scaled already. `reach`, `cap` and `sinks` are the layer's window and chunk, the soft cap of its scores,
    and the sink of each head.
    """
    heads, rows, width = queries.shape
    kv_heads, end, _ = keys.shape
    row = np.arange(end - rows, end)[:, None]
    begin = np.array([[first_seen(reach, position)] for position in range(end - rows, end)])
    first = int(begin[0, 0])  # no later row sees a column before this one
    column = np.arange(first, end)
    hidden = (column > row) | (column < begin)
    grouped = queries.reshape(kv_heads, -1, width)
    scores = capped((grouped @ keys[:, first:].swapaxes(1, 2)).reshape(heads, rows, -1), cap)
    scores += np.where(hidden, -np.inf, 0.0)
    peak = scores.max(axis=-1, keepdims=True)
    beside = np.array(-np.inf) if sinks is None else sinks[:, None, None]
    peak = np.maximum(peak, beside)
    scores -= peak
    np.exp(scores, out=scores)
    scores /= scores.sum(axis=-1, keepdims=True) + np.exp(beside - peak)
    mixed: Array = scores.reshape(kv_heads, -1, end - first) @ values[:, first:]
    return mixed.reshape(heads, rows, -1)


def _tree_attention(
    queries: Array,
    above_keys: Array,
    above_values: Array,
    keys: Array,
    values: Array,
    levels: list[Level],
    reach: tuple[int, int],
    cap: float,
    sinks: Array | None,
) -> Array:
    """Attention of every node over the context and its own path, gathered row by row; no other column is read.

    Args:
        queries: [heads, nodes, d], scaled, nodes in the order of `levels`.
        above_keys: [kv_heads, context, d], as `above_values`.
        above_values: See above_keys.
        keys: [kv_heads, nodes, d], as `values`.
        values: See keys.
        levels: The nodes by depth.
        reach: The layer's window and chunk, counted along a node's own sequence.
        cap: The soft cap of the scores, 0 for none.
        sinks: The sink of each head, [heads], or None.

    Returns:
        [heads, nodes, d].
    """
    (heads, nodes, width), (kv_heads, context, _) = queries.shape, above_keys.shape
    group = heads // kv_heads
    # [kv_heads, nodes, group, d]: one product with the context per KV head, one with the path per node.
    asked = queries.reshape(kv_heads, group, nodes, width).swapaxes(1, 2).copy()
    mixed = np.empty((*asked.shape[:-1], values.shape[-1]))
    beside = np.array(-np.inf) if sinks is None else sinks.reshape(kv_heads, 1, group, 1)
    for depth, level in enumerate(levels):
        here = slice(level.first, level.last)
        first = first_seen(reach, context + depth)  # a logical position
        path = level.paths[:, max(0, first - context) :]
        query = asked[:, here]
        flat = query.reshape(kv_heads, -1, width)
        far = capped((flat @ above_keys[:, first:].swapaxes(1, 2)).reshape(*query.shape[:3], -1), cap)
        near = capped(query @ keys[:, path].swapaxes(2, 3), cap)
        # One softmax over context (`far`, may be empty) and path (`near`, which always holds the node itself).
        peak = np.maximum(far.max(axis=-1, keepdims=True, initial=-np.inf), near.max(axis=-1, keepdims=True))
        peak = np.maximum(peak, beside)
        for scores in (far, near):
            scores -= peak
            np.exp(scores, out=scores)
        total = far.sum(axis=-1, keepdims=True) + near.sum(axis=-1, keepdims=True) + np.exp(beside - peak)
        seen = (far.reshape(*flat.shape[:2], -1) @ above_values[:, first:]).reshape(*query.shape[:3], -1)
        mixed[:, here] = (seen + near @ values[:, path]) / total
    joined: Array = mixed.swapaxes(1, 2).reshape(heads, nodes, -1)
    return joined
