"""Faults of one part of split attention: its mask, scale, keys, values or sum.

Split attention computes prefix and block apart and merges the two by their log-sum-exps
(`backends/engine/attention/split.py`).
"""

from dataclasses import replace
from functools import partial

import torch
from torch import Tensor

from specverify.backends.base import Unsupported
from specverify.backends.engine.attention.compact import Compact
from specverify.backends.engine.attention.split import Keys, Partial, Split
from specverify.backends.engine.columns import AttentionInputs
from specverify.backends.engine.seams import Seams
from specverify.backends.faults.attention.packed_mask import SPLIT, attention_fault
from specverify.backends.faults.fault import in_place_of

REFUSAL = f"the fault lies in attention split in torch: plant it in {SPLIT}"

in_split = partial(in_place_of, owner=Split, refusal=REFUSAL)
"""A decorator as `in_place_of`, for a part of attention split in torch."""


def _widths_as_prefixes(packed: Compact) -> tuple[tuple[int, int, bool], ...]:
    """The lanes with the block's width as the prefix length, so that as many columns are read from column 0."""
    return tuple((width, width, partly) for _, width, partly in packed.lanes)


class ByModulo(Split):
    """Split attention whose query head h reads KV head h % kv_heads instead of h // group."""

    def __call__(self, query: Tensor, columns: AttentionInputs, scaling: float) -> Tensor:
        """See `Split`: query heads are reordered so that its grouping pairs them by modulo, and put back after it."""
        order = torch.arange(query.shape[1]).reshape(-1, columns.key.shape[1]).T.flatten()
        return super().__call__(query[:, order], columns, scaling)[:, order.argsort()]


@attention_fault(
    "sink-forgotten-in-merge",
    "a term of each head that only one part of split attention knows",
    "a model with attention sinks, and a prefix",
)
@in_split("attend.merge")
def sink_in_output_alone(split: Split, parts: list[Partial]) -> Tensor:
    """The sink takes its share of the block's softmax and none of the prefix's."""
    if len(parts) < 3:
        return split.merge(parts)
    over_prefix, (out, lse), (_, sink) = parts
    share = torch.sigmoid(lse - sink)[..., None]
    return split.merge([over_prefix, (out * share, lse)])


@attention_fault(
    "tree-mask-dropped-when-split", "catalogue BZ-093: custom mask ignored when LSE is requested", "two nodes"
)
@in_split("attend.partial")
def block_mask_dropped(split: Split, query: Tensor, keys: Keys, hidden: Tensor | None, scaling: float) -> Partial:
    """Where log-sum-exps are returned, the tree's mask is not applied.

    Attention that returns them takes a code path of its own.
    """
    return split.partial(query, keys, None, scaling)


@attention_fault(
    "scaled-by-padded-head", "head dimensions that are no multiple of a tile", "a head dimension that is padded"
)
@in_split("attend.partial")
def scaled_by_padded_head(split: Split, query: Tensor, keys: Keys, hidden: Tensor | None, scaling: float) -> Partial:
    """Scores are scaled by the head dimension padded to a tile."""
    dim = query.shape[-1]
    # The factor turns 1 / sqrt(dim) into 1 / sqrt(padded dim).
    return split.partial(query, keys, hidden, scaling * (dim / (dim + -dim % 16)) ** 0.5)


@attention_fault("block-read-without-prefix", "row offset missing in the suffix part of split attention", "any prefix")
@in_split("attend.block_keys")
def block_read_without_offset(split: Split, columns: AttentionInputs, lane: int, packed: Compact) -> Keys:
    """Keys of the block are read from column 0 on, without the prefix's offset."""
    return split.prefix_keys(columns, lane, replace(packed, lanes=_widths_as_prefixes(packed)))


@attention_fault("block-values-transposed", "layout of values differs from that of keys", "two KV heads and two rows")
@in_split("attend.block_keys")
def values_transposed(split: Split, columns: AttentionInputs, lane: int, packed: Compact) -> Keys:
    """Values of the block are read as if its cells lay before its heads."""
    keys, values = split.block_keys(columns, lane, packed)
    heads, cells, dim = values.shape
    return keys, values.reshape(cells, heads, dim).transpose(0, 1)


@attention_fault(
    "page-turned-one-cell-early", "page offset at the boundary of a page", "pages, and a prefix that ends a page"
)
@in_split("attend.prefix_keys")
def page_turned_early(split: Split, columns: AttentionInputs, lane: int, packed: Compact) -> Keys:
    """The last cell of each page is looked for in the next page.

    Columns are counted from one.
    """
    paging = columns.paging
    if paging is None:
        return split.prefix_keys(columns, lane, packed)
    column = torch.arange(packed.lanes[lane][0])
    # Clamped, so that the last page's last cell is a wrong read and not an index error.
    block = ((column + 1) // paging.size).clamp(max=paging.table.shape[1] - 1)
    slot = paging.table[lane, block] * paging.size + column % paging.size
    keys, values = (cells.flatten(0, 1)[slot].transpose(0, 1) for cells in (paging.key_cells, paging.value_cells))
    return keys, values


@attention_fault(
    "tile-lanes-in-part-denominator",
    "catalogue BZ-097: non-causal decode keeps padding lanes",
    "a part that does not fill its tile",
)
@in_split("attend.partial")
def denominator_counts_tile(split: Split, query: Tensor, keys: Keys, hidden: Tensor | None, scaling: float) -> Partial:
    """Cells of the last tile beyond the last column stay in the denominator of a part."""
    out, lse = split.partial(query, keys, hidden, scaling)
    spare = -keys[0].shape[1] % 4
    if not spare:
        return out, lse
    # `spare` scores of 0 add log(spare) to the log-sum-exp.
    wider = torch.logaddexp(lse, torch.full_like(lse, float(spare)).log())
    return out * (lse - wider).exp()[..., None], wider


@attention_fault("parts-summed-in-float16", "16-bit accumulators", "float32")
@in_split("attend.partial")
def summed_in_float16(split: Split, query: Tensor, keys: Keys, hidden: Tensor | None, scaling: float) -> Partial:
    """Parts are summed in float16."""
    out, lse = split.partial(query, keys, hidden, scaling)
    return out.half().to(out.dtype), lse


@attention_fault("kv-head-by-modulo", "order of grouped query heads", "two KV heads with two query heads each")
def kv_head_by_modulo(seams: Seams) -> Seams:
    """A query head reads the KV head of its number modulo, not of its group."""
    split = seams.attend
    if not isinstance(split, Split):
        raise Unsupported(REFUSAL)
    return replace(seams, attend=ByModulo(**vars(split)))


@attention_fault("block-maximum-ignored", "merge that ignores one side's maximum", "any block")
@in_split("attend.partial")
def block_maximum_ignored(split: Split, query: Tensor, keys: Keys, hidden: Tensor | None, scaling: float) -> Partial:
    """The block's sum is merged as if it were relative to the prefix's maximum."""
    out, lse = split.partial(query, keys, hidden, scaling)
    # Only the block is under a mask; the prefix keeps its right sum unless a row sees it in part.
    if hidden is None or not keys[0].shape[1]:
        return out, lse
    scores = query @ keys[0].to(query.dtype).transpose(-1, -2) * scaling
    top = scores.masked_fill(hidden, float("-inf")).amax(-1)
    # A row without a visible column has no maximum to lose.
    return out, torch.where(top == float("-inf"), lse, lse - top)
