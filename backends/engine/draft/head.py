"""The draft that runs a head on the target's hidden states.

Row i of the head holds the token at i + 1 beside the target's state at i; where the first token has a row, beside its
own state, row i holds the token at i. After verification the rows of accepted nodes hold states of the head's own: they
are dropped and run again with the target's, or stay as the head's alignment says.
"""

import torch
from torch import Tensor

from specverify.backends.engine.captured.lanes import LaneRows
from specverify.backends.engine.draft.base import HeadRows, Opening, OwnRows, Proposal
from specverify.backends.engine.draft.filling import CachedTreeFilling, Level, Levels, run_levels
from specverify.backends.engine.kv.arena import StateNeeds
from specverify.backends.engine.kv.base import KvCache
from specverify.backends.engine.model.axes import axes_of
from specverify.backends.engine.model.head import HeadModel, SeenRows
from specverify.backends.engine.sampling.step import StepSampling
from specverify.backends.engine.step_seams import StepSeams
from specverify.backends.engine.uploads import upload
from specverify.reference.case import Case
from specverify.reference.draft.block import Block
from specverify.reference.draft.hidden import HiddenStates
from specverify.reference.draft.layer_head import LayerHead
from specverify.reference.draft.mtp import Mtp
from specverify.reference.tree import Tree


