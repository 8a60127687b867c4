"""The formulas of multi-token prediction modules (arXiv 2412.19437, section 2.2)."""

from dataclasses import replace
from typing import TypeAlias

import numpy as np

from reference.draft.hidden import HeadInput
from reference.draft.mtp import Mtp, module_prefix
from reference.oracle.draft.head import Formulas, Past
from reference.oracle.draft.level_by_level import tree_of
from reference.oracle.draft.question import Question, means
from reference.oracle.formulas.layer import linear
from reference.oracle.parameters import load
from reference.trace import Array, Drafted, frozen
from reference.tree import Tree

Row: TypeAlias = tuple[Past, Array | None]
"""Of one module: its rows so far, and the output [hidden] of the last token's row; None where that token has no row."""


class MtpFormulas(Formulas):
    """A module: norms of embedding and state, their projection, and the target's own head."""

    draft: Mtp

    def __init__(self, draft: Mtp, question: Question, module: int) -> None:
        super().__init__(draft, question)
        assert question.target is not None
        self.at = module_prefix(load(question.target, question.dtype).architecture.layers, module)

    def embedded(self, tokens: tuple[int, ...], first: int) -> Array:
        """See `Formulas`; only module 0 has a row at position 0."""
        rows = super().embedded(tokens, first)
        if self.draft.zero_first and first == 0:
            rows[0] = 0.0  # a copy: a list of indices selects one
        return rows

    def of_target(self, hidden: Array) -> Array:
        """See `Formulas`."""
        return hidden

    def entered(self, embedded: Array, held: Array) -> tuple[Array, Array]:
        """See `Formulas`."""
        pair = [self.normed(embedded, f"{self.at}.enorm"), self.normed(held, f"{self.at}.hnorm")]
        joined = np.concatenate(pair[::-1] if self.draft.state_first else pair, axis=-1)
        u = linear(joined, self.state, f"{self.at}.eh_proj")
        return self.normed(u, f"{self.at}.input_layernorm"), u

    def scored(self, output: Array) -> Array:
        """See `Formulas`."""
        logits: Array = self.target_head @ self.normed(output, f"{self.at}.shared_head.norm")
        return logits

    def fed_back(self, output: Array) -> Array:
        """See `Formulas`."""
        return self.normed(output, f"{self.at}.shared_head.norm") if self.draft.normed_back else output


@means(Mtp.TAG)
def proposed(draft: Mtp, question: Question) -> Drafted:
    """The tree of MTP modules; the bare root where no token before the root has a state."""
    tokens, hidden, target = question.tokens, question.hidden, question.target
    assert target is not None
    assert hidden is not None
    if not len(hidden):
        return Drafted(Tree((0,), tokens[-1:]))
    modules = [MtpFormulas(draft, question, module) for module in range(draft.count)]
    paths: dict[tuple[int, ...], list[Row]] = {(): committed(modules, tokens, hidden)}

    def rows(path: tuple[int, ...]) -> list[Row]:
        if path not in paths:
            above = rows(path[:-1])
            position = len(hidden) - 1 + len(path)
            paths[path] = []
            for number, module in enumerate(modules):
                # Module 0 continues the last one: the target's state before this token is not known.
                source, past = above[number - 1][1], above[number][0]
                if source is not None:
                    past = module.below(past, path[-1:], modules[number - 1].fed_back(source)[None], position)
                paths[path].append((past, None if source is None else past.output))
        return paths[path]

    def score(below: list[tuple[int, ...]]) -> Array:
        scored = []
        for path in below:
            number = len(path) % len(modules)
            output = rows(path)[number][1]
            assert output is not None  # its row continues the root's row in module 0, module by module
            scored.append(modules[number].scored(output))
        return np.stack(scored)

    drafted = tree_of(draft, draft.shape, target.vocab_size, question, score, draft.fixed)
    return replace(drafted, given=HeadInput(draft.reads, 0, tokens[1:], frozen(hidden)))


def committed(modules: list[MtpFormulas], tokens: tuple[int, ...], hidden: Array) -> list[Row]:
    """The rows of `tokens` in each module; row i holds the token i + 1, and module m has none before row m."""
    past = modules[0].below(modules[0].none(), tokens[1:], hidden)
    rows: list[Row] = [(past, past.output)]
    for number in range(1, len(modules)):
        module, fed = modules[number], modules[number - 1].fed_back(past.outputs[:-1])
        past = module.none()
        if not len(fed):
            rows += [(one.none(), None) for one in modules[number:]]
            break
        past = module.below(past, tokens[1 + number :], fed, number)
        rows.append((past, past.output))
    return rows
