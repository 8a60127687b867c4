"""SharedPrefix: the naive oracle's answers, with work shared between paths.

Paths that share a prefix share its computation, and many rows attend at once. Tests in tests/meta prove the answers
equal.
"""

from collections.abc import Sequence
from dataclasses import dataclass
from math import prod

import numpy as np

from specverify.reference.architecture import Rope
from specverify.reference.family.recurrent import RecurrentState
from specverify.reference.malformed import Malformed
from specverify.reference.oracle.formulas import rotary
from specverify.reference.oracle.formulas.block_attention import block_attention
from specverify.reference.oracle.formulas.layer import best_columns, first_visible, soft_cap
from specverify.reference.oracle.formulas.levels import Level, levels_of
from specverify.reference.oracle.formulas.recurrence import LayerState
from specverify.reference.oracle.formulas.routers import UNKNOWN
from specverify.reference.oracle.model import Inputs, Nodes, PathByPath
from specverify.reference.oracle.packed_trees import PackedTrees, PlacedTree, packed, placed
from specverify.reference.oracle.parameters import Parameters
from specverify.reference.trace import Array, Kv
from specverify.reference.tree import Tree


def by_row(mixed: Array) -> Array:
    """Attention [heads, T, head_dim] as the output projection reads it: [T, heads * head_dim]."""
    rows: Array = mixed.swapaxes(0, 1).reshape(mixed.shape[1], -1)
    return rows


