"""Where a draft looks: attention of the rows from which it drafts, by distance.

A draft runs on texts of the target. For every row whose scores name a drafted token, and every layer and head, the
column with the largest weight (top-1) and all weights are counted by their distance in tokens. The first token of a
text has a bucket of its own: heads that look nowhere rest there (attention sinks, Xiao et al. 2024).
"""

import math
from collections.abc import Sequence
from dataclasses import dataclass, replace
from typing import Any

import torch
from torch import Tensor

from specverify.backends.engine.backend import EngineBackend
from specverify.backends.engine.columns import Attend, AttentionInputs
from specverify.backends.engine.draft import HEADS
from specverify.bench.contexts import lengthen
from specverify.checkpoints.cases import base_case, ends_of
from specverify.checkpoints.given_draft import given_draft
from specverify.checkpoints.opening import open_checkpoint
from specverify.checkpoints.prompts import prompts_of
from specverify.plan import Plan
from specverify.reference.malformed import Malformed
from specverify.reports.progress import Progress
from specverify.setup.errors import UnusableInput
from specverify.setup.subjects import manifest, open_planted

BORDERS = (16, 64, 256)
"""The distances at which a bucket begins, where no others are asked for."""

FIRST = "first token"
"""The bucket of the first token of a text."""


@dataclass
class Buckets:
    """Counts of attention by distance.

    Attributes:
        borders: The distances at which a bucket begins, ascending; the first one begins at 0.
        top1: For each bucket, rows (of a layer and a head) whose largest weight lies there; the first token last.
        mass: The sum of the weights there.
        room: The sum over rows of the columns there that a row sees.
        rows: Number of rows.
    """

    borders: tuple[int, ...]
    top1: Tensor
    mass: Tensor
    room: Tensor
    rows: int = 0

    @classmethod
    def empty(cls, borders: tuple[int, ...]) -> "Buckets":
        """No row yet."""
        zeros = torch.zeros(len(borders) + 2, dtype=torch.float64)
        return cls(borders, zeros, zeros.clone(), zeros.clone())

    @property
    def names(self) -> list[str]:
        """The buckets in words."""
        ends = [0, *self.borders]
        spans = [f"{begin}-{end - 1}" for begin, end in zip(ends, self.borders, strict=False)]
        return [*spans, f"{ends[-1]} and more", FIRST]

    def count(self, weights: Tensor, distances: Tensor, visible: Tensor) -> None:
        """Count rows.

        Args:
            weights: float [H, R, C]; 0 where a row sees no column.
            distances: int64 [R, C].
            visible: bool [R, C].
        """
        borders = torch.tensor(self.borders, device=distances.device)
        bucket = torch.bucketize(distances, borders, right=True)
        bucket[:, 0] = len(self.names) - 1
        flat = bucket.expand_as(weights).flatten().cpu()
        self.mass.index_add_(0, flat, weights.double().flatten().cpu())
        best = bucket.expand_as(weights).gather(2, weights.argmax(2, keepdim=True)).flatten().cpu()
        self.top1.index_add_(0, best, torch.ones(len(best), dtype=torch.float64))
        visible_counts = visible.expand_as(weights).double().flatten().cpu()
        self.room.index_add_(0, flat, visible_counts)
        self.rows += len(best)

    def figures(self) -> list[dict[str, Any]]:
        """For each bucket its name, the share of top-1 and of all weight, and of the columns that rows see there."""
        return [
            {"bucket": name, "top1": float(top1) / self.rows, "mass": float(mass) / self.rows,
             "columns": float(room / self.room.sum())}
            for name, top1, mass, room in zip(self.names, self.top1, self.mass, self.room, strict=True)
        ]  # fmt: skip


class WatchedAttention:
    """An attention of drafts that counts where the rows that draft look, and computes what it did before.

    Attributes:
        buckets: The counts.
    """

    def __init__(self, attend: Attend, buckets: Buckets) -> None:
        self._attend = attend
        self.buckets = buckets

    def __call__(self, query: Tensor, columns: AttentionInputs, scaling: float) -> Tensor:
        """See `specverify.backends.engine.columns.Attend`."""
        if columns.key.shape[2] != columns.visible.shape[3]:
            raise UnusableInput("bench draft-attention: keys lie in pages; choose a layout without pages")
        for lane in range(len(query)):
            self._count(query[lane], columns, scaling, lane)
        return self._attend(query, columns, scaling)

    def _count(self, query: Tensor, columns: AttentionInputs, scaling: float, lane: int) -> None:
        visible, prefix = columns.visible[lane, 0], int(columns.prefix[lane])
        drafting_rows = rows_that_draft(visible, prefix)
        visible = visible[drafting_rows]
        groups = query.shape[0] // columns.key.shape[1]
        key = columns.key[lane].repeat_interleave(groups, 0)
        scores = (query[:, drafting_rows] @ key.transpose(-1, -2)).double() * scaling
        if columns.cap:
            scores = torch.tanh(scores / columns.cap) * columns.cap
        weights = torch.softmax(scores.masked_fill(~visible, -math.inf), -1)
        self.buckets.count(weights, distances_of(visible, prefix), visible)


