"""ScoredChoices: by which scores the rows of a model choose experts and columns, and what they took.

A choice jumps where two scores are equal: a row there may take either expert, or attend to either column, and its
numbers with it.
"""

from collections.abc import Callable, Mapping
from dataclasses import dataclass, replace
from typing import Any, Protocol

import numpy as np

from specverify.reference.oracle.choices import COLUMNS, EXPERTS, KINDS, Choices, RowChoices, same_width
from specverify.reference.oracle.evaluator import Evaluator, recurrent_outputs
from specverify.reference.oracle.formulas.column_scores import ColumnScores, FollowedColumns
from specverify.reference.oracle.formulas.routers import UNKNOWN, Router
from specverify.reference.oracle.parameters import Parameters
from specverify.reference.trace import Array
from specverify.reference.tree import Tree


class Scorer(Protocol):
    """The scores of one layer for T rows: a `Router`, a `ColumnScores`, or the columns of the layer before."""

    @property
    def chosen(self) -> Array:
        """The choice of each row by these scores, [T, taken]."""
        ...

    def margins(self) -> Array:
        """How near each row lies to another choice, over the rms of scores, [T]."""
        ...

    def gaps(self, chosen: Array, /) -> Array:
        """How much scores must change before `chosen` [T, taken] is the choice of each row, over their rms, [T]."""
        ...

    def exchanges(self, row: int, limit: float) -> list[tuple[float, Array]]:
        """Other choices of `row` at most `limit` away, the nearest first: (distance, choice)."""
        ...

    def squared_change(self, changed: Any, /) -> Array:
        """The mean square by which the scores of `changed` lie off these, over their rms, [T]."""
        ...


@dataclass(frozen=True)
class ScoredChoices:
    """The scores of one kind of choice in every layer of a run, for the rows of a context and of a tree below it.

    Attributes:
        kind: A member of KINDS.
        scorers: For each layer its scores for all rows; None for a layer without such a choice.
        chosen: What the rows took, [layers, context + nodes, taken]; UNKNOWN in layers without such a choice, and
            behind the columns of a row that takes fewer than others.
    """

    kind: str
    scorers: tuple[Scorer | None, ...]
    chosen: Array

    def fits(self, chosen: Array) -> bool:
        """Whether `chosen` has the shape of choices of these rows; columns may have places to spare."""
        axes = 2 if self.kind == COLUMNS else 3
        return chosen.shape[:axes] == self.chosen.shape[:axes] and chosen.ndim == 3

    def chosen_by_scores(self, layer: int) -> Array:
        """What the scores of `layer` choose, whatever its rows took, [context + nodes, taken]."""
        scorer = self.scorers[layer]
        own: Array = self.chosen[layer] if scorer is None else scorer.chosen
        return own

    def margins(self) -> Array:
        """`Scorer.margins`, [layers, context + nodes]; infinity in layers without such a choice."""
        return self._by_layer(np.inf, lambda scorer, layer: scorer.margins())

    def gaps(self, chosen: Array) -> Array:
        """`Scorer.gaps` of `chosen` [layers, context + nodes, taken]; 0 in layers without such a choice."""
        return self._by_layer(0.0, lambda scorer, layer: scorer.gaps(chosen[layer]))

    def squared_change(self, changed: "ScoredChoices") -> Array:
        """`Scorer.squared_change`, [layers, context + nodes]; 0 in layers without such a choice."""
        return self._by_layer(0.0, lambda scorer, layer: scorer.squared_change(changed.scorers[layer]))

    def _by_layer(self, default: float, measure: Callable[[Scorer, int], Array]) -> Array:
        rows = self.chosen.shape[1]
        return np.stack(
            [
                np.full(rows, default) if scorer is None else measure(scorer, layer)
                for layer, scorer in enumerate(self.scorers)
            ]
        )


