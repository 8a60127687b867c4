"""The filling of a tree, level by level, by a draft with scores.

The kinds of draft differ in how they score a level: by a causal model, or by a head with or without rows of its own.
"""

from abc import ABC, abstractmethod
from collections.abc import Callable, Generator
from dataclasses import replace
from math import nan
from typing import NamedTuple, TypeAlias

import torch
from torch import Tensor

from specverify.backends.engine.captured.lanes import LaneModel, LaneRows
from specverify.backends.engine.draft.base import Proposal, truncate_proposal
from specverify.backends.engine.kv.base import KvCache
from specverify.backends.engine.kv.recurrent import commit_states
from specverify.backends.engine.model.axes import Axes
from specverify.backends.engine.reach import Reach
from specverify.backends.engine.sampling.step import StepSampling
from specverify.backends.engine.step_seams import StepSeams
from specverify.backends.engine.tree_growth import Candidates
from specverify.backends.engine.uploads import upload
from specverify.reference.draft_trees import Dispatch, DraftTree, Expansion, Stopped
from specverify.reference.tree import RankTree, Shape, Tree


class Level(NamedTuple):
    """A level of a tree that the draft has to score; the fields are the arguments of `TreeFilling.feed`."""

    nodes: list[int]
    token: list[int]
    root: int


Levels: TypeAlias = Generator[Level, Tensor, Proposal]
"""The filling of a tree: it yields each level, is sent the scores of its nodes, and returns the proposal."""


def run_levels(levels: Levels, feed: Callable[[list[int], list[int], int], Tensor]) -> Proposal:
    """The proposal of `levels`, each of them scored by `feed`."""
    try:
        level = next(levels)
        while True:
            level = levels.send(feed(*level))
    except StopIteration as end:
        proposal: Proposal = end.value
        return proposal


