"""Faults of positions on three axes, and of the embeddings of images.

A request with images goes on with the numbers of its columns, of another request, or of another image.
"""

from collections.abc import Callable
from dataclasses import replace

import torch
from torch import Tensor

from specverify.backends.engine.draft import Draft
from specverify.backends.engine.handover.state import RequestState
from specverify.backends.engine.kv.arena import Arena, CacheLease, CacheNeeds
from specverify.backends.engine.model.axes import Axes
from specverify.backends.engine.model.causal_lm import CausalLm, Rows
from specverify.backends.engine.request import Request
from specverify.backends.engine.seams import Seams
from specverify.backends.engine.step_seams import StepSeams
from specverify.backends.faults.drafting.draft_images import beginning_anew
from specverify.backends.faults.fault import attended_fault, in_place_of, lowered_fault
from specverify.reference.case import Case
from specverify.reference.trace import Step


def _with_tree_positions(seams: Seams, change: Callable[[Rows], Tensor | None]) -> Seams:
    """`seams` whose verify forwards take the positions that `change` makes of rows with three axes."""

    def gather(batch: list[Request]) -> list[Rows]:
        return [rows if rows.axes is None else replace(rows, axes=change(rows)) for rows in seams.gather(batch)]

    return replace(seams, gather=gather)


@lowered_fault(
    "rope-delta-forgotten",
    "vllm-project/vllm pull request 10350: speculative steps of Qwen-VL lack mrope_position_delta",
    "an image whose delta is not 0, and a verify forward",
)
def forgotten(seams: Seams) -> Seams:
    """The nodes of a tree have the numbers of their columns on all axes, as if no image stood before them."""
    return _with_tree_positions(seams, lambda rows: None)


@lowered_fault(
    "tree-advances-first-axis-alone",
    "vllm-project/vllm issue 54498 and pull request 54519: height and width do not go on with time in drafts",
    "an image, and a tree below its root",
)
def first_axis(seams: Seams) -> Seams:
    """Nodes go on along time alone: height and width stay at the root's position."""

    def stay(rows: Rows) -> Tensor:
        assert rows.axes is not None
        return torch.stack([rows.axes[0], *(axis[:1].expand_as(axis) for axis in rows.axes[1:])])

    return _with_tree_positions(seams, stay)


@lowered_fault(
    "rope-delta-of-the-first-lane",
    "sgl-project/sglang pull request 8219 (review) and Blaizzy/mlx-vlm pull request 1095: deltas of a batch are not "
    "told apart by request",
    "a batch of requests with unlike images",
)
@in_place_of("gather")
def of_the_first(seams: Seams, batch: list[Request]) -> list[Rows]:
    """All requests of a verify forward have the rope delta of the first one."""
    first = batch[0].axes
    of_text = Axes(torch.empty(3, 0, dtype=torch.int64), 0 if first is None else first.delta).of_text
    rows = seams.gather(batch)
    none = all(rows_of_request.axes is None for rows_of_request in rows)
    return (
        rows
        if none
        else [replace(rows_of_request, axes=of_text(rows_of_request.positions)) for rows_of_request in rows]
    )


@lowered_fault(
    "rope-delta-of-the-latest-prefill",
    "Blaizzy/mlx-vlm pull request 1143 and issue 1415: a later prefill overwrites the delta on the model",
    "a request that enters while one with an image decodes",
)
def of_the_latest(seams: Seams) -> Seams:
    """The rope delta of the prompt that was prefilled last holds for every request of the target."""
    latest: dict[int, Axes | None] = {}

    class LatestPrefill(seams.request):  # type: ignore[misc,name-defined]
        def prefill(self) -> None:
            latest[id(self.target)] = self.axes
            super().prefill()

    def gather(batch: list[Request]) -> list[Rows]:
        axes = latest.get(id(batch[0].target))
        rows = seams.gather(batch)
        if axes is None:
            return [replace(rows_of_request, axes=None) for rows_of_request in rows]
        return [replace(rows_of_request, axes=axes.of_text(rows_of_request.positions)) for rows_of_request in rows]

    return replace(seams, request=LatestPrefill, gather=gather)


@lowered_fault(
    "rope-delta-lost-on-restore",
    "family of vllm-project/vllm pull request 10403: the delta is a constant of the sequence, and is computed anew",
    "a request with an image that is evicted and restored",
)
@in_place_of("request")
class Forgetful(Request):
    """A restored request is numbered by its columns from the end of its prompt on."""

    has_entered = False

    def prefill(self) -> None:
        if self.has_entered and self.axes is not None:
            self.axes = replace(self.axes, delta=0)
        self.has_entered = True
        super().prefill()


@lowered_fault(
    "rope-delta-not-handed-over",
    "sgl-project/sglang pull request 8219: the decode side of a disaggregated pair has no mrope_position_delta",
    "a request with an image that is handed over, and then steps",
)
@in_place_of("request")
class ArrivedRequest(Request):
    """A request that was handed over goes on with the numbers of its columns."""

    def carry_on(self, state: RequestState, steps: list[Step]) -> None:
        super().carry_on(state, steps)
        self.axes = None


class AlwaysFromTheStart(Axes):
    """Positions of a prompt that begin anew with each chunk of its prefill."""

    def of_prompt(self, columns: Tensor) -> Tensor:
        return super().of_prompt(columns - columns[0])


@lowered_fault(
    "chunks-numbered-from-the-start",
    "Blaizzy/mlx-vlm pull request 1741 and issue 1755: each chunk of a prefill takes the first positions of the prompt",
    "an image in a prompt that is prefilled in chunks, or behind pages of a prefix cache",
)
@in_place_of("request")
class ChunkedRequest(Request):
    """Every chunk of a prefill has the positions of the prompt's first tokens."""

    def __init__(self, case: Case, target: CausalLm, lease: CacheLease, draft: Draft, step_seams: StepSeams) -> None:
        super().__init__(case, target, lease, draft, step_seams)
        if self.axes is not None:
            self.axes = AlwaysFromTheStart(self.axes.image_positions, self.axes.delta, self.axes.embeddings)


@attended_fault(
    "image-begins-anew-in-chunk",
    "kekzl/imp pull request 1184: the k-th image token is found among the tokens of a chunk, so that a second chunk "
    "takes the first embeddings again",
    "an image with embeddings of its own behind a chunk of the prompt, or behind pages of a prefix cache",
)
@in_place_of("request")
class RepeatingRequest(Request):
    """A chunk of the prompt, or what follows known pages, takes the first embeddings of an image again."""

    def __init__(self, case: Case, target: CausalLm, lease: CacheLease, draft: Draft, step_seams: StepSeams) -> None:
        super().__init__(case, target, lease, draft, step_seams)
        if self.axes is not None:
            self.axes = beginning_anew(self.axes)


@attended_fault(
    "prefix-shared-across-images",
    "LMCache/LMCache issue 690 and ROCm/ATOM pull request 1358: pages are named by placeholder tokens alone",
    "a prefix cache; two prompts with equal tokens and unlike images",
)
@in_place_of("arena")
class ByTokens(Arena):
    """The prefix cache finds pages by their tokens alone, so that a request reads keys of another image."""

    def lease(self, needs: CacheNeeds) -> CacheLease:
        return super().lease(replace(needs, adapter=None) if isinstance(needs.adapter, tuple) else needs)
