"""The trees of a case for engines whose drafter is an interface.

An engine that takes any drafter is given the draft of the case through it, so that its verification and its commit see
the trees that are drawn: a script, an n-gram trie, or a small model that is run from scratch for every node.
"""

from collections.abc import Callable, Sequence
from dataclasses import dataclass

import torch
from torch import Tensor

from specverify.backends.adapt.models import transformers_model
from specverify.backends.base import Unsupported
from specverify.backends.engine.composition import SEAMS
from specverify.backends.engine.draft import Opening, open_draft
from specverify.reference.case import Case
from specverify.reference.draft.hidden import HeadInput
from specverify.reference.tree import RankTree, Tree

DRAFTS = ("scripted", "ngram", "model")
"""The kinds of draft that `TreeDraft` proposes."""


@dataclass(frozen=True)
class Proposal:
    """A proposed tree with the scores and the laws behind it.

    Attributes:
        tree: The tree, node 0 the pending root.
        logits: [nodes, draft vocabulary]; NaN for nodes without children. None without a model.
        draft_ids: Each node's id in the draft's vocabulary, 0 for the root. None without a model.
        proposal: [nodes, vocabulary]; the law from which each node's token was drawn, before earlier siblings were
            removed; row 0 is not used. None where no token was drawn.
        offered_law: [nodes, vocabulary]; the law from which each node's token was drawn, given its earlier siblings.
            None where no token was drawn.
        given: The rows of committed tokens that a head ran for this proposal; None without a head.
    """

    tree: Tree
    logits: Tensor | None = None
    draft_ids: tuple[int, ...] | None = None
    proposal: Tensor | None = None
    offered_law: Tensor | None = None
    given: HeadInput | None = None


class TreeDraft:
    """The draft of a case, asked for one tree a step.

    Args:
        case: The case.
        law: From scores [vocabulary], -inf for tokens that the draft cannot name, to the processed law [vocabulary] of
            a case that draws tokens from its draft; None for an engine whose cases draw none.

    Raises:
        Unsupported: for a kind of draft outside DRAFTS.
    """

    def __init__(self, case: Case, law: Callable[[Tensor], Tensor] | None = None) -> None:
        if case.draft.TAG not in DRAFTS:
            raise Unsupported(f"a {case.draft.TAG} draft; known are {', '.join(DRAFTS)}")
        self._case = case
        self._law = law
        self._without_model = open_draft(Opening(case, None, None, SEAMS)) if case.draft.model is None else None

    @property
    def most_nodes(self) -> int:
        """The number of nodes of the largest tree, the root included."""
        return self._case.most_nodes

    def propose(self, tokens: list[int], coins: torch.Generator | None = None) -> Proposal:
        """The tree under `tokens[-1]`; where the case draws siblings from the draft's law, `coins` draws them."""
        if self._without_model is None:
            return self._fill_tree(tokens, coins)
        tree = self._without_model.propose(tokens).tree
        self._without_model.settle([])
        return Proposal(tree)

    def _fill_tree(self, tokens: list[int], coins: torch.Generator | None) -> Proposal:
        """The static tree of a model draft, with its best tokens or with tokens drawn from its law."""
        draft = self._case.draft
        sampling = self._case.sampling
        size = self._case.model.vocab_size
        (shape,) = draft.shapes
        assert draft.model is not None
        assert isinstance(shape, RankTree)
        network = transformers_model(draft.model, self._case.dtype, "draft")
        ids = torch.tensor(draft.vocabulary or range(size))
        draws = not sampling.greedy and sampling.draws != "top-k"
        token = [tokens[-1]] * len(shape)
        logits = torch.full((len(shape), size), torch.nan)
        proposal, offered_law = torch.zeros(len(shape), size), torch.zeros(len(shape), size)
        for node in sorted(range(len(shape)), key=lambda index: shape.depth[index]):
            below = shape.children[node]
            if node and not below:
                continue
            above = [*tokens[:-1], *[token[up] for up in shape.path(node)]]
            with torch.no_grad():
                scores = network(torch.tensor([above]), use_cache=False).logits[0, -1].float()
            logits[node] = torch.full((size,), -torch.inf).index_copy_(0, ids, scores[ids])
            if draws:
                assert coins is not None
                self._draw(below, logits[node], coins, token, proposal, offered_law)
            else:
                best = torch.sort(logits[node], descending=True, stable=True).indices
                for child in below:
                    token[child] = int(best[shape.rank[child]])
        draft_ids = (0, *(int((ids == token_id).nonzero()[0]) for token_id in token[1:]))
        laws = (proposal, offered_law) if draws else (None, None)
        return Proposal(Tree(shape.parent, tuple(token)), logits[:, ids], draft_ids, *laws)

    def _draw(
        self, below: Sequence[int], logits: Tensor, coins: torch.Generator, token: list[int], *laws: Tensor
    ) -> None:
        """Draw the children `below` of a node with these scores, and write their rows of the two laws.

        Children beyond the tokens that have a probability are the best remaining tokens, proposed with certainty.
        """
        assert self._law is not None
        proposal, offered_law = laws
        law = self._law(logits)
        remaining_law = law.clone()
        drawn_tokens: list[int] = []
        for child in below:
            if remaining_law.sum() > 0:
                proposal[child], offered_law[child] = law, remaining_law / remaining_law.sum()
                token[child] = int(torch.multinomial(remaining_law, 1, generator=coins))
            else:
                best = torch.sort(logits, descending=True, stable=True).indices.tolist()
                token[child] = next(candidate for candidate in best if candidate not in drawn_tokens)
                proposal[child, token[child]] = offered_law[child, token[child]] = 1.0
            drawn_tokens.append(token[child])
            if self._case.sampling.draws == "without-replacement":
                remaining_law[token[child]] = 0.0
