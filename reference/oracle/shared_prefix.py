"""SharedPrefix: the naive oracle's answers, with work shared between paths.

Paths that share a prefix share its computation. Tests in tests/meta prove the answers equal.
"""

from dataclasses import dataclass

import numpy as np

from reference.architecture import Rope
from reference.family.recurrent import RecurrentState
from reference.oracle.formulas import rotary
from reference.oracle.formulas.grouped_rows import block_attention, by_row, tree_attention
from reference.oracle.formulas.levels import levels_of
from reference.oracle.formulas.recurrence import Held
from reference.oracle.model import Inputs, Nodes, PathByPath
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
        # By recurrent layer, the state before the first token and after each token.
        self.recurrent: dict[int, list[Held]] = {layer: [parameters.start()] for layer in arch.recurrent}

    def shared(self, tokens: Array) -> int:
        """Length of the longest common prefix of this context and `tokens`."""
        both = min(self.length, len(tokens))
        differs = self.tokens[:both] != tokens[:both]
        return int(differs.argmax()) if differs.any() else both

    def reserve(self, source: "_Context", kept: int, needed: int) -> None:
        """Make room for `needed` tokens, the first `kept` of them copied from `source` (possibly itself)."""
        self.recurrent = {layer: held[: kept + 1] for layer, held in source.recurrent.items()}
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
        self._frequencies: dict[tuple[bool, Rope], tuple[Array, float]] = {}
        self._turns: tuple[Array, dict[Rope, tuple[Array, Array]]] = (np.empty(0), {})  # the last positions' tables
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
        chosen = self.parameters.chosen(context, tree)
        chosen = None if chosen is None else chosen[:, start:][:, order]
        attended = np.empty((arch.layers, arch.heads, len(order), arch.value_dim))
        through: list[tuple[Array, ...]] = []
        states = [x]
        parents = [-1, *(int(path[-2]) for level in levels[1:] for path in level.paths)]
        for layer, reach in enumerate(arch.reaches):
            if layer in arch.recurrent:
                _, added = self.parameters.recurred(layer, x, held.recurrent[layer][start], parents)
            if layer in arch.unattended:
                attended[layer], x = 0.0, self.parameters.fed(layer, x + added, chosen)
                through.append(self._no_attention(len(order)))
                states.append(x)
                continue
            queries, keys, values = self._project(layer, x, held.long, positions)
            through.append((queries, keys, values))
            above = held.keys[layer, :, :start], held.values[layer, :, :start]
            sinks = self.parameters.sinks(layer)
            mixed = tree_attention(queries * self._scale, *above, keys, values, levels, reach, arch.score_cap, sinks)
            attended[layer] = mixed
            between = self.parameters.between(layer, x, by_row(mixed))
            x = self.parameters.fed(layer, between + added if layer in arch.recurrent else between, chosen)
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

    def recurrent(self, tokens: tuple[int, ...]) -> RecurrentState | None:
        """See `Recurring`."""
        layers = self.parameters.architecture.recurrent
        if not layers:
            return None
        held = self._context(tokens, rotary.is_long(self.parameters.architecture.rope, len(tokens)))
        windows, memories = zip(*(held.recurrent[layer][len(tokens)] for layer in layers), strict=True)
        return RecurrentState(windows, memories)

    def _no_attention(self, rows: int) -> tuple[Array, ...]:
        """Queries, keys and values of zeros, for a layer without attention."""
        arch = self.parameters.architecture
        shapes = ((arch.heads, arch.head_dim), (arch.kv_heads, arch.head_dim), (arch.kv_heads, arch.value_dim))
        return tuple(np.zeros((heads, rows, width)) for heads, width in shapes)

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
        chosen = self.parameters.chosen((*held.tokens[:start].tolist(), *tokens.tolist()))
        chosen = None if chosen is None else chosen[:, start:]
        x, positions = self.parameters.embedded(tokens), np.arange(start, end)
        for layer, reach in enumerate(arch.reaches):
            if layer in arch.recurrent:
                above = held.recurrent[layer][start]
                behind, added = self.parameters.recurred(layer, x, above, range(-1, end - start - 1))
                held.recurrent[layer] += behind
            if layer in arch.unattended:
                held.keys[layer, :, start:end] = held.values[layer, :, start:end] = 0.0
                x = self.parameters.fed(layer, x + added, chosen)
                continue
            queries, keys, values = self._project(layer, x, held.long, positions)
            held.keys[layer, :, start:end] = keys
            held.values[layer, :, start:end] = values
            if layer + 1 < arch.layers:  # the last layer's output for context tokens is never used
                seen = held.keys[layer, :, :end], held.values[layer, :, :end]
                sinks = self.parameters.sinks(layer)
                mixed = block_attention(queries * self._scale, *seen, reach, arch.score_cap, sinks)
                between = self.parameters.between(layer, x, by_row(mixed))
                x = self.parameters.fed(layer, between + added if layer in arch.recurrent else between, chosen)
        held.tokens[start:end] = tokens
        held.length = end

    def _table(self, layer: int, long: bool, positions: Array) -> tuple[Array, Array]:
        """The rotary table of `layer` at `positions`, which layers with the same rotary embedding share."""
        parameters, arch = self.parameters, self.parameters.architecture
        if self._turns[0] is not positions:
            self._turns = (positions, {})
        rope = parameters.formulas.rope(arch, layer)
        if (long, rope) not in self._frequencies:
            # Any length on the same side of longrope's switch gives the same table.
            length = arch.rope.original + 1 if long else 1
            self._frequencies[long, rope] = parameters.frequencies(layer, length)
        if rope not in self._turns[1]:
            self._turns[1][rope] = parameters.rotary_table(positions, *self._frequencies[long, rope])
        return self._turns[1][rope]

    def _project(self, layer: int, x: Array, long: bool, positions: Array) -> tuple[Array, Array, Array]:
        """Queries [heads, T, head_dim], keys and values [kv_heads, T, head_dim] of the rows `x` [T, hidden].

        `long` says whether the sequence takes longrope's long factors.
        """
        parameters, arch = self.parameters, self.parameters.architecture
        cos, sin = self._table(layer, long, positions)
        normed = parameters.attention_input(layer, x)
        queries, keys, values = (parameters.projected(layer, name, normed).swapaxes(0, 1) for name in "qkv")
        queries, keys = (parameters.turned(layer, name, y, cos, sin) for name, y in (("q", queries), ("k", keys)))
        return queries * parameters.formulas.query_factors(arch, layer, positions)[:, None], keys, values
