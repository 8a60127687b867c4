"""The target by definition: each path run as a plain sequence from scratch.

Positions are computed one by one, with no cache and no mask. `specverify.reference.oracle.parameters` has the steps of
a layer, `specverify.reference.oracle.formulas` the formulas in them.
"""

from collections.abc import Sequence
from dataclasses import dataclass
from typing import TypeAlias

import numpy as np

from specverify.reference.family.recurrent import RecurrentState
from specverify.reference.oracle.choices import known_positions
from specverify.reference.oracle.formulas import rotary
from specverify.reference.oracle.formulas.layer import best_columns, first_visible, soft_cap
from specverify.reference.oracle.formulas.recurrence import LayerState
from specverify.reference.oracle.parameters import Parameters
from specverify.reference.trace import Array, Kv
from specverify.reference.tree import Tree


@dataclass(frozen=True)
class Nodes:
    """The target's results at each node of a tree.

    Attributes:
        logits: float64 [nodes, vocabulary].
        attended: float64 [layers, heads, nodes, value_dim]; attention's output before the output projection.
    """

    logits: Array
    attended: Array


Layers: TypeAlias = Sequence[Array] | Array
"""An array for each layer, or one array of layers of equal sizes."""


@dataclass(frozen=True)
class Inputs:
    """The inputs of attention at each node, after norms, rotary embedding and temperature.

    Attributes:
        queries: For each layer float64 [heads, nodes, head_dim], of the layer's own sizes.
        keys: For each layer float64 [kv_heads, context + nodes, head_dim]; the context's columns come first.
        values: As `keys`, of width value_dim.
        scale: The factor of the products of queries and keys.
    """

    queries: Layers
    keys: Layers
    values: Layers
    scale: float


def stack_layers(layers: Sequence[Array], heads: int, width: int) -> Array:
    """Arrays [heads of a layer, rows, width of a layer] as one [layers, heads, rows, width] with zeros behind each."""
    if all(layer.shape[0] == heads and layer.shape[-1] == width for layer in layers):
        return np.stack(layers)
    stacked = np.zeros((len(layers), heads, layers[0].shape[1], width), like=layers[0])
    for layer, rows in zip(stacked, layers, strict=True):
        layer[: rows.shape[0], :, : rows.shape[-1]] = rows
    return stacked


def attention(
    query: Array, keys: Array, values: Array, scale: float, cap: float = 0.0, sinks: Array | None = None
) -> Array:
    """The attention output of one position: query [heads, d], keys and values [seen, kv_heads, ...] -> [heads, e].

    A head's sink is a score whose column has no value: its share of the softmax is lost.
    """
    # Grouped queries: consecutive query heads share one KV head.
    grouped = query.reshape(keys.shape[1], -1, query.shape[-1])
    scores = soft_cap(np.einsum("kgd,skd->kgs", grouped, keys) * scale, cap)
    # Subtracting the maximum changes no weight and keeps exp from overflowing.
    peak = scores.max(axis=-1, keepdims=True)
    sink_scores = None if sinks is None else sinks.reshape(*scores.shape[:2], 1)
    peak = peak if sink_scores is None else np.maximum(peak, sink_scores)
    weights = np.exp(scores - peak)
    weights /= weights.sum(axis=-1, keepdims=True) + (0.0 if sink_scores is None else np.exp(sink_scores - peak))
    mixed: Array = np.einsum("kgs,skd->kgd", weights, values).reshape(len(query), -1)
    return mixed


@dataclass(frozen=True)
class _Sequence:
    """One sequence run from scratch; `queries`, `attended` and `logits` are those of its last position."""

    keys: list[Array]  # of each layer those that it makes, [kv_heads, T, head_dim], rotated; none of a layer without
    values: list[Array]  # as keys, of value_dim
    queries: list[Array]  # of each layer [heads, head_dim]
    attended: list[Array]  # of each layer [heads, value_dim]
    logits: Array  # [vocabulary]
    states: Array  # [layers + 2, T, hidden size]; see Evaluator.states
    recurrent: list[LayerState]  # of the layers with a recurrent state, after the last position
    index_keys: list[Array]  # of each layer [T, index_dim]


