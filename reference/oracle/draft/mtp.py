"""The formulas of multi-token prediction modules (arXiv 2412.19437, section 2.2)."""

from dataclasses import replace
from typing import TypeAlias

import numpy as np

from specverify.reference.draft.hidden import HeadInput
from specverify.reference.draft.mtp import EMBEDDING, HEAD, Mtp, module_architecture, module_prefix
from specverify.reference.oracle.draft.head import HeadFormulas, Past, committed_past, states_of_rows
from specverify.reference.oracle.draft.level_by_level import tree_of
from specverify.reference.oracle.draft.question import Question, proposes
from specverify.reference.oracle.formulas.layer import linear
from specverify.reference.oracle.model import attention
from specverify.reference.oracle.parameters import Parameters, parameters_outside_layers
from specverify.reference.trace import Array, Drafted, frozen
from specverify.reference.tree import Tree

Row: TypeAlias = tuple[Past, Array | None]
"""Of one module: its rows so far, and the output [hidden] of the last token's row; None where that token has no row."""


class MtpFormulas(HeadFormulas):
    """A module: norms of embedding and state, their projection, and the head that scores its output."""

    draft: Mtp

    def __init__(self, draft: Mtp, question: Question, module: int) -> None:
        super().__init__(draft, question)
        assert question.target is not None
        target = parameters_outside_layers(question.target, question.dtype)
        self.prefix = module_prefix(target.architecture.layers, module)
        if draft.own_embedding:
            self.embedding = self.state[f"{self.prefix}.{EMBEDDING}.weight"]
        self.head = self.state[f"{self.prefix}.{HEAD}.weight"] if draft.own_head else self.target_head

    def embed(self, tokens: tuple[int, ...], first: int) -> Array:
        """See `Formulas`; only module 0 has a row at position 0."""
        rows = super().embed(tokens, first)
        if self.draft.zero_first and first == 0:
            rows[0] = 0.0  # a copy: a list of indices selects one
        return rows

    def target_states(self, hidden: Array) -> Array:
        """See `Formulas`."""
        return hidden

    def enter(self, embedded: Array, states: Array) -> tuple[Array, Array]:
        """See `Formulas`."""
        pair = [self.norm(embedded, f"{self.prefix}.enorm"), self.norm(states, f"{self.prefix}.hnorm")]
        joined = np.concatenate(pair[::-1] if self.draft.state_first else pair, axis=-1)
        u = linear(joined, self.state, f"{self.prefix}.eh_proj")
        return self.norm(u, f"{self.prefix}.input_layernorm"), u

    def score(self, output: Array) -> Array:
        """See `Formulas`."""
        logits: Array = self.norm(output, f"{self.prefix}.shared_head.norm") @ self.head.T
        return logits

    def feed_back(self, output: Array) -> Array:
        """See `Formulas`."""
        return self.norm(output, f"{self.prefix}.shared_head.norm") if self.draft.normed_back else output


