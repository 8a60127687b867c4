"""Faults of a forward's metadata: slots, masks by layer, and its kind.

The tokens of the forward are right; the inputs beside them are wrong.
"""

from dataclasses import replace

import torch
from torch import Tensor

from specverify.backends.engine.columns import Attend, AttentionInputs
from specverify.backends.engine.kv.paged import Paged
from specverify.backends.engine.model.causal_lm import Rows
from specverify.backends.engine.request import Request
from specverify.backends.engine.seams import Seams
from specverify.backends.faults.fault import attended_fault, in_place_of
from specverify.reference.tree import Shape


class ByPosition(Paged):
    """A paged cache that writes rows to the slots of their positions, once `depth` names the rows' depths."""

    depth: tuple[int, ...] = ()

    def write(self, layer: int, keys: Tensor, values: Tensor) -> None:
        """Write row by row, so that of rows at one position the last one stays."""
        if not self.depth:
            super().write(layer, keys, values)
            return
        for row, depth in enumerate(self.depth):
            self.put(layer, self.length + depth, (keys[:, row : row + 1], values[:, row : row + 1]))


@attended_fault(
    "slot-from-position",
    "vllm-project/vllm issue #54498, PR #54716; catalogue BZ-024: a rotary coordinate used as KV slot index",
    "pages, and two nodes at one depth, or rows out of the order of their depths",
)
def slot_from_position(seams: Seams) -> Seams:
    """Rows are written to the slots that their rotary positions name: rows at one position overwrite each other."""

    class RequestByPosition(Request):
        @property
        def rows(self) -> Rows:
            right = super().rows
            assert self.block is not None
            if isinstance(right.cache, ByPosition):
                tensors = self.block.tensors
                # Padding has no position of its own; it stays behind the tree.
                places = torch.where(tensors.valid, tensors.depth, torch.arange(len(tensors.depth)))
                right.cache.depth = tuple(places.tolist())
            return right

    return replace(seams, request=RequestByPosition, kv=replace(seams.kv, paged=ByPosition))


@attended_fault(
    "masks-by-group-of-layers",
    "vllm-project/vllm-ascend PR #9322; catalogue BZ-050: graph parameters bound to layers in wrong order",
    "a layer with a window or chunk behind one without, and a context longer than it",
)
@in_place_of("request")
class Bound(Request):
    """The facts that attention needs for each layer are listed by KV groups, and bound to layers in that order."""

    @property
    def rows(self) -> Rows:
        right = super().rows
        reaches = self.target.reaches
        order = sorted(range(len(reaches)), key=lambda layer: reaches[layer].span or float("inf"))
        return replace(right, visible=[right.visible[layer] for layer in order])


@attended_fault(
    "prefill-taken-for-verify-block",
    "vllm-project/vllm-ascend PR #6835; catalogue BZ-042: prefill classified as decode when its length is K+1",
    "a prefill, or a chunk of one, of as many tokens as the tree has rows, and a tree that branches",
)
@in_place_of("request")
class Uniform(Request):
    """A prefill as long as a verify block is taken for one, and runs under the mask of its tree.

    Only a prefill of as many tokens as the tree has nodes is affected, since the row count is all that is compared.
    """

    def prefill(self) -> None:
        right = self.seams
        draft = self.case.draft
        for shape in draft.shapes[:1]:
            self.seams = replace(right, prefill_attend=_under_tree_mask(shape, right.prefill_attend or right.attend))
        super().prefill()
        # The verify forward must run on the right seams again.
        self.seams = right


def _under_tree_mask(shape: Shape, attend: Attend) -> Attend:
    """`attend` under the mask of the tree `shape`, for queries of as many rows as the tree has nodes."""
    ancestry = torch.zeros(len(shape), len(shape), dtype=torch.bool)
    for node in range(len(shape)):
        ancestry[node, list(shape.path(node))] = True

    def attend_under_mask(query: Tensor, columns: AttentionInputs, scaling: float) -> Tensor:
        if query.shape[2] != len(shape):
            return attend(query, columns, scaling)
        # A prefill forward has one lane.
        begin = int(columns.prefix[0])
        visible = columns.visible.clone()
        visible[..., begin : begin + len(shape)] = ancestry.to(visible.device)
        return attend(query, replace(columns, visible=visible), scaling)

    return attend_under_mask