def scored_choices(
    kind: str,
    evaluator: Evaluator,
    context: tuple[int, ...],
    tree: Tree,
    layers: range | None = None,
    rows: list[int] | None = None,
) -> ScoredChoices | None:
    """The scores of experts or columns for the tokens of `context` and then the nodes of `tree`, in `layers` alone.

    None for layers without such a choice, and for an evaluator that holds no weights (plain transformers).

    Args:
        kind: A member of KINDS.
        evaluator: The model.
        context: The tokens above the tree.
        tree: The tree.
        layers: The layers, by default all; of columns, the first of them has an indexer.
        rows: The rows whose scores are wanted, by default all. Columns are scored in these rows alone, and with what
            `evaluator` keeps of the context, so that the steps of one request cost their trees.
    """
    if not evaluator.parameters.state:
        return None
    layers = range(evaluator.parameters.architecture.layers) if layers is None else layers
    return SCORED[kind](evaluator, context, tree, layers, rows)


def own_choices(evaluator: Evaluator, context: tuple[int, ...], tree: Tree) -> RowChoices:
    """What all rows of `context` and `tree` take, known or by their own scores and numbers."""
    scored = {kind: scored_choices(kind, evaluator, context, tree) for kind in KINDS}
    chosen = {kind: None if choices is None else choices.chosen for kind, choices in scored.items()}
    return RowChoices(**chosen, codes=own_codes(evaluator, context, tree))


def own_codes(evaluator: Evaluator, context: tuple[int, ...], tree: Tree) -> Array | None:
    """The codes of all rows of `context` and `tree`, [layers, rows, codes]; None where columns are not rounded."""
    rounded = evaluator.parameters.rounded
    if rounded is None:
        return None
    inputs = evaluator.inputs(context, tree)
    of_layers = [
        rounded.codes(layer, keys, values)
        for layer, (keys, values) in enumerate(zip(inputs.keys, inputs.values, strict=True))
    ]
    widest = np.full((1, max(codes.shape[1] for codes in of_layers)), UNKNOWN)
    return np.stack([same_width(codes, widest)[0] for codes in of_layers])


def with_choices(parameters: Parameters, context: tuple[int, ...], tree: Tree, rows: RowChoices) -> Parameters:
    """`parameters` of which the rows of `context` and `tree` take `rows`."""
    choices = Choices(parameters.architecture.layers)
    choices.add(context, tree, rows)
    return replace(parameters, choices=choices)


def _whole_tree(context: tuple[int, ...], tree: Tree) -> Tree:
    """The context as a chain with `tree` below its last token: one run gives the states of every row."""
    num_context = len(context)
    tree_parents = tuple(
        num_context + parent if node else max(0, num_context - 1) for node, parent in enumerate(tree.parent)
    )
    parents = (0, *range(num_context - 1), *tree_parents) if num_context else tree.parent
    return Tree(parents, (*context, *tree.token))


def _scored_experts(
    evaluator: Evaluator, context: tuple[int, ...], tree: Tree, layers: range, rows: list[int] | None
) -> ScoredChoices | None:
    parameters = evaluator.parameters
    if parameters.formulas.experts is None:
        return None
    whole_tree = _whole_tree(context, tree)
    states, attended = evaluator.node_states((), whole_tree), evaluator.nodes((), whole_tree).attended
    # All rows are scored, whose rms is the unit of a router's gaps.
    chosen_rows = list(range(len(whole_tree))) if rows is None else rows
    routers: list[Router | None] = []
    for layer in layers:
        residual = states[layer]
        if layer not in parameters.architecture.unattended:
            residual = parameters.after_attention(
                layer, residual, attended[layer].swapaxes(0, 1).reshape(len(whole_tree), -1)
            )
        if layer in parameters.architecture.recurrent:
            residual = residual + recurrent_outputs(parameters, layer, states[layer], whole_tree)
        router = parameters.router(layer, states[layer], residual)
        routers.append(None if router is None else router.converted(parameters.host_copy).of_rows(chosen_rows))
    experts_per_row = next((router.experts_per_row for router in routers if router is not None), 0)
    if not experts_per_row:  # these layers are dense
        return None
    known_experts = parameters.known_choices((), whole_tree).experts
    chosen = np.full((len(routers), len(chosen_rows), experts_per_row), UNKNOWN)
    for place, (layer, router) in enumerate(zip(layers, routers, strict=True)):
        if router is not None:
            chosen[place] = router.follow(None if known_experts is None else known_experts[layer][chosen_rows])
    return ScoredChoices(EXPERTS, tuple(routers), chosen)


