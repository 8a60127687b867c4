"""The draft that runs a small causal model with its own KV cache.

The tree is expanded level by level. After verification, the KV of rejected rows is rolled back.
"""

import torch
from torch import Tensor

from backends.engine.draft.base import Opening, Proposal, opens
from backends.engine.kv.base import KvCache
from backends.engine.model.causal_lm import CausalLm, Rows
from backends.engine.sampling.step import StepSampling
from backends.engine.step_seams import StepSeams
from reference.draft import LanguageModel
from reference.draft.hidden import HiddenStates
from reference.tree import RankTree, Tree


class ModelDraft:
    """Fills a tree of fixed shape with the model's best tokens, or with tokens drawn from its law.

    Between steps `cache` holds the KV of emitted tokens only. `propose` first feeds the emitted tokens that the cache
    lacks, the root among them, then runs the inner nodes of the tree as open rows. Leaves are never fed. So if a leaf
    was accepted, its token is among the tokens that the next `propose` feeds. With `refeed` no row of a block is kept:
    all accepted tokens are fed again.
    """

    reads: HiddenStates | None = None

    def __init__(
        self,
        lm: CausalLm,
        shape: RankTree,
        vocabulary: tuple[int, ...],
        seams: StepSeams,
        cache: KvCache,
        refeed: bool = False,
    ) -> None:
        self.causal_lm = lm
        self.shape = shape
        self.named_ids = torch.tensor(vocabulary or range(lm.model.config.vocab_size))
        self._seams = seams
        self._refeed = refeed
        self.root_scores: Tensor | None = None
        self._slots: dict[int, int] = {}
        self.cache: KvCache = cache
        self.calls = 0

    def propose(self, tokens: list[int], chance: StepSampling | None = None, hidden: Tensor | None = None) -> Proposal:
        """Propose the tree under `tokens[-1]`, with the best tokens, or with drawn tokens if `chance` draws."""
        scores = self.catch_up(tokens)
        self._slots = {}
        shape = self.shape
        token, draft_id = [tokens[-1]] * len(shape), [0] * len(shape)
        logits = torch.full((len(shape), scores.shape[1]), torch.nan, dtype=scores.dtype, device=scores.device)
        proposal: dict[int, Tensor] = {}
        level, rows = [0], scores
        while level:
            logits[torch.tensor(level, device=logits.device)] = rows
            for node in level:
                below = list(shape.children[node])
                if chance is not None and chance.draws:
                    scored = self._over_target(logits[node])
                    named, offered = chance.draw_children(shape, token, node, scored)
                    # Tokens are drawn over the target's vocabulary; the trace also wants their draft ids.
                    ids = [int((self.named_ids == one).nonzero()[0]) for one in named]
                    proposal |= dict(zip(below, offered, strict=True))
                else:
                    ranks = [shape.rank[child] for child in below]
                    ids, named = self._seams.name_children(logits[node], ranks, self.named_ids)
                for child, one_id, one_token in zip(below, ids, named, strict=True):
                    draft_id[child], token[child] = one_id, one_token
                if chance is not None and not chance.draws and below:
                    surely = chance.proposals(shape, token, node, self._over_target(logits[node]))
                    proposal |= dict(zip(below, surely, strict=True))
            # Only nodes with children need scores, so leaves are not fed.
            level = [child for node in level for child in shape.children[node] if shape.children[child]]
            if level:
                rows = self._feed(level, token, len(tokens) - 1)
        # Nobody reads row 0, the root's, and the root has no proposal: node 1's law fills the row.
        handed = torch.stack([proposal.get(node, proposal[1]) for node in range(len(shape))]) if proposal else None
        return Proposal(Tree(shape.parent, tuple(token)), logits, tuple(draft_id), handed)

    def _over_target(self, logits: Tensor) -> Tensor:
        """Draft scores spread over the target's vocabulary; -inf for a token that the draft's vocabulary lacks."""
        wide = torch.full(
            (self.causal_lm.model.config.vocab_size,), -torch.inf, dtype=logits.dtype, device=logits.device
        )
        wide[self.named_ids.to(logits.device)] = logits
        return wide

    def settle(self, kept: list[int]) -> None:
        """Keep the KV of the kept rows that were fed, and drop the other open rows.

        Some rules treat twins (siblings with the same token) as one candidate. A kept node then need not be the parent
        of the next kept node: it may be a leaf whose twin was fed. So the path to the last kept node is used in place
        of `kept`: its nodes have the same tokens, and its inner nodes were fed.
        """
        path = self.shape.path(kept[-1])
        fed = [self._slots[node] - self.cache.length for node in path if node in self._slots]
        self._seams.roll_back(self.cache, [] if self._refeed else fed)

    def resume(self, cache: KvCache | None) -> None:
        """Continue with `cache`; the next `propose` feeds all tokens that it lacks."""
        assert cache is not None
        self.cache, self.root_scores = cache, None

    def abandon(self) -> None:
        """Close the open rows; the KV of the root stays, and so do its scores, for the next `propose`."""
        self.cache.commit([])

    def catch_up(self, tokens: list[int]) -> Tensor:
        """Feed the tokens that the cache lacks, the root last; return the root's scores [1, draft vocabulary]."""
        start = self.cache.length
        if start == len(tokens):  # the root was fed for a proposal that was abandoned
            if self.root_scores is not None:
                return self.root_scores
            # A forked cache, or one taken over at a switch, holds the root's KV without its scores: feed it again.
            self.cache.crop(start - 1)
            start -= 1
        # A ring admits few open rows at once, so earlier tokens go by prefill, in blocks that fit.
        last = max(start, len(tokens) - (self.cache.most_rows or len(tokens)))
        if last > start:
            self.calls += 1
            self.causal_lm.prefill(
                tuple(tokens[start:last]), self.cache, self._seams.draft_attend, 0, self._seams.kv.single
            )
        self.calls += 1
        scores = self.causal_lm.append(
            tuple(tokens[last:]), self.cache, self._seams.draft_attend, 1, self._seams.kv.single
        )
        self.root_scores = scores[:, self.named_ids.to(scores.device)]
        return self.root_scores

    def _feed(self, level: list[int], token: list[int], root: int) -> Tensor:
        """Run the nodes of `level` as open rows; the root has position and column `root`."""
        start = self.cache.length + self.cache.rows
        for at, node in enumerate(level):
            self._slots[node] = start + at
        positions, seen = self._seams.branch_rows(self.shape, level, self._slots, root)
        visible = torch.zeros(len(level), start + len(level), dtype=torch.bool)
        visible[:, : root + 1] = True  # the committed tokens and the root
        for row, columns in enumerate(seen):
            visible[row, columns] = True
        # Positions of all columns: a node's position follows from its depth, not from the column it was fed to.
        place = torch.tensor(
            [
                *range(root + 1),
                *[root + self.shape.depth[node] for node in sorted(self._slots, key=self._slots.__getitem__)],
            ]
        )
        here = torch.tensor([root + self.shape.depth[node] for node in level])
        masks = [reach.within(visible, here, place) for reach in self.causal_lm.reaches]
        inputs = torch.tensor([token[node] for node in level])
        self.calls += 1
        rows = Rows(inputs, torch.tensor(positions), masks, self.cache)
        (logits,) = self.causal_lm.forward([rows], self._seams.draft_attend, lanes=self._seams.kv.single)
        return logits[:, self.named_ids.to(logits.device)]


