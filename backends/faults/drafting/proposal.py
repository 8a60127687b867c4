"""Faults of a draft while it proposes a tree, and of its quantised weights."""

from dataclasses import replace

import torch
from torch import Tensor

from specverify.backends.engine.columns import AttentionInputs
from specverify.backends.engine.draft.base import Proposal
from specverify.backends.engine.draft.filling import Levels
from specverify.backends.engine.draft.language_model import ModelDraft
from specverify.backends.engine.draft.ngram import Followers, NgramDraft
from specverify.backends.engine.kv.arena import Arena
from specverify.backends.engine.kv.seams import KvSeams
from specverify.backends.engine.reach import Reach
from specverify.backends.engine.request import Request
from specverify.backends.engine.sampling.step import StepSampling
from specverify.backends.engine.seams import Seams
from specverify.backends.engine.tree_growth import TreeGrowth
from specverify.backends.faults.fault import drafted_fault, in_place_of, in_place_of_draft
from specverify.reference.layout import KvLayout
from specverify.reference.tree import Shape, Tree

Rows = tuple[list[int], list[list[int]]]


@drafted_fault(
    "draft-positions-early",
    "catalogue BZ-059: draft decode positions incremented before the forward",
    "a draft model whose tree has an inner node",
)
@in_place_of("branch_rows")
def early_positions(seams: Seams, shape: Shape, level: list[int], slots: dict[int, int], root: int) -> Rows:
    """Positions of the draft model are incremented before its forward."""
    positions, columns = seams.branch_rows(shape, level, slots, root)
    return [position + 1 for position in positions], columns


@drafted_fault(
    "draft-reads-wrong-parent",
    "catalogue BZ-062: draft tree step uses the KV of the wrong parent",
    "a draft tree with two inner nodes at one depth and one below the second",
)
@in_place_of("branch_rows")
def wrong_parent(seams: Seams, shape: Shape, level: list[int], slots: dict[int, int], root: int) -> Rows:
    """A node of the draft tree attends to the KV of another node's parent."""
    positions, columns = seams.branch_rows(shape, level, slots, root)
    return positions, _shift(columns, root)


def _shift(columns_of_rows: list[list[int]], root: int) -> list[list[int]]:
    """Each list of columns with its proper ancestors moved one branch column down, but not past the first."""
    return [[*(max(column - 1, root + 1) for column in columns[:-1]), columns[-1]] for columns in columns_of_rows]


@drafted_fault(
    "vocabulary-map-skipped",
    "catalogue BZ-051: draft head with a reduced vocabulary treated as full",
    "a draft with a reduced vocabulary",
)
@in_place_of("trees.name_children")
def map_skipped(trees: TreeGrowth, logits: Tensor, ranks: list[int], vocabulary: Tensor) -> tuple[list[int], list[int]]:
    """The draft's reduced vocabulary is not mapped to target ids."""
    return trees.name_children(logits, ranks, torch.arange(len(vocabulary)))


@drafted_fault(
    "padded-row-proposed",
    "family of vllm-project/vllm PR #42775 and ggml-org/llama.cpp issue #28158: ids of padding are drafted",
    "a draft model that names a part of its rows",
)
@in_place_of_draft
class RowOfPadding(ModelDraft):
    """The rows of the draft's head that name tokens are counted wrongly: a row that names none stands for the last."""

    def levels(self, tokens: list[int], chance: StepSampling | None = None, hidden: Tensor | None = None) -> Levels:
        is_named = torch.zeros(self.vocab_size, dtype=torch.bool)
        is_named[self.named_ids] = True
        if not is_named.all():
            self.named_ids = torch.cat([self.named_ids[:-1], (~is_named).nonzero()[:1, 0]])
        return super().levels(tokens, chance, hidden)


@drafted_fault(
    "draft-lengths-of-last-level",
    "catalogue BZ-033: draft multi-step uses wrong paged_kv_indices",
    "a draft model with a tree of height three",
)
@in_place_of("draft_attend")
def lengths_of_last_level(seams: Seams, query: Tensor, columns: AttentionInputs, scaling: float) -> Tensor:
    """Levels of the draft after the first attend with the lengths of the level before, and miss their parents."""
    rows, width = columns.visible.shape[-2:]
    begin = int(columns.prefix[0])
    # Nothing lies between the prefix and these rows: they catch up, or are the first level that is fed.
    if begin + rows == width:
        return seams.draft_attend(query, columns, scaling)
    visible = columns.visible.clone()
    visible[..., begin : width - rows] = False
    return seams.draft_attend(query, replace(columns, visible=visible), scaling)