class HeadDraft(CachedTreeFilling, OwnRows):
    """Fills a tree with a head's best tokens, or with tokens drawn from its law.

    Between steps `cache` holds one row for each token whose state was known when the tree was proposed. `propose` first
    runs the rows that the cache lacks, the root's last, then the inner nodes of the tree as open rows.

    Attributes:
        head: The head.
        words: The words of the draft, its conventions among them.
        adopted: The number of rows that the cache held when this draft was opened on it.
        own_rows: The rows of the cache that hold states of the head's own, in ascending order.
        rows: The rows of committed tokens that were run since the last step was settled.
        root_output: The output of the root's row, [1, hidden]; None before it was run.
        outputs: The output of each node that was fed for this tree, and of the root, [hidden] each.
    """

    def __init__(self, head: HeadModel, draft: LayerHead, seams: StepSeams, cache: KvCache, chunk: int = 0) -> None:
        named_ids = torch.arange(head.vocab_size) if head.d2t is None else torch.arange(len(head.d2t)) + head.d2t.cpu()
        super().__init__(draft.shape, named_ids, head.vocab_size, seams, cache)
        self.head = head
        self.reads: HiddenStates | None = head.reads
        self.words = draft
        self.adopted = cache.length
        self.own_rows: list[int] = []
        self._fixed = draft.fixed
        self._chunk = chunk
        self.rows: list[HeadRows] = []
        self.root_output: Tensor | None = None
        self.outputs: dict[int, Tensor] = {}

    def propose(self, tokens: list[int], chance: StepSampling | None = None, hidden: Tensor | None = None) -> Proposal:
        """Propose the tree under `tokens[-1]`; the bare root where no token before it has a state."""
        return run_levels(self.levels(tokens, chance, hidden), self.feed)

    def levels(self, tokens: list[int], chance: StepSampling | None = None, hidden: Tensor | None = None) -> Levels:
        """See `CachedTreeFilling`."""
        assert hidden is not None
        if len(tokens) == 1:
            return Proposal(Tree((0,), (tokens[-1],)))
        output = self.catch_up(tokens, hidden)
        self.outputs = {0: output[0]}
        root = self.cache.length - 1
        proposal = yield from self.filling(tokens, self.child_scores(output, 0), root, chance, self._fixed)
        return Proposal(proposal.tree, proposal.logits, proposal.draft_ids, proposal.proposal, self.head_rows(hidden))

    def catch_up(self, tokens: list[int], hidden: Tensor) -> Tensor:
        """Run the rows that the cache lacks, in chunks of the layout's prefill; return the output of the root's row."""
        start, end = self.cache.length, len(tokens) - self.lead
        width = min(self._chunk or end, self.cache.most_rows or end)
        for first in range(start, end, width):
            last = min(first + width, end)
            rows = HeadRows(first, self.row_tokens(tokens, first, last), self.row_states(hidden, first, last))
            self.rows.append(rows)
            self.calls += 1
            self.root_output = self.append(rows)[-1:]
        # The root's row was run for a proposal that was abandoned, or just now.
        assert self.root_output is not None
        return self.root_output

    def append(self, rows: HeadRows) -> Tensor:
        """Run and commit `rows`; return their outputs, [rows, hidden]."""
        states = self.head.of_target(rows.hidden)
        attend, lanes = self.seams.draft_attend, self.seams.kv.single
        return self.head.append(rows.tokens, states, self.cache, attend, lanes, self.seen_rows(rows))

    def seen_rows(self, rows: HeadRows) -> SeenRows | None:
        """The images as `rows` see them: row r has the position of column r, and holds the token `lead` columns on."""
        if self.images is None:
            return None
        numbers = torch.arange(rows.first, rows.first + len(rows.tokens))
        axes = self.images.of_prompt(numbers) if self.words.layer.sections else None
        return SeenRows(axes, self.images.images_at(numbers + self.lead))

    def node_positions(self, positions: Tensor) -> Tensor:
        """The rotary positions of nodes whose rows would have the numbers `positions`; they are text on all axes."""
        if self.images is None or not self.words.layer.sections:
            return positions
        return self.images.of_text(positions)[0]

    @property
    def lead(self) -> int:
        """The positions by which a row's token is ahead of the row's number."""
        return 0 if self.words.fuses_first else 1

    def row_tokens(self, tokens: list[int], first: int, last: int) -> list[int]:
        """The tokens of the rows `first` to `last` (exclusive): each is the token after the row's state."""
        return tokens[first + self.lead : last + self.lead]

    def row_states(self, hidden: Tensor, first: int, last: int) -> Tensor:
        """The target's states of the rows `first` to `last` (exclusive), of `hidden`, those of all tokens."""
        if not self.words.fuses_first:
            return hidden[first:last]
        return hidden[upload(torch.arange(first - 1, last - 1).clamp(min=0), hidden.device)]

    def node_states(self, level: list[int]) -> Tensor:
        """The states beside the nodes of `level`, [R, hidden]: made of the outputs of their parents' rows."""
        return self.head.feed_back(torch.stack([self.outputs[self.shape.parent[node]] for node in level]))

    def feed(self, level: list[int], token: list[int], root: int) -> Tensor:
        """See `TreeFilling`."""
        scored_level = Level(level, token, root)
        lane = self.lane(scored_level)
        (outputs,) = self.head.run_lanes([lane], self.seams.draft_attend, self.seams.kv.single)
        return self.level_scores(scored_level, outputs)

    @property
    def lane_model(self) -> HeadModel:
        """See `CachedTreeFilling`."""
        return self.head

    def lane(self, level: Level) -> LaneRows:
        """See `CachedTreeFilling`."""
        positions, masks = self.branch(level.nodes, level.root, self.head.reaches)
        inputs = torch.tensor([level.token[node] for node in level.nodes])
        states = self.node_states(level.nodes)
        self.calls += 1
        return LaneRows(inputs, self.node_positions(positions), masks, self.cache, hidden_states=states[:, None])

    def level_scores(self, level: Level, outputs: Tensor) -> Tensor:
        """See `CachedTreeFilling`; the output of a row is that of the last layer."""
        last = outputs[:, -1]
        self.outputs |= dict(zip(level.nodes, last, strict=True))
        return self.child_scores(last, self.shape.depth[level.nodes[0]])

    def child_scores(self, outputs: Tensor, depth: int) -> Tensor:
        """The scores [R, draft vocabulary] of the children of nodes at `depth` with these outputs [R, hidden]."""
        return self.head.score(outputs)

    def settle(self, rows: list[int]) -> None:
        """Drop the rows of the tree that the alignment drops; the next `propose` runs those of tokens without a row."""
        kept_rows = self.rows_to_keep(rows)
        self.own_rows += range(self.cache.length, self.cache.length + len(kept_rows))
        self.seams.roll_back(self.cache, kept_rows)
        self.rows = []
        self.root_output = None

    def rows_to_keep(self, rows: list[int]) -> list[int]:
        """The open rows that stay once the nodes `rows` were accepted; they hold states of the head.

        With the alignment `last`, those of accepted nodes that were run. Of twins (siblings with the same token) the
        second may be accepted and the first run: the path to the last node is used in place of `rows`.
        """
        return self.run_rows(rows[-1]) if self.words.alignment == "last" else []

    def run_rows(self, node: int) -> list[int]:
        """The open rows of the nodes on the path to `node` that were run."""
        return [
            self.slots[ancestor] - self.cache.length for ancestor in self.shape.path(node) if ancestor in self.slots
        ]

    def follow(self, predecessor: OwnRows) -> None:
        """See `OwnRows`."""
        self.own_rows = [row for row in predecessor.own_rows if row < self.cache.length]

    def resume(self, cache: KvCache | None) -> None:
        """Continue with `cache`; the next `propose` runs all rows that it lacks."""
        assert cache is not None
        self.cache = cache
        self.adopted = cache.length
        self.own_rows = []
        self.rows = []
        self.root_output = None

    def abandon(self) -> None:
        """Close the open rows; the rows of committed tokens stay, and so does the root's output."""
        self.cache.commit([])

    def head_rows(self, hidden: Tensor) -> HeadRows:
        """The rows that were run since the last step was settled, as one."""
        first = self.rows[0].first if self.rows else self.cache.length
        tokens = [token for rows in self.rows for token in rows.tokens]
        states = torch.cat([hidden[:0], *(rows.hidden for rows in self.rows)])
        return HeadRows(first, tokens, states, self.adopted, tuple(self.own_rows))


def open_head(opening: Opening, kind: type[HeadDraft] = HeadDraft) -> HeadDraft:
    """Open a head, as a draft of `kind`, on the cache that the request has leased for it."""
    draft = opening.case.draft
    assert isinstance(draft, LayerHead)
    assert isinstance(opening.model, HeadModel)
    assert opening.cache is not None
    head_draft = kind(opening.model, draft, opening.seams, opening.cache, opening.case.layout.prefill_chunk)
    head_draft.images = axes_of(opening.case.model) if draft.sees_images else None
    return head_draft


def state_needs(case: Case, hidden_size: int) -> StateNeeds | None:
    """The hidden states that the draft of `case` needs of pages; None for a draft that reads none."""
    draft = case.draft
    if draft.reads is None:
        return None
    fuses_first = isinstance(draft, LayerHead) and draft.fuses_first
    # Later MTP modules go on from outputs of the rows before, which follow from states before the end of the pages.
    starts_behind_rows = not isinstance(draft, Mtp) or draft.count == 1
    width = draft.reads.parts * hidden_size
    return StateNeeds(draft.reads, width, fuses_first, starts_behind_rows, isinstance(draft, Block))