def _scored_columns(
    evaluator: Evaluator, context: tuple[int, ...], tree: Tree, layers: range, rows: list[int] | None
) -> ScoredChoices | None:
    parameters = evaluator.parameters
    if parameters.formulas.indexer is None:
        return None
    whole_tree = _whole_tree(context, tree)
    # Under longrope a tree may turn the tokens above it otherwise than they are turned by themselves.
    if rows is not None and parameters.architecture.rope.kind != "longrope":
        states = np.concatenate([evaluator.states(context), evaluator.node_states(context, tree)], axis=1)
    else:
        states = evaluator.node_states((), whole_tree)
    chosen_rows = list(range(len(whole_tree))) if rows is None else rows
    columns_above = [_columns_above(row, len(context), tree) for row in chosen_rows]
    known_columns = parameters.known_choices((), whole_tree).columns
    scorers: list[Scorer | None] = []
    chosen: list[Array] = []
    for layer in layers:
        # A layer without an indexer takes what the one before took.
        own_scores = _column_scores(parameters, layer, states[layer], whole_tree, chosen_rows, columns_above)
        scorer = own_scores or FollowedColumns(chosen[-1])
        scorers.append(scorer)
        chosen.append(scorer.follow(None if known_columns is None else known_columns[layer][chosen_rows]))
    widest = max(columns.shape[1] for columns in chosen)
    room = np.full((1, widest), UNKNOWN)
    return ScoredChoices(COLUMNS, tuple(scorers), np.stack([same_width(columns, room)[0] for columns in chosen]))


def _columns_above(row: int, num_context: int, tree: Tree) -> Array:
    """The numbers of the rows of a context and a tree below it that `row` sees, by position."""
    if row < num_context:
        return np.arange(row + 1)
    return np.concatenate([np.arange(num_context), num_context + np.array(tree.path(row - num_context))])


def _column_scores(
    parameters: Parameters, layer: int, x: Array, tree: Tree, rows: list[int], columns_above: list[Array]
) -> ColumnScores | None:
    """The scores of `layer` in `rows`, for the residual stream `x` [nodes, hidden] of a whole tree.

    `columns_above` holds for each of `rows` the nodes on its path. None without an indexer.
    """
    indexer, arch = parameters.formulas.indexer, parameters.architecture
    if indexer is None or not arch.layer_heads(layer).index_dim:
        return None
    normed, longest = parameters.attention_input(layer, x), tree.height + 1
    tables = parameters.rotary_table(np.array(tree.depth), *parameters.frequencies(layer, longest))
    keys = parameters.host_copy(indexer.keys(arch, parameters.state, layer, normed, *tables))
    queries, weights = map(parameters.host_copy, indexer.queries(arch, parameters.state, layer, normed, *tables))
    scores, largest = np.full((len(rows), longest), -np.inf), np.zeros((len(rows), longest))
    sizes = np.empty(len(rows))
    for place, (row, columns) in enumerate(zip(rows, columns_above, strict=True)):
        products = indexer.products(queries[row], keys[columns])
        scores[place, : len(columns)] = indexer.score(weights[row], products)
        largest[place, : len(columns)] = products.max(axis=0)
        sizes[place] = max(float(np.sqrt(np.mean(np.square(products)))), 1e-300)
    return ColumnScores(scores, largest, sizes, int(arch.settings.index_columns))


Score = Callable[[Evaluator, tuple[int, ...], Tree, range, list[int] | None], ScoredChoices | None]
"""The scores of some rows in some layers, as `scored_choices`."""

SCORED: Mapping[str, Score] = {
    EXPERTS: _scored_experts,
    COLUMNS: _scored_columns,
}
"""By kind of choice, the scores of an evaluator that holds weights."""

assert set(SCORED) == set(KINDS)
