"""Faults of one part of split attention: its mask, scale, keys, values or sum.

Split attention computes prefix and block apart and merges the two by their log-sum-exps
(`backends/engine/attention/split.py`).
"""

from collections.abc import Callable
from dataclasses import replace

import torch
from torch import Tensor

from specverify.backends.base import Unsupported
from specverify.backends.engine.attention.compact import Compact
from specverify.backends.engine.attention.split import Keys, Partial, Split
from specverify.backends.engine.columns import AttentionInputs
from specverify.backends.engine.seams import Seams
from specverify.backends.faults.attention.packed_mask import SPLIT, fault


def in_split(seams: Seams, change: Callable[[Split], Split]) -> Seams:
    """The seams with one part of their split attention exchanged.

    Raises:
        Unsupported: where attention is not split in torch.
    """
    if not isinstance(seams.attend, Split):
        raise Unsupported(f"the fault lies in attention split in torch: plant it in {SPLIT}")
    return replace(seams, attend=change(seams.attend))


def block_mask_dropped(seams: Seams) -> Seams:
    """Attention that returns log-sum-exps takes a code path without the tree's mask."""

    def change(attend: Split) -> Split:
        right = attend.partial

        def partial(query: Tensor, keys: Keys, hidden: Tensor | None, scaling: float) -> Partial:
            return right(query, keys, None, scaling)

        return replace(attend, partial=partial)

    return in_split(seams, change)


def scaled_by_padded_head(seams: Seams) -> Seams:
    """Scores are divided by the root of the head dimension padded to 16."""

    def change(attend: Split) -> Split:
        right = attend.partial

        def partial(query: Tensor, keys: Keys, hidden: Tensor | None, scaling: float) -> Partial:
            dim = query.shape[-1]
            # The factor turns 1 / sqrt(dim) into 1 / sqrt(padded dim).
            return right(query, keys, hidden, scaling * (dim / (dim + -dim % 16)) ** 0.5)

        return replace(attend, partial=partial)

    return in_split(seams, change)


def block_read_without_offset(seams: Seams) -> Seams:
    """Keys of the block are read from column 0 of the lane, without the length of the prefix."""

    def change(attend: Split) -> Split:
        def block_keys(columns: AttentionInputs, lane: int, packed: Compact) -> Keys:
            return attend.prefix_keys(columns, lane, replace(packed, lanes=_widths_as_prefixes(packed)))

        return replace(attend, block_keys=block_keys)

    return in_split(seams, change)


def _widths_as_prefixes(packed: Compact) -> tuple[tuple[int, int, bool], ...]:
    """The lanes with the block's width as the prefix length, so that as many columns are read from column 0."""
    return tuple((width, width, partly) for _, width, partly in packed.lanes)


def values_transposed(seams: Seams) -> Seams:
    """Values of the block are read as if the axis of cells came before the axis of heads."""

    def change(attend: Split) -> Split:
        right = attend.block_keys

        def block_keys(columns: AttentionInputs, lane: int, packed: Compact) -> Keys:
            keys, values = right(columns, lane, packed)
            heads, cells, dim = values.shape
            return keys, values.reshape(cells, heads, dim).transpose(0, 1)

        return replace(attend, block_keys=block_keys)

    return in_split(seams, change)