def name_children(logits: Tensor, ranks: list[int], vocabulary: Tensor) -> tuple[list[int], list[int]]:
    """Return the draft id and the target id of the token at each rank; equal logits go to the lowest id.

    Args:
        logits: [draft vocabulary].
        ranks: Ranks of tokens by logit; 0 is the best.
        vocabulary: int64 [draft vocabulary]; the target id of each draft id (EAGLE-3's d2t, as absolute ids).
    """
    if not ranks:
        return [], []
    order = torch.sort(logits, descending=True, stable=True).indices.cpu()  # stable: equal logits stay in order of ids
    ids = order[torch.tensor(ranks)]
    return ids.tolist(), vocabulary[ids].tolist()


def branch_rows(
    shape: RankTree, level: list[int], slots: dict[int, int], root: int
) -> tuple[list[int], list[list[int]]]:
    """Return the positions of the nodes of `level`, and for each node its own column and those of its fed ancestors."""
    positions = [root + shape.depth[node] for node in level]
    return positions, [[slots[up] for up in shape.path(node)[1:]] for node in level]


def roll_back(cache: KvCache, fed: list[int]) -> None:
    """Keep the open rows `fed`, in the order of their positions, and no other."""
    cache.commit(fed)


@opens(LanguageModel.TAG)
def opened(opening: Opening) -> ModelDraft:
    """Open the draft's model on the cache that the request has leased for it."""
    draft = opening.case.draft
    assert isinstance(draft, LanguageModel)
    assert opening.model is not None
    assert opening.cache is not None
    refeed = opening.case.layout.draft_sync == "refeed"
    return ModelDraft(opening.model, draft.shape, draft.vocabulary, opening.seams, opening.cache, refeed)
