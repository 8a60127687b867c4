"""Faults around our Triton kernel: its pages, strides, splits and merge.

The kernel itself is right; a fault changes what the launch passes to the kernel, or to the merge of its parts.
"""

from collections.abc import Callable
from dataclasses import replace
from math import e, log2

from torch import Tensor

from specverify.backends.base import Unsupported
from specverify.backends.engine.attention.compact import Compact
from specverify.backends.engine.attention.triton_launch import Kernel, Plan, TritonTree
from specverify.backends.engine.columns import AttentionInputs, Paging
from specverify.backends.engine.seams import Seams
from specverify.backends.faults.attention.packed_mask import TRITON, fault


def in_kernel(seams: Seams, change: Callable[[TritonTree], TritonTree]) -> Seams:
    """The seams with one part of their Triton attention exchanged.

    Raises:
        Unsupported: where attention is not our Triton kernel.
    """
    if not isinstance(seams.attend, TritonTree):
        raise Unsupported(f"the fault lies in our Triton kernel's launch: plant it in {TRITON}")
    return replace(seams, attend=change(seams.attend))


def tables_of_first_lane(seams: Seams) -> Seams:
    """Every lane reads its columns through the block table of lane 0."""

    def change(attend: TritonTree) -> TritonTree:
        right = attend.pages_of

        def first_lane_pages(columns: AttentionInputs) -> Paging:
            pages = right(columns)
            return replace(pages, table=pages.table[:1].expand_as(pages.table).contiguous())

        return replace(attend, pages_of=first_lane_pages)

    return in_kernel(seams, change)


def value_strides_exchanged(seams: Seams) -> Seams:
    """Values are read with the strides of heads and cells exchanged."""

    def change(attend: TritonTree) -> TritonTree:
        right = attend.pages_of

        def exchanged_pages(columns: AttentionInputs) -> Paging:
            pages = right(columns)
            count, size, heads, dim = pages.value_cells.shape
            return replace(pages, value_cells=pages.value_cells.reshape(count, heads, size, dim).transpose(1, 2))

        return replace(attend, pages_of=exchanged_pages)

    return in_kernel(seams, change)


def always_split(plan: Plan, packed: Compact) -> Plan:
    """The plan with the prefix in two parts, and tiles so small that a short prefix fills both."""
    quarter, eighth = packed.longest.bit_length() - 2, packed.widest.bit_length() - 3
    return replace(plan, splits=2, tile=1 << max(quarter, eighth, 0))


def merged_wrongly(seams: Seams, wrong: Callable[[Tensor, Tensor], tuple[Tensor, Tensor]]) -> Seams:
    """The seams with parts and log-sum-exps changed by `wrong` before the kernel's merge.

    Short prefixes are split too, so that the merge runs on small cases.
    """

    def change(attend: TritonTree) -> TritonTree:
        right, plan = attend.merge, attend.plan

        def merge(kernel: Kernel, parts: Tensor, sums: Tensor, out: Tensor) -> None:
            right(kernel, *wrong(parts, sums), out)

        def split_plan(query: Tensor, kv_heads: int, packed: Compact) -> Plan:
            return always_split(plan(query, kv_heads, packed), packed)

        return replace(attend, merge=merge, plan=split_plan)

    return in_kernel(seams, change)


def sums_transposed(seams: Seams) -> Seams:
    """Log-sum-exps are written as [head, row] and merged as if they were [row, head]."""
    return merged_wrongly(seams, lambda parts, sums: (parts, sums.transpose(2, 3).contiguous().view(sums.shape)))


def sums_in_base_two(seams: Seams) -> Seams:
    """Log-sum-exps are in base two, and the merge takes them for natural logarithms."""
    return merged_wrongly(seams, lambda parts, sums: (parts, sums * log2(e)))


def last_split_dropped(seams: Seams) -> Seams:
    """The merge leaves out the last part of the prefix."""

    def wrong(parts: Tensor, sums: Tensor) -> tuple[Tensor, Tensor]:
        # The last entry is the block's, the one before it the prefix's last part.
        kept_parts = [*range(len(parts) - 2), len(parts) - 1]
        return parts[kept_parts], sums[kept_parts]

    return merged_wrongly(seams, wrong)


def later_lanes_merged_by_first(seams: Seams) -> Seams:
    """The merge reads the log-sum-exps of the first split lane for all split lanes; lanes of one part keep their own.

    The plan is unchanged: the interpreter splits prefixes of 128 columns or more, so the fault needs a long prefix.
    """

    def change(attend: TritonTree) -> TritonTree:
        right = attend.merge

        def merge(kernel: Kernel, parts: Tensor, sums: Tensor, out: Tensor) -> None:
            # sums [S, B, H, T]: the parts of the prefix, then the block; a part without columns has minus infinity.
            num_parts = sums[:-1].isfinite().flatten(2).any(-1).sum(0)
            split_lanes = (num_parts > 1).nonzero().flatten().tolist()
            wrong = sums.clone()
            for lane in split_lanes:
                wrong[:, lane] = sums[:, split_lanes[0]]
            right(kernel, parts, wrong, out)

        return replace(attend, merge=merge)

    return in_kernel(seams, change)


FAULTS = (
    fault(
        "lanes-beyond-split-threshold",
        "The merge weighs the parts of every lane whose prefix is split by the log-sum-exps of the first such lane.",
        "family of catalogue BZ-101: LSE addressed wrongly in the split-KV combine, here without the lane's offset",
        "a batch with two prefixes so long that the kernel splits them",
        later_lanes_merged_by_first,
        TRITON,
    ),
    fault(
        "values-read-transposed",
        "Values are read with the steps of heads and cells exchanged.",
        "layout of values differs from that of keys",
        "two KV heads",
        value_strides_exchanged,
        TRITON,
    ),
    fault(
        "tables-of-first-lane",
        "Each lane reads the pages of lane 0.",
        "block table row of another request",
        "a batch over pages",
        tables_of_first_lane,
        TRITON,
    ),
    fault(
        "merged-sums-transposed",
        "Log-sum-exps are laid out by head and row, and merged as if by row and head.",
        "catalogue BZ-101: LSE layout wrong in the split-KV combine",
        "a split prefix, two heads and two rows",
        sums_transposed,
        TRITON,
    ),
    fault(
        "merged-in-base-two",
        "Log-sum-exps in base two are merged as natural ones.",
        "catalogue BZ-101: LSE of another layout in the split-KV combine",
        "a split prefix",
        sums_in_base_two,
        TRITON,
    ),
    fault(
        "last-split-dropped",
        "The last part of a split prefix is left out of the merge.",
        "count of splits off by one",
        "a split prefix",
        last_split_dropped,
        TRITON,
    ),
)