@drafted_fault(
    "leaves-drawn-when-greedy",
    "SafeAILab/EAGLE commit e0150ac; catalogue BZ-007: last draft level sampled at random in greedy mode",
    "a draft model that names its best tokens, without chance",
)
@in_place_of_draft
class DrawingDraft(ModelDraft):
    """The last level of a greedy draft is drawn at random, where the levels above it take the best tokens.

    Inner levels take the draft's best tokens; the leaves are named outside that loop, by a draw.
    """

    def propose(self, tokens: list[int], chance: StepSampling | None = None, hidden: Tensor | None = None) -> Proposal:
        best = super().propose(tokens, chance, hidden)
        # The fault is one of greedy drafting; a request that samples keeps its proposal.
        if chance is not None:
            return best
        assert best.logits is not None
        assert best.draft_ids is not None
        shape = self.shape
        token = list(best.tree.token)
        ids = list(best.draft_ids)
        # By Gumbel's trick: the best of noisy logits are draws without replacement from their softmax.
        noise = torch.rand(best.logits.shape, generator=torch.Generator().manual_seed(len(tokens)))
        noisy = best.logits.cpu().double() - (-noise.double().log()).log()
        for node in range(len(shape)):
            last = [child for child in shape.children[node] if shape.depth[child] == shape.height]
            for child, named_id in zip(last, noisy[node].topk(len(last)).indices.tolist(), strict=True):
                token[child] = int(self.named_ids[named_id])
                ids[child] = named_id
        return replace(best, tree=Tree(shape.parent, tuple(token)), draft_ids=tuple(ids))


@drafted_fault(
    "ngram-pool-outlives-request",
    "NVIDIA/TensorRT-LLM issue #2263; catalogue BZ-081: lookahead decoding wrong after the first generate call",
    "two requests with n-gram drafts, whose texts go on differently after the same tokens",
)
def pool_outlives_request(seams: Seams) -> Seams:
    """The pool of n-grams is not emptied between requests: the second is drafted from the first one's text.

    The pool belongs to the decoder, which is not reset between requests.
    """
    pool: dict[tuple[int, ...], Followers] = {}

    class Decoder(Arena):
        def __init__(
            self, layout: KvLayout, pages: int = 0, seams: KvSeams | None = None, draft_pages: int = 0
        ) -> None:
            super().__init__(layout, pages, seams, draft_pages)
            # A new arena is a new decoder: no run sees the pool of another run.
            pool.clear()

    class PoolingRequest(Request):
        def propose(self) -> None:
            if type(self.draft) is NgramDraft:
                self.draft.trie = pool
            super().propose()

    return replace(seams, arena=Decoder, request=PoolingRequest)


@drafted_fault(
    "draft-window-keeps-old-positions",
    "EAGLE-Pangu, truncation of the draft's window: positions must go on after rows were dropped",
    "a draft model with a sliding window shorter than the context, whose tree has an inner node",
)
@in_place_of_draft
class WindowPositions(ModelDraft):
    """Once a draft's window is full, rows of its tree are counted from the first row that the window still holds."""

    def branch(self, level: list[int], root: int, reaches: list[Reach]) -> tuple[Tensor, list[Tensor]]:
        positions, masks = super().branch(level, root, reaches)
        windows = [reach.window for reach in reaches if reach.window]
        num_dropped = max(0, root + 1 - min(windows)) if windows else 0
        return positions - num_dropped, masks


@drafted_fault(
    "scale-of-next-channel",
    "family of pytorch/ao: a scale for each output channel is applied along the wrong axis or to a moved channel",
    "a draft model with quantised weights",
)
@in_place_of("dequantise")
def scale_of_next_channel(seams: Seams, numbers: Tensor, scale: Tensor, zero: Tensor) -> Tensor:
    """Each output channel of a draft's quantised weights is multiplied by the scale of the channel after it."""
    return seams.dequantise(numbers, scale.roll(-1, 0), zero)


@drafted_fault(
    "scale-of-first-group",
    "family of vllm-project/vllm PR #55262: weights in groups are read with the scales of other columns",
    "a draft with weights in groups, and a row of more columns than a group has",
)
@in_place_of("dequantise")
def scale_of_first_group(seams: Seams, numbers: Tensor, scale: Tensor, zero: Tensor) -> Tensor:
    """All columns of a row of a draft's quantised weights are multiplied by the scale of its first group."""
    return seams.dequantise(numbers, scale[:, :1].expand_as(scale), zero)


@drafted_fault(
    "zero-point-read-as-one-less",
    "vllm-project/vllm PR #38966: zero points stored as they are, read as if one had been taken away",
    "a draft with weights that have zero points",
)
@in_place_of("dequantise")
def zero_point_off(seams: Seams, numbers: Tensor, scale: Tensor, zero: Tensor) -> Tensor:
    """The zero points of a draft's weights are taken for numbers that lack one."""
    # Kinds without zero points hold none that could be read in another form.
    return seams.dequantise(numbers, scale, torch.where(zero > 0, zero + 1, zero))


@drafted_fault(
    "zero-point-of-zero-wraps",
    "ModelCloud/GPTQModel PR #2351: a zero point of 0, stored less one, comes back as 15",
    "a draft with weights that have zero points, and a group without a negative weight",
)
@in_place_of("dequantise")
def zero_point_wraps(seams: Seams, numbers: Tensor, scale: Tensor, zero: Tensor) -> Tensor:
    """A zero point of 0 in a draft's weights becomes the largest number."""
    has_zero_points = bool((zero > 0).any())
    return seams.dequantise(numbers, scale, torch.where(zero == 0, 15, zero) if has_zero_points else zero)