class TargetLayerFormulas(MtpFormulas):
    """A module whose decoder layer, and whose norms, are those of the target's family.

    Attributes:
        number: The module, and the number of its layer in `parameters`.
        parameters: A model of the target's family whose layers are those of the modules.
    """

    def __init__(self, draft: Mtp, question: Question, module: int) -> None:
        super().__init__(draft, question, module)
        assert question.target is not None
        target = parameters_outside_layers(question.target, question.dtype)
        self.number = module
        layer_prefix = module_prefix(0, module)
        in_layer = {
            layer_prefix + name.removeprefix(self.prefix): weight
            for name, weight in self.state.items()
            if name.startswith(f"{self.prefix}.")
        }
        architecture = module_architecture(target.architecture, draft.count)
        self.parameters = Parameters(architecture, {**self.state, **in_layer})

    def norm(self, x: Array, name: str) -> Array:
        """See `Formulas`."""
        return self.parameters.norm(x, name)

    def empty_past(self) -> Past:
        """See `Formulas`."""
        sizes = self.parameters.architecture.layer_heads(self.number)
        keys, values = (np.empty((0, sizes.kv_heads, width)) for width in (sizes.head_dim, sizes.value_dim))
        return Past((keys,), (values,), np.empty((0, 0)))

    def _layer(
        self, number: int, x: Array, residual: Array, keys: Array, values: Array, first: int
    ) -> tuple[Array, Array, Array]:
        """See `Formulas`; `x` is the normed residual stream."""
        parameters, layer = self.parameters, self.number
        arch, formulas = parameters.architecture, parameters.formulas
        num_above, positions = len(keys), np.arange(first, first + len(x))
        frequencies = parameters.frequencies(layer, first + len(x))
        cos, sin = parameters.rotary_table(positions, *frequencies)

        def rotated(name: str) -> Array:
            by_head = parameters.project(layer, name, x).swapaxes(0, 1)
            by_row: Array = parameters.rotate(layer, name, by_head, cos, sin).swapaxes(0, 1)
            return by_row

        queries = rotated("q")
        keys = np.concatenate([keys, rotated("k")])
        values = np.concatenate([values, parameters.project(layer, "v", x)])
        scale = formulas.score_scale(arch)
        mixed = [
            attention(query, keys[: num_above + row + 1], values[: num_above + row + 1], scale)
            for row, query in enumerate(queries)
        ]
        r = parameters.after_attention(layer, residual, np.array(mixed).reshape(len(x), -1))
        return keys, values, parameters.finish_layer(layer, residual, r)


@proposes(Mtp.TAG)
def propose(draft: Mtp, question: Question) -> Drafted:
    """The tree of MTP modules; the bare root where no token before the root has a state."""
    tokens, hidden, target = question.tokens, question.hidden, question.target
    assert target is not None
    assert hidden is not None
    if not len(hidden):
        return Drafted(Tree((0,), tokens[-1:]))
    formulas = MtpFormulas if draft.layer is not None else TargetLayerFormulas
    modules = [formulas(draft, question, module) for module in range(draft.count)]
    row_tokens, row_states = draft.row_tokens(tokens), states_of_rows(draft, hidden)
    paths: dict[tuple[int, ...], list[Row]] = {(): committed_rows(modules, row_tokens, row_states)}

    def rows(path: tuple[int, ...]) -> list[Row]:
        if path not in paths:
            rows_of_parent = rows(path[:-1])
            position = len(row_tokens) - 1 + len(path)
            paths[path] = []
            for number, module in enumerate(modules):
                # Module 0 continues the last one: the target's state before this token is not known.
                source, past = rows_of_parent[number - 1][1], rows_of_parent[number][0]
                if source is not None:
                    past = module.extend(past, path[-1:], modules[number - 1].feed_back(source)[None], position)
                paths[path].append((past, None if source is None else past.output))
        return paths[path]

    def score(paths_to_score: list[tuple[int, ...]]) -> Array:
        scores = []
        for path in paths_to_score:
            number = len(path) % len(modules)
            output = rows(path)[number][1]
            assert output is not None  # its row continues the root's row in module 0, module by module
            scores.append(modules[number].score(output))
        return np.stack(scores)

    drafted = tree_of(draft, draft.shape, target.vocab_size, question, score, draft.fixed)
    head_input = HeadInput(draft.reads, 0, row_tokens, frozen(row_states), own_rows=draft.own_rows)
    return replace(drafted, given=head_input)


def committed_rows(modules: list[MtpFormulas], tokens: tuple[int, ...], hidden: Array) -> list[Row]:
    """The rows of `tokens` beside `hidden` [rows, width] in each module; module m has none before row m."""
    past = committed_past(modules[0], tokens, hidden)
    rows: list[Row] = [(past, past.output)]
    for number in range(1, len(modules)):
        module, states = modules[number], modules[number - 1].feed_back(past.outputs[:-1])
        past = module.empty_past()
        if not len(states):
            rows += [(later_module.empty_past(), None) for later_module in modules[number:]]
            break
        past = module.extend(past, tokens[number:], states, number)
        rows.append((past, past.output))
    return rows