class TreeFilling(ABC):
    """Fills a tree with the best tokens, or a tree of fixed shape with tokens drawn from the draft's law.

    Attributes:
        plan: The tree that is filled at every step, static or dynamic, or the table of trees by batch size.
        shape: The tree of this step; while a dynamic tree grows, all its candidates.
        named_ids: int64 [draft vocabulary]; the target id of each draft id.
        vocab_size: Number of target ids.
        slots: The column of each fed node of `shape`.
        calls: Number of forwards so far.
        batch_size: Tells how many requests step together now.
        batches: The batch size of each proposal so far.
    """

    def __init__(self, plan: DraftTree, named_ids: Tensor, vocab_size: int, seams: StepSeams) -> None:
        self.plan = plan
        self.shape: Shape = RankTree((0,), (0,))
        self.named_ids = named_ids
        self.vocab_size = vocab_size
        self.seams = seams
        self.slots: dict[int, int] = {}
        self.calls = 0
        self.batch_size: Callable[[], int] = lambda: 1
        self.batches: list[int] = []

    @abstractmethod
    def feed(self, level: list[int], token: list[int], root: int) -> Tensor:
        """Score the nodes of `level`: [len(level), draft vocabulary].

        Args:
            level: Nodes of one depth whose parents are the root, or were fed.
            token: The token of each node; those of `level` and above are named.
            root: The position and the column of the root's row, where the draft has rows.
        """

    def filling(
        self,
        tokens: list[int],
        scores: Tensor,
        root: int,
        chance: StepSampling | None,
        fixed: tuple[int, ...] = (),
    ) -> Levels:
        """Propose the tree under `tokens[-1]`; whoever runs the generator scores the levels that it yields.

        Args:
            tokens: Prompt and output so far.
            scores: The root's scores, [1, draft vocabulary].
            root: The position and the column of the root's row.
            chance: The step's sampling, which may draw tokens; None for a greedy request.
            fixed: The token of each node, in place of the best and of draws; empty to name them.
        """
        self.slots = {}
        if isinstance(self.plan, Expansion):
            return (yield from self.grow(self.plan, tokens, scores, root, chance))
        self.batches.append(self.batch_size())
        stop = self.seams.trees.path_ends(self.plan) if isinstance(self.plan, Stopped) else None
        self.shape = shape = self._shape_of_step(self.plan)
        token = [tokens[-1]] * len(shape)
        draft_id = [0] * len(shape)
        logits = torch.full((len(shape), scores.shape[1]), torch.nan, dtype=scores.dtype, device=scores.device)
        proposal: dict[int, Tensor] = {}
        confidences: dict[int, float] = {}
        level = [0]
        rows = scores
        while level:
            logits[upload(torch.tensor(level), logits.device)] = rows
            for node in level:
                confidence = self.confidence_at(node, token)
                if confidence is not None:
                    confidences[node] = confidence
                if stop is not None and stop.ends_before(node, logits[node], confidence or 0.0):
                    continue
                below = list(shape.children[node])
                if fixed:
                    child_tokens = [fixed[child] for child in below]
                    ids = self._draft_ids(child_tokens)
                elif chance is not None and chance.draws:
                    target_scores = self._over_target(logits[node])
                    child_tokens, child_laws = chance.draw_children(shape, token, node, target_scores)
                    # Tokens are drawn over the target's vocabulary; the trace also wants their draft ids.
                    ids = self._draft_ids(child_tokens)
                    proposal |= dict(zip(below, child_laws, strict=True))
                else:
                    ranks = [shape.rank[child] for child in below]
                    ids, child_tokens = self.seams.trees.name_children(logits[node], ranks, self.named_ids)
                for child, child_id, child_token in zip(below, ids, child_tokens, strict=True):
                    draft_id[child] = child_id
                    token[child] = child_token
                if stop is not None:
                    stop.add(node, below, logits[node], ids, confidence or 0.0)
                if chance is not None and not chance.draws and below:
                    certain_laws = chance.proposals(shape, token, node, self._over_target(logits[node]))
                    proposal |= dict(zip(below, certain_laws, strict=True))
            # Only nodes with children need scores, so leaves are not fed.
            level = [child for node in level for child in shape.children[node] if shape.children[child]]
            if stop is not None:
                level = [node for node in level if stop.goes_on(node)]
            if level:
                rows = yield Level(level, token, root)
        # Nobody reads row 0, the root's, and the root has no proposal: any node's law fills such rows.
        filler = next(iter(proposal.values()), None)
        node_laws = None if filler is None else torch.stack([proposal.get(node, filler) for node in range(len(shape))])
        filled = Proposal(Tree(shape.parent, tuple(token)), logits, tuple(draft_id), node_laws)
        if confidences:
            by_node = [confidences.get(node, nan) for node in range(len(shape))]
            filled = replace(filled, confidence=torch.tensor(by_node, dtype=torch.float64))
        return filled if stop is None else self.without_ended_paths(filled, sorted(stop.scores))

    def confidence_at(self, node: int, token: list[int]) -> float | None:
        """The log-probability that a confidence head gives the children of `node`; None without such a head."""
        return None

    def _shape_of_step(self, plan: RankTree | Dispatch | Stopped) -> RankTree:
        """The static tree of this step: that of its batch, or the one that is filled while the draft is confident."""
        if isinstance(plan, Dispatch):
            return self.seams.trees.dispatch(plan, self.batches)
        return plan.tree if isinstance(plan, Stopped) else plan

    def without_ended_paths(self, proposal: Proposal, nodes: list[int]) -> Proposal:
        """`proposal` with `nodes` alone, root first; the other nodes were left out before they had a token."""
        if len(nodes) == len(proposal.tree):
            return proposal
        row = {node: i for i, node in enumerate(nodes)}
        cut = truncate_proposal(proposal, nodes)
        # From here on nodes are rows of the tree: `settle` is told which of them were accepted.
        self.shape = Shape(cut.tree.parent)
        self.slots = {row[node]: slot for node, slot in self.slots.items() if node in row}
        return cut

    def grow(
        self, plan: Expansion, tokens: list[int], scores: Tensor, root: int, chance: StepSampling | None
    ) -> Levels:
        """Propose the dynamic tree `plan` under `tokens[-1]`; the other arguments are those of `filling`."""
        trees = self.seams.trees
        zero = scores.new_zeros((), dtype=torch.float64 if scores.dtype == torch.float64 else torch.float32)
        candidates = Candidates([0], [tokens[-1]], [0], [zero], {})
        level = [0]
        rows = scores
        numbers = [0]
        for depth in range(1, plan.depth + 1):
            first = len(candidates.parent)
            for node, row in zip(level, rows, strict=True):
                candidates.logits[node] = row
                ids, candidate_tokens = trees.name_children(row, list(range(plan.top_k)), self.named_ids)
                candidates.parent += [node] * len(ids)
                candidates.token += candidate_tokens
                candidates.draft_id += ids
                candidates.scores += [*trees.cumulate(candidates.scores[node], row, ids, candidate_tokens)]
            level = [first + place for place in trees.frontier(torch.stack(candidates.scores[first:]), plan.top_k)]
            numbers += level
            self.shape = Shape(tuple(candidates.parent))
            if depth < plan.depth:
                rows = yield Level(level, candidates.token, root)
        if plan.rerank:
            numbers = [0, *trees.rerank(torch.stack(candidates.scores), candidates.parent, plan.total - 1)]
        return self._cut_proposal(candidates, numbers, chance)

    def _cut_proposal(self, candidates: Candidates, numbers: list[int], chance: StepSampling | None) -> Proposal:
        """The proposal of the candidates `numbers`, root first, in this order of rows."""
        row = {number: i for i, number in enumerate(numbers)}
        # From here on nodes are rows of the tree: `settle` is told which of them were accepted.
        self.shape = shape = Shape(tuple(row[candidates.parent[number]] for number in numbers))
        self.slots = {row[number]: slot for number, slot in self.slots.items() if number in row}
        token = [candidates.token[number] for number in numbers]
        unscored = torch.full_like(candidates.logits[0], torch.nan)
        logits = torch.stack([candidates.logits.get(number, unscored) for number in numbers])
        node_laws = None
        if chance is not None:
            proposal: dict[int, Tensor] = {}
            for node in range(len(numbers)):
                if shape.children[node]:
                    certain_laws = chance.proposals(shape, token, node, self._over_target(logits[node]))
                    proposal |= dict(zip(shape.children[node], certain_laws, strict=True))
            node_laws = torch.stack([proposal.get(node, proposal[1]) for node in range(len(numbers))])
        return Proposal(
            Tree(shape.parent, tuple(token)),
            logits,
            tuple(candidates.draft_id[number] for number in numbers),
            node_laws,
        )

    def _draft_ids(self, tokens: list[int]) -> list[int]:
        """The draft id of each target id."""
        return [int((self.named_ids == token).nonzero()[0]) for token in tokens]

    def _over_target(self, logits: Tensor) -> Tensor:
        """Draft scores spread over the target's vocabulary; -inf for a token that the draft's vocabulary lacks."""
        target_scores = torch.full((self.vocab_size,), -torch.inf, dtype=logits.dtype, device=logits.device)
        target_scores[upload(self.named_ids, logits.device)] = logits
        return target_scores