def tree_attention(
    queries: Array,
    above_keys: Array,
    above_values: Array,
    keys: Array,
    values: Array,
    levels: list[Level],
    reach: tuple[int, int],
    cap: float,
    sinks: Array | None,
    chosen: Array | None = None,
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
        chosen: Bool [nodes, context + nodes], the columns of each node where an indexer chose them.

    Returns:
        [heads, nodes, d].
    """
    (heads, nodes, width), (kv_heads, context, _) = queries.shape, above_keys.shape
    group = heads // kv_heads
    # [kv_heads, nodes, group, d]: one product with the context per KV head, one with the path per node.
    grouped_queries = queries.reshape(kv_heads, group, nodes, width).swapaxes(1, 2).copy()
    mixed = np.empty((*grouped_queries.shape[:-1], values.shape[-1]), like=queries)
    sink_scores = np.array(-np.inf) if sinks is None else sinks.reshape(kv_heads, 1, group, 1)
    for depth, level in enumerate(levels):
        rows = slice(level.first, level.last)
        first = first_visible(reach, context + depth)  # a logical position
        path = level.paths[:, max(0, first - context) :]
        query = grouped_queries[:, rows]
        flat = query.reshape(kv_heads, -1, width)
        context_scores = soft_cap((flat @ above_keys[:, first:].swapaxes(1, 2)).reshape(*query.shape[:3], -1), cap)
        path_scores = soft_cap(query @ keys[:, path].swapaxes(2, 3), cap)
        if chosen is not None:
            context_scores[:, ~chosen[rows, None, first:context].repeat(group, 1)] = -np.inf
            on_path = np.take_along_axis(chosen[rows, context:], path, axis=1)
            path_scores[:, ~on_path[:, None].repeat(group, 1)] = -np.inf
        # One softmax over context (may be empty) and path (always holds the node itself).
        peak = np.maximum(
            context_scores.max(axis=-1, keepdims=True, initial=-np.inf), path_scores.max(axis=-1, keepdims=True)
        )
        peak = np.maximum(peak, sink_scores)
        for scores in (context_scores, path_scores):
            scores -= peak
            np.exp(scores, out=scores)
        total = context_scores.sum(axis=-1, keepdims=True) + path_scores.sum(axis=-1, keepdims=True)
        total += np.exp(sink_scores - peak)
        context_values = context_scores.reshape(*flat.shape[:2], -1) @ above_values[:, first:]
        context_values = context_values.reshape(*query.shape[:3], -1)
        mixed[:, rows] = (context_values + path_scores @ values[:, path]) / total
    joined: Array = mixed.swapaxes(1, 2).reshape(heads, nodes, -1)
    return joined


def _with_known_columns(chosen: Array | None, known: Array | None, layer: int, numbers: list[Array]) -> Array | None:
    """`chosen` [rows, columns] with what is `known` [layers, rows, k] in its place, by position in the rows' texts.

    `numbers` holds for each row the columns that it may see, by position.
    """
    if chosen is None or known is None:
        return chosen
    chosen = chosen.copy()
    for row, positions in enumerate(known[layer]):
        columns = numbers[row][positions[positions != UNKNOWN]]
        if len(columns):
            chosen[row] = False
            chosen[row, columns] = True
    return chosen


BLOCK = 128
"""Context tokens that run through the layers at a time; this bounds the memory of a long prompt."""

MOST_CONTEXTS = 4
"""Number of contexts whose KV is kept."""

MOST_RUNS = 8
"""Number of tree runs that are kept, as far as RUN_BYTES hold them; the latest is kept whatever its size."""

RUN_BYTES = 2**22

PACKED_BYTES = 2**28
"""Bytes of the numbers of a packed run."""


class _Context:
    """KV of one token sequence, float64 [layers, kv_heads, length, head_dim], in buffers that grow at the end only.

    The buffers have the widest layer's sizes, with zeros behind those of a layer, as a trace shows them.
    """

    def __init__(self, parameters: Parameters, is_long: bool) -> None:
        arch = parameters.architecture
        self.long = is_long
        self.length = 0
        self.tokens: Array = np.empty(0, dtype=np.int64)
        self._heads = [arch.layer_heads(layer) for layer in range(arch.layers)]
        like = parameters.kind_of_array
        self.keys: Array = np.empty((arch.layers, arch.widest.kv_heads, 0, arch.widest.key_width), like=like)
        self.values: Array = np.empty((arch.layers, arch.widest.kv_heads, 0, arch.widest.value_dim), like=like)
        # By recurrent layer, the state before the first token and after each token.
        self.recurrent: dict[int, list[LayerState]] = {layer: [parameters.start()] for layer in arch.recurrent}

    def of_layer(self, layer: int, first: int, last: int) -> tuple[Array, Array]:
        """Views of the keys and values of `layer` from column `first` to `last`, of the layer's own sizes."""
        sizes = self._heads[layer]
        keys = self.keys[layer, : sizes.kv_heads, first:last, : sizes.head_dim]
        return keys, self.values[layer, : sizes.kv_heads, first:last, : sizes.value_dim]

    def index_keys(self, layer: int, first: int, last: int) -> Array:
        """A view of the index keys of `layer`, [kv_heads, columns, index_dim], which stand behind its keys."""
        sizes = self._heads[layer]
        return self.keys[layer, : sizes.kv_heads, first:last, sizes.head_dim : sizes.key_width]

    def shared_length(self, tokens: Array) -> int:
        """Length of the longest common prefix of this context and `tokens`."""
        common_length = min(self.length, len(tokens))
        differs = self.tokens[:common_length] != tokens[:common_length]
        return int(differs.argmax()) if differs.any() else common_length

    def reserve(self, source: "_Context", num_kept: int, num_needed: int) -> None:
        """Make room for `num_needed` tokens, the first `num_kept` of them copied from `source` (possibly itself)."""
        self.recurrent = {layer: states[: num_kept + 1] for layer, states in source.recurrent.items()}
        if self is source and num_needed <= len(self.tokens):
            return
        # Half as much again, so that a context growing token by token is copied rarely.
        room = max(64, num_needed + num_needed // 2)
        for name, axis in (("tokens", 0), ("keys", 2), ("values", 2)):
            old_buffer = getattr(source, name)
            shape = (*old_buffer.shape[:axis], room, *old_buffer.shape[axis + 1 :])
            new_buffer = np.zeros(shape, old_buffer.dtype, like=old_buffer)
            kept_part = (slice(None),) * axis + (slice(num_kept),)
            new_buffer[kept_part] = old_buffer[kept_part]
            setattr(self, name, new_buffer)
        self.length = num_kept


@dataclass(frozen=True)
class _Run:
    """A tree run below a context; `row` is the row of each node in breadth-first order."""

    nodes: Nodes
    row: Array
    layer_inputs: list[tuple[Array, ...]]  # queries, keys and values of each layer, by row
    states: list[Array]  # [nodes, hidden] each; see Evaluator.states

    @property
    def num_bytes(self) -> int:
        """Bytes of its numbers for the nodes."""
        return sum(8 * prod(array.shape) for array in (self.nodes.logits, self.nodes.attended, *self.states))

    def of_nodes(self, nodes: list[int]) -> "_Run":
        """The run of the tree that `nodes` of this one are, in this order."""
        logits, attended = self.nodes.logits[nodes], self.nodes.attended[:, :, nodes]
        states = [state[nodes] for state in self.states]
        return _Run(Nodes(logits, attended), self.row[nodes], self.layer_inputs, states)


class SharedPrefix:
    """The evaluator in use: keeps the KV of recent contexts, and runs a tree level by level on top of one of them."""

    def __init__(self, parameters: Parameters, span: range | None = None) -> None:
        """Evaluate `parameters`; of the layers, `span` names those that run, all by default."""
        self.parameters = parameters
        self._span = range(parameters.architecture.layers) if span is None else span
        self._scale = parameters.formulas.score_scale(parameters.architecture)
        self._recent_contexts: list[_Context] = []  # the latest used last
        self._states: list[tuple[tuple[int, ...], Array]] = []  # sequences with their states, the latest first
        self._frequencies: dict[
            tuple[bool, Rope, int], tuple[Array, float]
        ] = {}  # by rotary embedding and head's width
        self._turns: tuple[Array, dict[tuple[Rope, int], tuple[Array, Array]]] = (np.empty(0), {})  # last positions
        self._expected: tuple[PlacedTree, ...] = ()
        self._packed: tuple[PackedTrees, _Run] | None = None
        # A step asks for the logits of its tree, then for its states; the next one goes on behind an accepted path.
        self._recent_runs: list[tuple[PackedTrees, _Run]] = []  # the latest first

    def nodes(self, context: tuple[int, ...], tree: Tree) -> Nodes:
        """Logits and attention of every node of `tree`, hanging from the tokens of `context` (possibly none).

        Raises:
            Malformed: the model's rotary frequencies change between the context and the deepest node.
        """
        return self._run(context, tree).nodes

    def inputs(self, context: tuple[int, ...], tree: Tree) -> Inputs:
        """The inputs of attention at every node of `tree`."""
        run = self._run(context, tree)
        rope = self.parameters.architecture.rope
        context_kv = self._context(context, rotary.is_long(rope, len(context) + tree.height + 1))
        queries: list[Array] = []
        columns: tuple[list[Array], list[Array]] = ([], [])
        for layer, source in enumerate(self.parameters.architecture.kv_sources):
            of_layer, *rows = run.layer_inputs[layer]
            queries.append(of_layer[:, run.row])
            above = context_kv.of_layer(source, 0, len(context))
            for kind, context_columns, of_nodes in zip(columns, above, rows, strict=True):
                kind.append(np.concatenate([context_columns, of_nodes[:, run.row]], axis=1))
        return Inputs(queries, *columns, self._scale)

    def _run(self, context: tuple[int, ...], tree: Tree) -> _Run:
        for known, run in self._recent_runs:
            if (known.context, known.tree) == (context, tree):
                return run
        run = self._packed_run(context, tree) or self._run_tree(context, tree)
        self._recent_runs = [(placed(context, tree), run), *self._recent_runs[: MOST_RUNS - 1]]
        while len(self._recent_runs) > 1 and sum(run.num_bytes for _, run in self._recent_runs) > RUN_BYTES:
            self._recent_runs.pop()
        return run

    def expect(self, steps: Sequence[PlacedTree]) -> None:
        """Take the trees that are asked for next, each with its context, in this order.

        The first one that is asked for is run together with those that follow it, as one tree of all their texts, in
        as many rows as PACKED_BYTES hold. A text has one row there, and its numbers are those of a run by itself. Trees
        that were not expected, and expected ones that come in another order, run by themselves.
        """
        self._expected, self._packed = tuple(steps), None

    def _packed_run(self, context: tuple[int, ...], tree: Tree) -> _Run | None:
        """The run of `tree` as a part of a packed one; None for a tree that is no part of any."""
        if self.parameters.twins_differ:  # a packed run has one row for both
            return None
        nodes = None if self._packed is None else self._packed[0].nodes_of(context, tree)
        if nodes is None and (context, tree) in self._expected:
            self._packed = None  # before the next one is made
            pack = packed(self._expected[self._expected.index((context, tree)) :], self._most_packed())
            if pack is None:
                return None
            try:
                self._packed = pack, self._run_tree(pack.context, pack.tree)
            except Malformed:  # all of them together reach beyond what one rotary table serves
                self._expected = ()
                return None
            nodes = pack.nodes_of(context, tree)
        return None if nodes is None or self._packed is None else self._packed[1].of_nodes(nodes)

    def _most_packed(self) -> int:
        """The rows whose numbers PACKED_BYTES hold, and the recurrent states of one layer beside them."""
        arch = self.parameters.architecture
        heads = arch.heads * (arch.widest.key_width + arch.widest.value_dim)
        columns = arch.widest.kv_heads * (arch.widest.key_width + arch.widest.value_dim)
        numbers = arch.vocab_size + arch.layers * (heads + columns + arch.hidden_size)
        numbers += sum(part.size for part in self.parameters.start()) if arch.recurrent else 0
        return PACKED_BYTES // (8 * numbers)

    def _run_tree(self, context: tuple[int, ...], tree: Tree) -> _Run:
        order, levels = levels_of(tree)
        arch = self.parameters.architecture
        start = len(context)
        longest = start + len(levels)
        rotary.check_span(arch.rope, arch.max_positions, start, longest)
        context_kv = self._context(context, rotary.is_long(arch.rope, longest))
        depths = np.repeat(np.arange(len(levels)), [level.last - level.first for level in levels])
        positions = start + depths
        x = self.parameters.embed(np.array(tree.token)[order], positions)
        inputs = self.parameters.layer_inputs(np.array(tree.token)[order], x)
        known = self.parameters.known_choices(context, tree).of_rows([start + node for node in order])
        attended = np.zeros((arch.layers, arch.heads, len(order), arch.widest.value_dim), like=x)
        layer_inputs: list[tuple[Array, ...]] = []
        states = [x]
        columns_chosen: Array | None = None
        numbers: list[Array] = []  # of the column at each position of a row's text
        if self.parameters.formulas.indexer is not None:
            numbers = [np.concatenate([np.arange(start), start + path]) for level in levels for path in level.paths]
        parents = [-1, *(int(path[-2]) for level in levels[1:] for path in level.paths)]
        is_chain = len(levels) == len(order) > 1
        for layer, reach in enumerate(arch.reaches):
            if layer not in self._span:
                layer_inputs.append(())
                states.append(x)
                continue
            if layer in arch.recurrent:
                _, added = self.parameters.run_recurrence(layer, x, context_kv.recurrent[layer][start], parents)
            if layer in arch.unattended:
                x = self.parameters.finish_layer(layer, x, x + added, known.experts, inputs)
                layer_inputs.append(self._no_attention(layer, len(order)))
                states.append(x)
                continue
            source, normed = arch.kv_sources[layer], self.parameters.attention_input(layer, x)
            queries = self._queries(layer, normed, context_kv.long, positions)
            if source == layer:
                new_columns = self._columns(layer, normed, context_kv.long, positions)
                keys, values = self.parameters.read_back(layer, *new_columns, positions, known.codes)
            else:
                _, keys, values = layer_inputs[source]
            layer_inputs.append((queries, keys, values))
            context_columns = context_kv.of_layer(source, 0, start)
            if arch.layer_heads(layer).index_dim:
                index_keys = self._index_keys(layer, normed, context_kv.long, positions)
                all_index_keys = np.concatenate([context_kv.index_keys(layer, 0, start)[0], index_keys])
                columns_chosen = self._choose(layer, normed, positions, context_kv.long, all_index_keys, numbers)
            columns_chosen = _with_known_columns(columns_chosen, known.columns, layer, numbers)
            sinks = self.parameters.sinks(layer)
            scaled = queries * self._scale
            if is_chain:  # a block of one text, such as a long prompt whose states a draft reads
                all_keys, all_values = (
                    np.concatenate(parts, axis=1) for parts in zip(context_columns, (keys, values), strict=True)
                )
                mixed = block_attention(scaled, all_keys, all_values, reach, arch.score_cap, sinks, columns_chosen)
            else:
                mixed = tree_attention(
                    scaled, *context_columns, keys, values, levels, reach, arch.score_cap, sinks, columns_chosen
                )
            attended[layer, ..., : mixed.shape[-1]] = mixed
            residual = self.parameters.after_attention(layer, x, by_row(mixed))
            residual = residual + added if layer in arch.recurrent else residual
            x = self.parameters.finish_layer(layer, x, residual, known.experts, inputs)
            states.append(x)
        row = np.argsort(order)
        states = [state[row] for state in states]
        states.append(self.parameters.norm(states[-1], "model.norm"))
        return _Run(Nodes(self.parameters.logits(states[-1]), attended[:, :, row]), row, layer_inputs, states)

    def states(self, tokens: tuple[int, ...]) -> Array:
        """See `Evaluator`: the states of a known beginning, and those of the rest as a chain of nodes below it."""
        if self.parameters.architecture.rope.kind == "longrope":  # a longer sequence may turn all its tokens otherwise
            return PathByPath(self.parameters).states(tokens)
        no_states = np.empty((self.parameters.architecture.layers + 2, 0, self.parameters.architecture.hidden_size))
        # The latest first, hence the longest of one request.
        known_tokens, states = next(
            (entry for entry in self._states if tokens[: len(entry[0])] == entry[0]), ((), no_states)
        )
        parts = [states]
        for start in range(len(known_tokens), len(tokens), BLOCK):
            block = tokens[start : start + BLOCK]
            parts.append(self.node_states(tokens[:start], Tree((0, *range(len(block) - 1)), block)))
        all_states: Array = np.concatenate(parts, axis=1)
        if len(parts) > 1:
            self._states = [(tokens, all_states), *self._states][:MOST_CONTEXTS]
        return all_states

    def node_states(self, context: tuple[int, ...], tree: Tree) -> Array:
        """See `Evaluator`."""
        return np.stack(self._run(context, tree).states)

    def kv(self, tokens: tuple[int, ...]) -> Kv:
        """Rotated keys and values of the sequence `tokens`, as read-only views."""
        keys, values = self._kv_views(tokens)
        keys.flags.writeable = values.flags.writeable = False
        return Kv(keys, values)

    def _kv_views(self, tokens: tuple[int, ...]) -> tuple[Array, Array]:
        rope, length = self.parameters.architecture.rope, len(tokens)
        rotary.check_span(rope, self.parameters.architecture.max_positions, length, length)
        context = self._context(tokens, rotary.is_long(rope, length))
        return context.keys[:, :, :length], context.values[:, :, :length]

    def recurrent(self, tokens: tuple[int, ...]) -> RecurrentState | None:
        """See `RecurrentEvaluator`."""
        layers = self.parameters.architecture.recurrent
        if not layers:
            return None
        context = self._context(tokens, rotary.is_long(self.parameters.architecture.rope, len(tokens)))
        windows, memories = zip(*(context.recurrent[layer][len(tokens)] for layer in layers), strict=True)
        return RecurrentState(windows, memories)

    def _no_attention(self, layer: int, rows: int) -> tuple[Array, ...]:
        """Queries, keys and values of zeros, for a layer without attention."""
        heads, sizes = self.parameters.architecture.heads, self.parameters.architecture.layer_heads(layer)
        shapes = ((heads, sizes.head_dim), (sizes.kv_heads, sizes.head_dim), (sizes.kv_heads, sizes.value_dim))
        return tuple(np.zeros((heads, rows, width)) for heads, width in shapes)

    def _context(self, tokens: tuple[int, ...], is_long: bool) -> _Context:
        """A context that begins with `tokens`: a remembered one, one that was extended, or a new branch."""
        token_array = np.array(tokens, dtype=np.int64)
        context, num_shared = _Context(self.parameters, is_long), 0
        for recent in self._recent_contexts:
            shared_length = recent.shared_length(token_array) if recent.long == is_long else 0
            if shared_length >= num_shared and shared_length:
                context, num_shared = recent, shared_length
        if num_shared < len(token_array):
            # A remembered context that continues differently stays, and its shared prefix is copied into a new one.
            source = context
            if num_shared < context.length:
                context = _Context(self.parameters, is_long)
            context.reserve(source, num_shared, len(token_array))
            num_shared = self._append_known(context, token_array)
            for start in range(num_shared, len(token_array), BLOCK):
                self._append(context, token_array[start : start + BLOCK])
        if tokens:
            older = [recent for recent in self._recent_contexts if recent is not context]
            self._recent_contexts = [*older, context][-MOST_CONTEXTS:]
        return context

    def _append_known(self, context: _Context, tokens: Array) -> int:
        """Copy columns of `tokens` behind those of `context` from a run that has them, as far as it has; their end."""
        arch = self.parameters.architecture
        start = context.length
        if arch.recurrent or self.parameters.formulas.indexer is not None:
            return start  # a run keeps neither states nor index keys
        if self.parameters.twins_differ:  # which of them was accepted, the run does not know
            return start
        text = tuple(tokens.tolist())
        for pack, run in [*([self._packed] if self._packed else []), *self._recent_runs]:
            nodes = pack.nodes_along(text, start)
            if not nodes or rotary.is_long(arch.rope, len(pack.context) + pack.tree.height + 1) != context.long:
                continue
            rows, end = run.row[nodes], start + len(nodes)
            for layer, source in enumerate(arch.kv_sources):
                if source == layer and layer not in arch.unattended:
                    for cells, columns in zip(
                        context.of_layer(layer, start, end), run.layer_inputs[layer][1:], strict=True
                    ):
                        cells[:] = columns[:, rows]
            context.tokens[start:end] = tokens[start:end]
            context.length = end
            return end
        return start

    def _append(self, context: _Context, tokens: Array) -> None:
        """Run `tokens` through the layers behind the tokens that `context` has, causally, and keep their KV."""
        arch = self.parameters.architecture
        start, end = context.length, context.length + len(tokens)
        known = self.parameters.known_choices((*context.tokens[:start].tolist(), *tokens.tolist()))
        known = known.of_rows(list(range(start, end)))
        positions = np.arange(start, end)
        x = self.parameters.embed(tokens, positions)
        inputs = self.parameters.layer_inputs(tokens, x)
        columns_chosen: Array | None = None
        numbers: list[Array] = []
        if self.parameters.formulas.indexer is not None:
            numbers = [np.arange(position + 1) for position in range(start, end)]
        for layer, reach in enumerate(arch.reaches):
            if layer not in self._span:
                continue
            if layer in arch.recurrent:
                state = context.recurrent[layer][start]
                new_states, added = self.parameters.run_recurrence(layer, x, state, range(-1, end - start - 1))
                context.recurrent[layer] += new_states
            if layer in arch.unattended:
                context.keys[layer, :, start:end] = context.values[layer, :, start:end] = 0.0
                x = self.parameters.finish_layer(layer, x, x + added, known.experts, inputs)
                continue
            source, normed = arch.kv_sources[layer], self.parameters.attention_input(layer, x)
            if source == layer:
                new_columns = self._columns(layer, normed, context.long, positions)
                new_columns = self.parameters.read_back(layer, *new_columns, positions, known.codes)
                for cells, rows in zip(context.of_layer(layer, start, end), new_columns, strict=True):
                    cells[:] = rows
            if arch.layer_heads(layer).index_dim:
                context.index_keys(layer, start, end)[:] = self._index_keys(layer, normed, context.long, positions)
                all_keys = context.index_keys(layer, 0, end)[0]
                columns_chosen = self._choose(layer, normed, positions, context.long, all_keys, numbers)
            columns_chosen = _with_known_columns(columns_chosen, known.columns, layer, numbers)
            if layer + 1 < arch.layers:  # the last layer's output for context tokens is never used
                queries = self._queries(layer, normed, context.long, positions)
                columns = context.of_layer(source, 0, end)
                sinks = self.parameters.sinks(layer)
                mixed = block_attention(queries * self._scale, *columns, reach, arch.score_cap, sinks, columns_chosen)
                residual = self.parameters.after_attention(layer, x, by_row(mixed))
                residual = residual + added if layer in arch.recurrent else residual
                x = self.parameters.finish_layer(layer, x, residual, known.experts, inputs)
        context.tokens[start:end] = tokens
        context.length = end

    def _table(self, layer: int, long: bool, positions: Array) -> tuple[Array, Array]:
        """The rotary table of `layer` at `positions`, which layers with the same rotary embedding share."""
        parameters, arch = self.parameters, self.parameters.architecture
        if self._turns[0] is not positions:
            self._turns = (positions, {})
        rope, width = parameters.formulas.rope(arch, layer), arch.layer_heads(layer).head_dim
        if (long, rope, width) not in self._frequencies:
            # Any length on the same side of longrope's switch gives the same table.
            length = arch.rope.original + 1 if long else 1
            self._frequencies[long, rope, width] = parameters.frequencies(layer, length)
        if (rope, width) not in self._turns[1]:
            frequencies = self._frequencies[long, rope, width]
            self._turns[1][rope, width] = parameters.rotary_table(positions, *frequencies)
        return self._turns[1][rope, width]

    def _index_keys(self, layer: int, normed: Array, long: bool, positions: Array) -> Array:
        """The index keys [T, index_dim] of the input `normed` [T, hidden] of attention."""
        parameters, tables = self.parameters, self._table(layer, long, positions)
        assert parameters.formulas.indexer is not None
        return parameters.formulas.indexer.keys(parameters.architecture, parameters.state, layer, normed, *tables)

    def _choose(
        self,
        layer: int,
        normed: Array,
        positions: Array,
        long: bool,
        keys: Array,
        numbers: list[Array],
    ) -> Array:
        """The columns that the indexer of `layer` chooses for each row of `normed`, bool [rows, columns].

        `keys` holds the index keys of all columns, `numbers` for each row the columns that it may see, by position.
        """
        parameters, arch = self.parameters, self.parameters.architecture
        indexer = parameters.formulas.indexer
        assert indexer is not None
        tables = self._table(layer, long, positions)
        queries, weights = indexer.queries(arch, parameters.state, layer, normed, *tables)
        chosen = np.zeros((len(normed), len(keys)), dtype=bool)
        for row, columns in enumerate(numbers):
            if len(columns) <= arch.settings.index_columns:
                chosen[row, columns] = True
                continue
            scores = indexer.score(weights[row], indexer.products(queries[row], keys[columns]))
            chosen[row, columns[best_columns(scores, arch.settings.index_columns)]] = True
        return chosen

    def _queries(self, layer: int, normed: Array, long: bool, positions: Array) -> Array:
        """The queries [heads, T, head_dim] of the input `normed` [T, hidden] of attention.

        `long` says whether the sequence takes longrope's long factors.
        """
        parameters, arch = self.parameters, self.parameters.architecture
        queries = parameters.project(layer, "q", normed).swapaxes(0, 1)
        turned = parameters.rotate(layer, "q", queries, *self._table(layer, long, positions))
        return turned * parameters.formulas.query_factors(arch, layer, positions)[:, None]

    def _columns(self, layer: int, normed: Array, long: bool, positions: Array) -> tuple[Array, Array]:
        """The keys and values [kv_heads, T, width] of the input `normed` [T, hidden] of attention."""
        parameters = self.parameters
        keys, values = (parameters.project(layer, name, normed).swapaxes(0, 1) for name in "kv")
        return parameters.rotate(layer, "k", keys, *self._table(layer, long, positions)), values