def rows_that_draft(visible: Tensor, prefix: int) -> list[int]:
    """The rows of a forward whose scores name drafted tokens, from its mask [R, C].

    Rows of committed tokens see the row before them, and the last of them alone is drafted from. Rows of one level of a
    tree do not see each other.
    """
    rows = len(visible)
    first = int(visible.shape[1]) - rows
    is_append = rows > 1 and first == prefix and bool(visible[1, first])
    return [rows - 1] if is_append else list(range(rows))


def distances_of(visible: Tensor, prefix: int) -> Tensor:
    """How many tokens each column lies before the row's own, int64 [R, C]; large for columns that a row does not see.

    A committed column stands at its index. What a row sees of the block are its ancestors and itself, in the order of
    their positions.
    """
    block = visible[:, prefix:]
    ancestors = block.long().cumsum(1)
    positions = torch.arange(prefix, device=visible.device)
    own = prefix + ancestors[:, -1:] - 1
    distances = torch.cat([own - positions, ancestors[:, -1:] - ancestors], 1)
    return torch.where(visible, distances, torch.iinfo(torch.int64).max)


def measure(plan: Plan, draft_name: str, lengths: Sequence[int], borders: tuple[int, ...]) -> dict[str, Any]:
    """Count attention of the draft while it drafts for the target.

    Args:
        plan: Backend, model, prompts, new tokens, dtype and seed.
        draft_name: The argument of `--draft`.
        lengths: Lengths to which every prompt is brought; empty for its own.
        borders: The distances at which a bucket begins, ascending.

    Returns:
        facts; rows: for each length (None for prompts as they are) and bucket the share of top-1, of all weight, and of
        the columns that a row sees there; far: for each length the share of top-1 at the last border and beyond, the
        first token left out of both sides of the ratio.

    Raises:
        UnusableInput: The draft has no attention of its own, or a prompt is too long.
        MissingInput: This machine lacks something.
    """
    backend = open_planted(plan.backend, None, plan.mode)
    if not isinstance(backend, EngineBackend):
        raise UnusableInput(
            f"bench draft-attention --backend {plan.backend}: it watches our engine, and this is another"
        )
    assert plan.model is not None
    checkpoint = open_checkpoint(plan.model)
    draft = given_draft(draft_name, checkpoint, backend.declaration)
    if draft is None or (draft.model is None and draft.TAG not in HEADS):
        raise UnusableInput(f"bench draft-attention: {draft_name} attends to nothing; name a head, or model:DIR")
    prompts = prompts_of(plan, checkpoint, uses_cache=True)
    ends = ends_of(checkpoint)
    attend = backend.seams.draft_attend
    rows, far = [], []
    with Progress(len(prompts) * max(1, len(lengths))) as progress:
        for length in lengths or (None,):
            watched = WatchedAttention(attend, Buckets.empty(borders))
            backend.seams = replace(backend.seams, draft_attend=watched)
            for number, prompt in enumerate(prompts if length is None else lengthen(prompts, length)):
                try:
                    case = replace(base_case(checkpoint, prompt, number, plan, ends), draft=draft)
                except Malformed as why:
                    raise UnusableInput(
                        f"bench draft-attention --draft {draft_name}: prompt {number + 1}: {why}"
                    ) from None
                backend.run(case)
                progress.advance()
            if not watched.buckets.rows:
                raise UnusableInput(f"bench draft-attention: {draft_name} drafted nothing: prompts hold one token each")
            bucket_figures = watched.buckets.figures()
            rows += [{"length": length} | figures for figures in bucket_figures]
            near_and_far = sum(figures["top1"] for figures in bucket_figures[:-1])
            share = bucket_figures[-2]["top1"] / near_and_far if near_and_far else None
            far.append({"length": length, "from": borders[-1], "top1": share, "rows": watched.buckets.rows})
    facts = {
        "backend": plan.backend, "draft": draft_name, "prompts": len(prompts), "dtype": plan.dtypes[0],
    }  # fmt: skip
    return {"facts": facts | manifest(backend), "rows": rows, "far": far}
