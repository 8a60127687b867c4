"""The formulas of an EAGLE-1 head (arXiv 2401.15077).

Further layers, iRoPE and experts are those of heads of larger targets (arXiv 2508.08192); the experts are Llama 4's.
"""

from collections.abc import Mapping
from dataclasses import dataclass

import numpy as np

from specverify.reference.draft.eagle1 import LAYER_PREFIX, Eagle1, layer_prefix
from specverify.reference.oracle.draft.head import (
    HeadFormulas,
    committed_past,
    propose_by_head,
    states_of_rows,
)
from specverify.reference.oracle.draft.question import Question, proposes
from specverify.reference.oracle.formulas.layer import gated_block, linear, sigmoid
from specverify.reference.oracle.formulas.routers import Router
from specverify.reference.oracle.parameters import parameters_outside_layers
from specverify.reference.trace import Array, Drafted

Exchanges = Mapping[tuple[int, int], tuple[int, ...]]
"""From a layer and a row of the head to the experts that the row takes there, in place of those of its scores."""

NO_EXCHANGES: Exchanges = {}
"""Every row takes the experts of its scores."""


class Eagle1Formulas(HeadFormulas):
    """EAGLE-1: no norm before the first attention, and the target's own head on the output.

    Attributes:
        exchanges: The rows that take other experts than those of their scores.
        routers: For each layer and row that was run, in that order, the scores of its experts.
    """

    prefix = LAYER_PREFIX
    draft: Eagle1

    def __init__(self, draft: Eagle1, question: Question, exchanges: Exchanges = NO_EXCHANGES) -> None:
        super().__init__(draft, question)
        self.further_prefixes = tuple(layer_prefix(number) for number in range(1, draft.layers))
        self.unrotated = draft.unrotated
        self.exchanges = exchanges
        self.routers: list[tuple[int, int, Router]] = []

    def target_states(self, hidden: Array) -> Array:
        """See `Formulas`."""
        return hidden

    def enter(self, embedded: Array, states: Array) -> tuple[Array, Array]:
        """See `Formulas`."""
        x = linear(np.concatenate([embedded, states], axis=-1), self.state, "fc")
        return x, x

    def feed_forward(self, layer: int, x: Array, first: int) -> Array:
        """See `HeadFormulas`; experts as in Llama 4, the factor before the expert."""
        if not self.draft.experts:
            return super().feed_forward(layer, x, first)
        prefix = f"{self.prefixes[layer]}.mlp"
        scores = linear(x, self.state, f"{prefix}.gate")
        mixed = gated_block(x, self.state, f"{prefix}.shared_expert")
        for number, row in enumerate(x):
            router = Router(scores[number][None], sigmoid(scores[number])[None], self.draft.experts_per_token)
            self.routers.append((layer, first + number, router))
            experts = self.exchanges.get((layer, first + number), tuple(router.chosen[0].tolist()))
            for expert in experts:
                mixed[number] += gated_block(router.weights[0, expert] * row, self.state, f"{prefix}.experts.{expert}")
        return mixed

    def score(self, output: Array) -> Array:
        """See `Formulas`."""
        logits: Array = output @ self.target_head.T
        return logits

    def feed_back(self, output: Array) -> Array:
        """See `Formulas`."""
        return output


@dataclass(frozen=True)
class HeadRun:
    """One path of a head with experts, from scratch.

    Attributes:
        routers: The layer and the row of each choice, and the scores by which it was made; rows of the context first.
        scores: The head's scores of the children of the path's last token, [vocabulary].
        depth: The number of layers of target and head together.
    """

    routers: tuple[tuple[int, int, Router], ...]
    scores: Array
    depth: int


def run_path(draft: Eagle1, question: Question, path: tuple[int, ...], exchanges: Exchanges = NO_EXCHANGES) -> HeadRun:
    """The head on the tokens of `question` and `path` below them, some rows taking other experts than their own."""
    assert question.target is not None
    head = Eagle1Formulas(draft, question, exchanges)
    assert question.hidden is not None
    past = committed_past(head, draft.row_tokens(question.tokens), states_of_rows(draft, question.hidden))
    for token in path:
        past = head.extend(past, (token,), head.feed_back(past.output)[None])
    layers = parameters_outside_layers(question.target, question.dtype).architecture.layers
    return HeadRun(tuple(head.routers), head.score(past.output), layers + draft.layers)


@proposes(Eagle1.TAG)
def propose(draft: Eagle1, question: Question) -> Drafted:
    """The tree of an EAGLE-1 head on the oracle's hidden states."""
    return propose_by_head(Eagle1Formulas(draft, question), question)
