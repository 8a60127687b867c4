"""The draft that runs a small causal model with its own KV cache.

The tree is expanded level by level. After verification, the KV of rejected rows is rolled back.
"""

import torch
from torch import Tensor

from specverify.backends.engine.captured.lanes import LaneRows
from specverify.backends.engine.draft.base import Opening, Proposal, opens
from specverify.backends.engine.draft.filling import CachedTreeFilling, Level, Levels, run_levels
from specverify.backends.engine.kv.base import KvCache
from specverify.backends.engine.kv.recurrent import commit_states, crop_states
from specverify.backends.engine.model.axes import axes_of
from specverify.backends.engine.model.causal_lm import CausalLm, Rows
from specverify.backends.engine.sampling.step import StepSampling
from specverify.backends.engine.step_seams import StepSeams
from specverify.backends.engine.uploads import upload
from specverify.reference.draft import LanguageModel
from specverify.reference.draft.hidden import HiddenStates
from specverify.reference.draft_trees import DraftTree


class ModelDraft(CachedTreeFilling):
    """Fills a tree with the model's best tokens, or with tokens drawn from its law.

    Between steps `cache` holds the KV of emitted tokens only. `propose` first feeds the emitted tokens that the cache
    lacks, the root among them, then runs the inner nodes of the tree as open rows. Leaves are never fed. So if a leaf
    was accepted, its token is among the tokens that the next `propose` feeds. With `refeed` no row of a block is kept:
    all accepted tokens are fed again.
    """

    reads: HiddenStates | None = None

    def __init__(
        self,
        lm: CausalLm,
        plan: DraftTree,
        vocabulary: tuple[int, ...],
        seams: StepSeams,
        cache: KvCache,
        refeed: bool = False,
    ) -> None:
        vocab_size = lm.model.config.vocab_size
        super().__init__(plan, torch.tensor(vocabulary or range(vocab_size)), vocab_size, seams, cache)
        self.causal_lm = lm
        self._refeed = refeed
        self.root_scores: Tensor | None = None

    def propose(self, tokens: list[int], chance: StepSampling | None = None, hidden: Tensor | None = None) -> Proposal:
        """Propose the tree under `tokens[-1]`, with the best tokens, or with drawn tokens if `chance` draws."""
        return run_levels(self.levels(tokens, chance, hidden), self.feed)

    def levels(self, tokens: list[int], chance: StepSampling | None = None, hidden: Tensor | None = None) -> Levels:
        """See `CachedTreeFilling`."""
        return self.filling(tokens, self.catch_up(tokens), len(tokens) - 1, chance)

    def settle(self, rows: list[int]) -> None:
        """Keep the KV of the kept rows that were fed, and drop the other open rows.

        Some rules treat twins (siblings with the same token) as one candidate. A kept node then need not be the parent
        of the next kept node: it may be a leaf whose twin was fed. So the path to the last kept node is used in place
        of `rows`: its nodes have the same tokens, and its inner nodes were fed.
        """
        path = self.shape.path(rows[-1])
        fed = [self.slots[node] - self.cache.length for node in path if node in self.slots]
        self.seams.roll_back(self.cache, [] if self._refeed else fed)

    def resume(self, cache: KvCache | None) -> None:
        """Continue with `cache`; the next `propose` feeds all tokens that it lacks."""
        assert cache is not None
        self.cache = cache
        self.root_scores = None

    def abandon(self) -> None:
        """Close the open rows; the KV of the root stays, and so do its scores, for the next `propose`."""
        self.cache.commit([])
        commit_states(self.cache, [])

    def catch_up(self, tokens: list[int]) -> Tensor:
        """Feed the tokens that the cache lacks, the root last; return the root's scores [1, draft vocabulary]."""
        start = self.cache.length
        if start == len(tokens):  # the root was fed for a proposal that was abandoned
            if self.root_scores is not None:
                return self.root_scores
            # A forked cache, or one taken over at a switch, holds the root's KV without its scores: feed it again.
            self.cache.crop(start - 1)
            crop_states(self.cache, start - 1)
            start -= 1
        # A ring admits few open rows at once, so earlier tokens go by prefill, in blocks that fit.
        last = max(start, len(tokens) - (self.cache.most_rows or len(tokens)))
        if last > start:
            self.calls += 1
            self.causal_lm.prefill(
                tuple(tokens[start:last]),
                self.cache,
                self.seams.draft_attend,
                0,
                self.seams.kv.single,
                axes=self.images,
            )
        self.calls += 1
        scores = self.causal_lm.append(
            tuple(tokens[last:]), self.cache, self.seams.draft_attend, 1, self.seams.kv.single, axes=self.images
        )
        self.root_scores = scores[:, upload(self.named_ids, scores.device)]
        return self.root_scores

    def feed(self, level: list[int], token: list[int], root: int) -> Tensor:
        """See `TreeFilling`."""
        scored_level = Level(level, token, root)
        lane = self.lane(scored_level)
        rows = Rows(lane.tokens, lane.positions, lane.visible, lane.cache, lane.parents)
        # A watched forward is recorded, where the backend records any.
        (logits,) = self.causal_lm.forward([rows], self.seams.draft_attend, lanes=self.seams.kv.single, watch=[])
        return self.level_scores(scored_level, logits)

    @property
    def lane_model(self) -> CausalLm:
        """See `CachedTreeFilling`."""
        return self.causal_lm

    def lane(self, level: Level) -> LaneRows:
        """See `CachedTreeFilling`."""
        positions, masks = self.branch(level.nodes, level.root, self.causal_lm.reaches)
        inputs = torch.tensor([level.token[node] for node in level.nodes])
        self.calls += 1
        length = self.cache.length
        parents = [self.slots.get(self.shape.parent[node], length - 1) - length for node in level.nodes]
        return LaneRows(inputs, self.node_positions(positions), masks, self.cache, parents)

    def node_positions(self, positions: Tensor) -> Tensor:
        """The rotary positions of nodes at the columns `positions` of the text; they are text on all axes."""
        return positions if self.images is None else self.images.of_text(positions)[0]

    def level_scores(self, level: Level, outputs: Tensor) -> Tensor:
        """See `CachedTreeFilling`."""
        return outputs[:, upload(self.named_ids, outputs.device)]


@opens(LanguageModel.TAG)
def open_draft(opening: Opening) -> ModelDraft:
    """Open the draft's model on the cache that the request has leased for it."""
    draft = opening.case.draft
    assert isinstance(draft, LanguageModel)
    assert isinstance(opening.model, CausalLm)
    assert opening.cache is not None
    refeed = opening.case.layout.draft_sync == "refeed"
    model_draft = ModelDraft(opening.model, draft.shape, draft.vocabulary, opening.seams, opening.cache, refeed)
    drafting_model = opening.case.drafting_model
    assert drafting_model is not None
    model_draft.images = axes_of(drafting_model)
    return model_draft