class CachedTreeFilling(TreeFilling):
    """A filling whose draft feeds inner nodes as open rows of a KV cache.

    Only nodes with children are fed; leaves need no scores. A dynamic tree is fed as its candidates are expanded; the
    rows of candidates that the tree does not hold are dropped with those of rejected ones.

    Attributes:
        cache: The draft's cache; between steps it holds rows of emitted tokens alone.
        images: The images of the prompt as the draft reads them; None for one that reads tokens alone.
    """

    images: Axes | None = None

    def __init__(self, plan: DraftTree, named_ids: Tensor, vocab_size: int, seams: StepSeams, cache: KvCache) -> None:
        super().__init__(plan, named_ids, vocab_size, seams)
        self.cache: KvCache = cache

    @abstractmethod
    def levels(self, tokens: list[int], chance: StepSampling | None = None, hidden: Tensor | None = None) -> Levels:
        """The filling that `Draft.propose` runs, with the same arguments; levels are left to the caller."""

    @property
    @abstractmethod
    def lane_model(self) -> LaneModel:
        """The model that scores levels, those of other requests among them."""

    @abstractmethod
    def lane(self, level: Level) -> LaneRows:
        """The rows of `level` in a forward of several requests, which counts as a forward of this draft."""

    @abstractmethod
    def level_scores(self, level: Level, outputs: Tensor) -> Tensor:
        """The scores [R, draft vocabulary] of `level`, from the outputs of its rows in a forward of `lane_model`."""

    def branch(self, level: list[int], root: int, reaches: list[Reach]) -> tuple[Tensor, list[Tensor]]:
        """Positions int64 [R] and, for each reach, the mask bool [R, C] of the nodes of `level`, about to be opened."""
        start = self.cache.length + self.cache.rows
        for i, node in enumerate(level):
            self.slots[node] = start + i
        positions, branch_columns = self.seams.branch_rows(self.shape, level, self.slots, root)
        visible = torch.zeros(len(level), start + len(level), dtype=torch.bool)
        visible[:, : root + 1] = True  # the committed tokens and the root
        for row, columns in enumerate(branch_columns):
            visible[row, columns] = True
        # Positions of all columns: a node's position follows from its depth, not from the column it was fed to.
        place = torch.tensor(
            [
                *range(root + 1),
                *[root + self.shape.depth[node] for node in sorted(self.slots, key=self.slots.__getitem__)],
            ]
        )
        node_positions = torch.tensor([root + self.shape.depth[node] for node in level])
        return torch.tensor(positions), [reach.within(visible, node_positions, place) for reach in reaches]


def branch_rows(shape: Shape, level: list[int], slots: dict[int, int], root: int) -> tuple[list[int], list[list[int]]]:
    """Return the positions of the nodes of `level`, and for each node its own column and those of its fed ancestors."""
    positions = [root + shape.depth[node] for node in level]
    return positions, [[slots[ancestor] for ancestor in shape.path(node)[1:]] for node in level]


def roll_back(cache: KvCache, fed: list[int]) -> None:
    """Keep the open rows `fed`, in the order of their positions, and no other."""
    cache.commit(fed)
    commit_states(cache, fed)