def page_turned_early(seams: Seams) -> Seams:
    """The last cell of a page is read from the next page, because columns are counted from one."""

    def change(attend: Split) -> Split:
        right = attend.prefix_keys

        def prefix_keys(columns: AttentionInputs, lane: int, packed: Compact) -> Keys:
            paging = columns.paging
            if paging is None:
                return right(columns, lane, packed)
            column = torch.arange(packed.lanes[lane][0])
            # Clamped, so that the last page's last cell is a wrong read and not an index error.
            block = ((column + 1) // paging.size).clamp(max=paging.table.shape[1] - 1)
            slot = paging.table[lane, block] * paging.size + column % paging.size
            keys, values = (
                cells.flatten(0, 1)[slot].transpose(0, 1) for cells in (paging.key_cells, paging.value_cells)
            )
            return keys, values

        return replace(attend, prefix_keys=prefix_keys)

    return in_split(seams, change)


def denominator_counts_tile(seams: Seams) -> Seams:
    """Columns of the last tile beyond the last key stay in the denominator, with score 0."""

    def change(attend: Split) -> Split:
        right = attend.partial

        def partial(query: Tensor, keys: Keys, hidden: Tensor | None, scaling: float) -> Partial:
            out, lse = right(query, keys, hidden, scaling)
            spare = -keys[0].shape[1] % 4
            if not spare:
                return out, lse
            # `spare` scores of 0 add log(spare) to the log-sum-exp.
            wider = torch.logaddexp(lse, torch.full_like(lse, float(spare)).log())
            return out * (lse - wider).exp()[..., None], wider

        return replace(attend, partial=partial)

    return in_split(seams, change)


def summed_in_float16(seams: Seams) -> Seams:
    """The sum of weighted values is rounded to float16."""

    def change(attend: Split) -> Split:
        right = attend.partial

        def partial(query: Tensor, keys: Keys, hidden: Tensor | None, scaling: float) -> Partial:
            out, lse = right(query, keys, hidden, scaling)
            return out.half().to(out.dtype), lse

        return replace(attend, partial=partial)

    return in_split(seams, change)


class ByModulo(Split):
    """Split attention whose query head h reads KV head h % kv_heads instead of h // group."""

    def __call__(self, query: Tensor, columns: AttentionInputs, scaling: float) -> Tensor:
        """See `Split`: query heads are reordered so that its grouping pairs them by modulo, and put back after it."""
        order = torch.arange(query.shape[1]).reshape(-1, columns.key.shape[1]).T.flatten()
        return super().__call__(query[:, order], columns, scaling)[:, order.argsort()]


def kv_head_by_modulo(seams: Seams) -> Seams:
    """Query head h reads KV head h % kv_heads, where h // group is right."""
    return in_split(
        seams,
        lambda split: ByModulo(
            split.compact, split.prefix_keys, split.block_keys, split.partial, split.merge, split.eager
        ),
    )


def block_maximum_ignored(seams: Seams) -> Seams:
    """The block's log-sum-exp lacks the block's own maximum, so the merge weighs the block wrongly."""

    def change(attend: Split) -> Split:
        right = attend.partial

        def partial(query: Tensor, keys: Keys, hidden: Tensor | None, scaling: float) -> Partial:
            out, lse = right(query, keys, hidden, scaling)
            # Only the block is under a mask; the prefix keeps its right sum unless a row sees it in part.
            if hidden is None or not keys[0].shape[1]:
                return out, lse
            scores = query @ keys[0].to(query.dtype).transpose(-1, -2) * scaling
            top = scores.masked_fill(hidden, float("-inf")).amax(-1)
            # A row without a visible column has no maximum to lose.
            return out, torch.where(top == float("-inf"), lse, lse - top)

        return replace(attend, partial=partial)

    return in_split(seams, change)


def sink_in_output_alone(seams: Seams) -> Seams:
    """The sink reaches the softmax of the block and not the log-sum-exp by which the block is merged."""

    def change(attend: Split) -> Split:
        right = attend.merge

        def merge(parts: list[Partial]) -> Tensor:
            if len(parts) < 3:
                return right(parts)
            over_prefix, (out, lse), (_, sink) = parts
            share = torch.sigmoid(lse - sink)[..., None]
            return right([over_prefix, (out * share, lse)])

        return replace(attend, merge=merge)

    return in_split(seams, change)


FAULTS = (
    fault(
        "sink-forgotten-in-merge",
        "The sink takes its share of the block's softmax and none of the prefix's.",
        "a term of each head that only one part of split attention knows",
        "a model with attention sinks, and a prefix",
        sink_in_output_alone,
    ),
    fault(
        "tree-mask-dropped-when-split",
        "Where log-sum-exps are returned, the tree's mask is not applied.",
        "catalogue BZ-093: custom mask ignored when LSE is requested",
        "two nodes",
        block_mask_dropped,
    ),
    fault(
        "scaled-by-padded-head",
        "Scores are scaled by the head dimension padded to a tile.",
        "head dimensions that are no multiple of a tile",
        "a head dimension that is padded",
        scaled_by_padded_head,
    ),
    fault(
        "block-read-without-prefix",
        "Keys of the block are read from column 0 on, without the prefix's offset.",
        "row offset missing in the suffix part of split attention",
        "any prefix",
        block_read_without_offset,
    ),
    fault(
        "block-values-transposed",
        "Values of the block are read as if its cells lay before its heads.",
        "layout of values differs from that of keys",
        "two KV heads and two rows",
        values_transposed,
    ),
    fault(
        "page-turned-one-cell-early",
        "The last cell of each page is looked for in the next page.",
        "page offset at the boundary of a page",
        "pages, and a prefix that ends a page",
        page_turned_early,
    ),
    fault(
        "tile-lanes-in-part-denominator",
        "Cells of the last tile beyond the last column stay in the denominator of a part.",
        "catalogue BZ-097: non-causal decode keeps padding lanes",
        "a part that does not fill its tile",
        denominator_counts_tile,
    ),
    fault(
        "parts-summed-in-float16",
        "Parts are summed in float16.",
        "16-bit accumulators",
        "float32",
        summed_in_float16,
    ),
    fault(
        "kv-head-by-modulo",
        "A query head reads the KV head of its number modulo, not of its group.",
        "order of grouped query heads",
        "two KV heads with two query heads each",
        kv_head_by_modulo,
    ),
    fault(
        "block-maximum-ignored",
        "The block's sum is merged as if it were relative to the prefix's maximum.",
        "merge that ignores one side's maximum",
        "any block",
        block_maximum_ignored,
    ),
)