class PathByPath:
    """The naive evaluator: the row of a node is the last row of the node's own sequence, run from scratch."""

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
            stack_layers(by_node([run.attended for run in runs]), arch.heads, arch.widest.value_dim),
        )

    def inputs(self, context: tuple[int, ...], tree: Tree) -> Inputs:
        """The inputs of attention at every node of `tree`, from the last row of the node's own sequence."""
        runs = [self._run((*context, *tree.tokens_to(node))) for node in range(len(tree))]
        num_context, parameters = len(context), self.parameters

        def columns(name: str, layer: int) -> Array:
            # The context is the same in every node's sequence: the root's run has it.
            of_runs = [getattr(run, name)[layer] for run in runs]
            return np.concatenate([of_runs[0][:, :num_context], *(rows[:, -1:] for rows in of_runs)], axis=1)

        sources = parameters.architecture.kv_sources
        return Inputs(
            by_node([run.queries for run in runs]),
            [columns("keys", layer) for layer in sources],
            [columns("values", layer) for layer in sources],
            parameters.formulas.score_scale(parameters.architecture),
        )

    def states(self, tokens: tuple[int, ...]) -> Array:
        """See `Evaluator`."""
        if not tokens:
            arch = self.parameters.architecture
            return np.empty((arch.layers + 2, 0, arch.hidden_size))
        return self._run(tokens).states

    def node_states(self, context: tuple[int, ...], tree: Tree) -> Array:
        """See `Evaluator`."""
        return np.stack([self._run((*context, *tree.tokens_to(node))).states[:, -1] for node in range(len(tree))], 1)

    def kv(self, tokens: tuple[int, ...]) -> Kv:
        """Rotated keys and values of the sequence `tokens`."""
        if not tokens:
            arch = self.parameters.architecture
            sizes = (arch.layers, arch.widest.kv_heads, 0)
            return Kv(np.empty((*sizes, arch.widest.key_width)), np.empty((*sizes, arch.widest.value_dim)))
        run, widest = self._run(tokens), self.parameters.architecture.widest
        return Kv(
            stack_layers(with_index_keys(run.keys, run.index_keys), widest.kv_heads, widest.key_width),
            stack_layers(run.values, widest.kv_heads, widest.value_dim),
        )

    def recurrent(self, tokens: tuple[int, ...]) -> RecurrentState | None:
        """See `RecurrentEvaluator`."""
        layers = self.parameters.architecture.recurrent
        if not layers:
            return None
        layer_states = self._run(tokens).recurrent if tokens else [self.parameters.start() for _ in layers]
        windows, memories = zip(*layer_states, strict=True)
        return RecurrentState(windows, memories)

    def _run(self, tokens: tuple[int, ...]) -> _Sequence:
        parameters, arch = self.parameters, self.parameters.architecture
        formulas, length = parameters.formulas, len(tokens)
        positions, scale = np.arange(length), formulas.score_scale(arch)

        def project(x: Array, layer: int, name: str) -> Array:
            """[T, hidden] -> [T, heads of `name`, head_dim]; queries and keys normed, rotated, tempered where asked."""
            y = parameters.project(layer, name, x)
            # Values are neither normed nor rotated.
            if name == "v":
                return y
            cos, sin = parameters.rotary_table(positions, *parameters.frequencies(layer, length))
            y = np.swapaxes(parameters.rotate(layer, name, y.swapaxes(0, 1), cos, sin), 0, 1)
            return y * formulas.query_factors(arch, layer, positions)[:, None, None] if name == "q" else y

        x, known = parameters.embed(np.array(tokens), positions), parameters.known_choices(tokens)
        known_experts = known.experts
        inputs = parameters.layer_inputs(np.array(tokens), x)
        states = [x]
        all_keys, all_values, last_queries, last_attended = list[Array](), list[Array](), list[Array](), list[Array]()
        recurrent: list[LayerState] = []
        index_keys, chosen = list[Array](), [np.arange(t + 1) for t in range(length)]
        for layer, reach in enumerate(arch.reaches):
            sizes, source = arch.layer_heads(layer), arch.kv_sources[layer]
            if layer in arch.recurrent:
                layer_states, added = parameters.run_recurrence(layer, x, parameters.start(), range(-1, length - 1))
                recurrent.append(layer_states[-1])
            if layer in arch.unattended:
                x = parameters.finish_layer(layer, x, x + added, known_experts, inputs)
                states.append(x)
                for collection, shape in (
                    (all_keys, (sizes.kv_heads, length, sizes.head_dim)),
                    (all_values, (sizes.kv_heads, length, sizes.value_dim)),
                    (last_queries, (arch.heads, sizes.head_dim)),
                    (last_attended, (arch.heads, sizes.value_dim)),
                    (index_keys, (length, sizes.index_dim)),
                ):
                    collection.append(np.zeros(shape))
                continue
            normed = parameters.attention_input(layer, x)
            queries = project(normed, layer, "q")
            if source == layer:
                new_keys, new_values = (project(normed, layer, name).swapaxes(0, 1) for name in "kv")
                own_keys, own_values = parameters.read_back(layer, new_keys, new_values, positions, known.codes)
                all_keys.append(own_keys)
                all_values.append(own_values)
            else:
                all_keys.append(np.zeros((0, length, sizes.head_dim)))
                all_values.append(np.zeros((0, length, sizes.value_dim)))
            keys, values = all_keys[source].swapaxes(0, 1), all_values[source].swapaxes(0, 1)
            index_keys.append(np.zeros((length, sizes.index_dim)))
            if formulas.indexer is not None and sizes.index_dim:
                tables = parameters.rotary_table(positions, *parameters.frequencies(layer, length))
                index_keys[-1] = formulas.indexer.keys(arch, parameters.state, layer, normed, *tables)
                index_queries, weights = formulas.indexer.queries(arch, parameters.state, layer, normed, *tables)
                for t in range(length):
                    products = formulas.indexer.products(index_queries[t], index_keys[-1][: t + 1])
                    scores = formulas.indexer.score(weights[t], products)
                    chosen[t] = best_columns(scores, arch.settings.index_columns)
            for t in range(length if known.columns is not None else 0):
                assert known.columns is not None
                chosen[t] = known_positions(known.columns[layer, t], chosen[t])
            mixed, sinks = np.empty((length, arch.heads, sizes.value_dim), like=x), parameters.sinks(layer)
            for t in range(length):
                first_column = first_visible(reach, t)
                visible = slice(first_column, t + 1) if formulas.indexer is None else chosen[t]
                mixed[t] = attention(queries[t], keys[visible], values[visible], scale, arch.score_cap, sinks)
            residual = parameters.after_attention(layer, x, mixed.reshape(length, -1))
            residual = residual + added if layer in arch.recurrent else residual
            x = parameters.finish_layer(layer, x, residual, known_experts, inputs)
            states.append(x)
            last_queries.append(queries[-1])
            last_attended.append(mixed[-1])
        states.append(parameters.norm(x, "model.norm"))
        return _Sequence(
            all_keys,
            all_values,
            last_queries,
            last_attended,
            parameters.logits(states[-1][-1]),
            np.stack(states),
            recurrent,
            index_keys,
        )


def with_index_keys(keys: Sequence[Array], index_keys: Sequence[Array]) -> list[Array]:
    """The keys [kv_heads, T, head_dim] of each layer with the index keys [T, index_dim] behind those of every head."""
    pairs = zip(keys, index_keys, strict=True)
    repeated = [np.broadcast_to(rows, (len(of_layer), *rows.shape)) for of_layer, rows in pairs]
    return [np.concatenate(pair, axis=-1) for pair in zip(keys, repeated, strict=True)]


def by_node(runs: Sequence[Sequence[Array]]) -> list[Array]:
    """Arrays [heads, width] by run and layer as arrays [heads, runs, width] by layer."""
    return [np.stack(layer, axis=1) for layer in zip(*runs, strict=True)]
