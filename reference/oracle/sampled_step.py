"""A step that samples, or whose logits are processed: what is drawn and accepted, by the coins of the tape."""

import numpy as np

from reference import tape
from reference.case import Case
from reference.draft import LanguageModel
from reference.oracle import acceptance, drafting, processing, tree_growth
from reference.oracle.coin_source import Taped
from reference.oracle.evaluator import Evaluator
from reference.trace import Accepted, Array, Drafted, frozen
from reference.tree import Tree


class SampledStep:
    """Step `number` of `case`, which has emitted `output` so far."""

    def __init__(self, case: Case, output: tuple[int, ...], number: int) -> None:
        self._case = case
        self._output = output
        self._nodes = case.most_nodes
        self.chance = Taped(tape.coins(case.sampling, number, self._nodes), self._nodes)

    @property
    def drawn(self) -> bool:
        """Whether the draft's tokens come from its law by coins, not by rank."""
        sampling = self._case.sampling
        return isinstance(self._case.draft, LanguageModel) and not sampling.greedy and sampling.draws != "top-k"

    def law(self, logits: Array, path: tuple[int, ...]) -> Array:
        """The processed law after `path`, the tokens below the root."""
        case = self._case
        return processing.law(logits, case.sampling, case.stops, case.prompt, self._output + path)

    def laws(self, tree: Tree, logits: Array) -> Array:
        """The target's law after each node, float64 [nodes, vocabulary]."""
        return np.stack([self.law(logits[node], tree.tokens_to(node)[1:]) for node in range(len(tree))])

    def scores(self, tree: Tree, logits: Array) -> Array:
        """What greedy decoding compares at each node: logits after all that looks back."""
        case = self._case
        return np.stack(
            [
                processing.scores(
                    logits[node], case.sampling, case.stops, case.prompt, self._output + tree.tokens_to(node)[1:]
                )
                for node in range(len(tree))
            ]
        )

    def draw(self, tokens: tuple[int, ...], evaluator: Evaluator) -> Drafted:
        """A static tree under `tokens[-1]` whose siblings are drawn in row order; ranks say nothing here.

        Where a law has fewer tokens than children want, the others are the best by logit of what is left, surely.
        """
        draft = self._case.draft
        assert isinstance(draft, LanguageModel)
        shape, vocab = draft.shape, draft.model.vocab_size
        named = np.array(draft.vocabulary or range(vocab))
        token, draft_id = [tokens[-1]] * len(shape), [0] * len(shape)
        logits = np.full((len(shape), len(named)), np.nan)
        proposal = np.full((len(shape), vocab), 1.0 / vocab)
        level = [0]
        while level:
            inner = [node for node in level if shape.children[node]] if level != [0] else [0]
            if inner:
                rows = drafting.scores(evaluator, tokens[:-1], shape, token, inner)[:, named]
                for node, row in zip(inner, rows, strict=True):
                    logits[node] = row
                    spread = np.full(vocab, -np.inf)
                    spread[named] = row
                    path = tuple(token[up] for up in shape.path(node)[1:])
                    self._name(shape.children[node], spread, path, token, proposal)
            level = [child for node in level for child in shape.children[node]]
        for node in range(1, len(shape)):
            draft_id[node] = int(np.flatnonzero(named == token[node])[0])
        return Drafted(Tree(shape.parent, tuple(token)), frozen(logits), tuple(draft_id), frozen(proposal))

    def _name(
        self, below: tuple[int, ...], logits: Array, path: tuple[int, ...], token: list[int], proposal: Array
    ) -> None:
        """Draw the children `below`, writing their tokens and proposals."""
        law = self.law(logits, path).tolist()
        drawn = tree_growth.siblings(self.chance, self._case.sampling.draws, [law] * len(below), below)
        held = set(drawn.values())
        for child in below:
            if child in drawn:
                token[child], proposal[child] = drawn[child], law
            else:
                left = [(-logits[one], one) for one in range(len(law)) if one not in held]
                token[child] = min(left)[1]
                held.add(token[child])
                proposal[child] = one_hot((token[child],), len(law))[0]

    def accept(self, tree: Tree, law: Array, proposal: Array) -> Accepted:
        """Verify by the case's rule, then draw the last token."""
        sampling = self._case.sampling
        rows, told = law.tolist(), proposal.tolist()
        path, weights = acceptance.verify(self.chance, sampling.rule, sampling.draws, tree, rows, told, self.drawn)
        bonus = self.chance.choose("bonus", 0, weights)
        return Accepted(path, bonus, tuple(tape.place(kind, node, self._nodes) for kind, node in self.chance.used))


def certain(tree: Tree, vocab: int) -> Array:
    """The proposal of a tree whose tokens were not drawn: one-hot rows [nodes, vocabulary]."""
    return one_hot(tree.token, vocab)


def one_hot(tokens: tuple[int, ...], vocab: int) -> Array:
    """A row for each of `tokens` that is certain of it; no square of the vocabulary, which may be large, is made."""
    rows = np.zeros((len(tokens), vocab))
    rows[np.arange(len(tokens)), list(tokens)] = 1.0
    return rows
