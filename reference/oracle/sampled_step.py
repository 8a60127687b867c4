"""SampledStep: drawing and acceptance of one step, by the coins of the tape.

Greedy steps with processed logits use its scores.
"""

from dataclasses import replace

import numpy as np

from specverify.reference import tape
from specverify.reference.case import Case
from specverify.reference.malformed import Malformed, under
from specverify.reference.oracle import acceptance, processing, tree_growth
from specverify.reference.oracle.coin_source import TapeChance
from specverify.reference.oracle.language import legal_after
from specverify.reference.trace import Accepted, Array, frozen
from specverify.reference.tree import Tree


class SampledStep:
    """Step number `number` of `case`, when `output` has been emitted."""

    def __init__(self, case: Case, output: tuple[int, ...], number: int) -> None:
        self._case = case
        self._output = output
        # The stride of the tape: the largest tree of the case, so that a step's place does not depend on its own tree.
        self._nodes = case.most_nodes
        self.chance = TapeChance(tape.coins(case.sampling, number, self._nodes), self._nodes)

    @property
    def is_drawn(self) -> bool:
        """Whether the draft's tokens are drawn from its law by coins; otherwise they are named by rank."""
        sampling = self._case.sampling
        return self._case.draft.has_law and not sampling.greedy and sampling.draws != "top-k"

    def law(self, logits: Array, path: tuple[int, ...]) -> Array:
        """The processed law after `path`, the tokens below the root."""
        case = self._case
        return processing.law(logits, case.sampling, case.stops, case.prompt, self._output + path)

    def laws(self, tree: Tree, logits: Array) -> Array:
        """The target's law after each node, float64 [nodes, vocabulary]."""
        return np.stack([self.law(logits[node], tree.tokens_to(node)[1:]) for node in range(len(tree))])

    def scores(self, tree: Tree, logits: Array) -> Array:
        """The processed logits of each node, whose arg-max greedy decoding takes: [nodes, vocabulary]."""
        case = self._case
        return np.stack(
            [
                processing.scores(
                    logits[node], case.sampling, case.stops, case.prompt, self._output + tree.tokens_to(node)[1:]
                )
                for node in range(len(tree))
            ]
        )

    def masks(self, tree: Tree) -> tuple[Array, Array] | tuple[None, None]:
        """The legal tokens after each node [nodes, vocabulary], and whether it is refused [nodes]; None: no grammar."""
        grammar, ends = self._case.sampling.grammar, self._case.stops.eos
        if grammar is None:
            return None, None
        paths = [self._output + tree.tokens_to(node)[1:] for node in range(len(tree))]
        legal_tokens = [legal_after(grammar, ends, path) for path in paths]
        return frozen([legal.tokens for legal in legal_tokens]), frozen([legal.refused for legal in legal_tokens])

    def siblings(self, children: tuple[int, ...], logits: Array, path: tuple[int, ...]) -> tuple[list[int], Array]:
        """The tokens of `children`, drawn in row order, and the law that the verifier is given for each.

        Where the law has fewer tokens than there are children, the other children get the best remaining tokens by
        logit, and one-hot proposals.

        Args:
            children: Sibling nodes.
            logits: The draft's scores over the target's vocabulary, -inf where it cannot name a token.
            path: Tokens below the root, down to the siblings' parent.

        Returns:
            A token for each of `children`, and proposals [len(children), vocabulary].
        """
        law = self.law(logits, path).tolist()
        drawn_tokens = tree_growth.siblings(self.chance, self._case.sampling.draws, [law] * len(children), children)
        used_tokens, tokens, proposals = set(drawn_tokens.values()), [], []
        for child in children:
            token = drawn_tokens.get(child)
            if token is None:
                # The lowest id among equal logits.
                token = min(
                    (-logits[candidate], candidate) for candidate in range(len(law)) if candidate not in used_tokens
                )[1]
                used_tokens.add(token)
            tokens.append(token)
            proposals.append(law if child in drawn_tokens else one_hot((token,), len(law))[0])
        return tokens, np.array(proposals).reshape(len(children), len(law))

    def accept(self, tree: Tree, law: Array, proposal: Array) -> Accepted:
        """Verify by the case's rule, then draw the token after the path."""
        sampling = self._case.sampling
        target_rows, draft_rows = law.tolist(), proposal.tolist()
        # Python floats, because the rules run on lists of numbers of either arithmetic.
        path, weights = acceptance.verify(
            self.chance, sampling.rule, sampling.draws, tree, target_rows, draft_rows, self.is_drawn
        )
        bonus = self.chance.choose("bonus", 0, weights)
        return Accepted(
            path, bonus, tuple(tape.place(kind, node, self._nodes) for kind, node in self.chance.used_coins)
        )


def check_grammar(case: Case) -> None:
    """Raise Malformed if the grammar of `case` is not of its dialect, or leaves no first token."""
    if case.sampling.grammar is not None:
        with under("sampling.grammar"):
            if legal_after(replace(case.sampling.grammar, markers=(), budget=0), case.stops.eos, ()).is_closed:
                raise Malformed("", "no token of the vocabulary begins a text of the language")


def one_hot_proposal(tree: Tree, vocab: int) -> Array:
    """The proposal of a tree whose tokens were not drawn: one-hot rows [nodes, vocabulary]."""
    return one_hot(tree.token, vocab)


def one_hot(tokens: tuple[int, ...], vocab: int) -> Array:
    """A one-hot row for each of `tokens`: [len(tokens), vocab]."""
    # Not `np.eye(vocab)[...]`: the square of a large vocabulary does not fit into memory.
    rows = np.zeros((len(tokens), vocab))
    rows[np.arange(len(tokens)), list(tokens)] = 1.0
    return rows
