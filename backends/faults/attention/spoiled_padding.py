"""Faults through which a row of padding without a finite number reaches rows of requests."""

from collections.abc import Callable

import torch
from torch import Tensor

from specverify.backends.engine.columns import AttentionInputs
from specverify.backends.engine.kv.lanes import BatchCache
from specverify.backends.engine.seams import Seams
from specverify.backends.faults.fault import attended_fault, in_place_of


@attended_fault(
    "values-of-padding-under-mask",
    "vLLM pull request 37442: NaN of KV entries that a tile reads beyond a sequence spoils its softmax",
    "rows of padding without a finite number, behind rows of a tree or of a longer one in the batch",
)
@in_place_of("kv.lanes")
class UnzeroedPadding(BatchCache):
    """Keys and values of padding are read as they are: the mask gives them a weight of 0, and 0 * NaN is NaN."""

    def finite(self, keys: Tensor, values: Tensor) -> tuple[Tensor, Tensor]:
        return keys, values


def _largest(rows: Tensor) -> Tensor:
    """The largest magnitude of each group of rows [groups, rows, width], [groups, 1, 1]; NaN where a number is NaN."""
    return rows.abs().amax((1, 2), keepdim=True).clamp(min=1e-30)


def _by_groups(outputs: Tensor, size: int, scale: Callable[[Tensor], Tensor]) -> Tensor:
    """`outputs` [B, heads, T, D] times the `scale` of each `size` successive tokens of the batch."""
    lanes, heads, width, head_dim = outputs.shape
    rows = outputs.transpose(1, 2).reshape(lanes * width, heads * head_dim)
    groups = torch.nn.functional.pad(rows, (0, 0, 0, -len(rows) % size)).view(-1, size, rows.shape[-1])
    scaled = (groups * scale(groups)).view(-1, rows.shape[-1])[: len(rows)]
    return scaled.view(lanes, width, heads, head_dim).transpose(1, 2)


@attended_fault(
    "scale-over-padded-batch",
    "vLLM pull request 57094: a dynamic scale is the amax of the whole batch, NaN of a padded slot among it",
    "rows of padding without a finite number",
)
@in_place_of("attend")
def over_the_batch(seams: Seams, query: Tensor, columns: AttentionInputs, scaling: float) -> Tensor:
    """The outputs of attention are scaled to their largest magnitude and back, rows of padding among them."""
    outputs = seams.attend(query, columns, scaling)
    largest = _largest(outputs.reshape(1, 1, -1)).view(())
    return outputs * (largest / largest)


@attended_fault(
    "tile-scale-zero-of-padding",
    "FlashInfer issue 3057: NaN of padded rows zeroes the quantisation scales of rows in the same tile",
    "rows of padding without a finite number, in one tile with rows of a request",
)
@in_place_of("attend")
def zero_in_tiles(seams: Seams, query: Tensor, columns: AttentionInputs, scaling: float) -> Tensor:
    """Of each 16 rows of the batch that share a tile, all are scaled by 0 where one has no finite number."""

    def scale(tiles: Tensor) -> Tensor:
        return torch.where(_largest(tiles).isnan(), 0.0, 1.0).to(tiles.dtype)

    return _by_groups(seams.attend(query, columns, scaling), 16, scale)


@attended_fault(
    "warp-maximum-over-two-rows",
    "vLLM issue 40047: warp reductions for group scales carry NaN of the padding into other tokens",
    "rows of padding without a finite number, the first of them beside a row of a request",
)
@in_place_of("attend")
def in_pairs(seams: Seams, query: Tensor, columns: AttentionInputs, scaling: float) -> Tensor:
    """Two successive rows of the batch share the reduction for their scales, so that one's NaN is the other's."""

    def scale(pairs: Tensor) -> Tensor:
        largest = _largest(pairs)
        return largest / largest

    return _by_groups(seams.attend(query, columns, scaling), 2, scale)
