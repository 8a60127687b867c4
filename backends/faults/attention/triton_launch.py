"""Faults around our Triton kernel: its pages, strides, splits and merge.

The kernel itself is right; a fault changes what the launch passes to the kernel, or to the merge of its parts.
"""

from collections.abc import Callable
from dataclasses import replace
from functools import partial
from math import e, log2

from torch import Tensor

from specverify.backends.engine.attention.compact import Compact
from specverify.backends.engine.attention.triton_launch import Kernel, Plan, TritonTree
from specverify.backends.engine.columns import AttentionInputs, Paging
from specverify.backends.engine.seams import Seams
from specverify.backends.faults.attention.packed_mask import TRITON, attention_fault
from specverify.backends.faults.fault import Plant, in_place_of

in_launch = partial(
    in_place_of, owner=TritonTree, refusal=f"the fault lies in our Triton kernel's launch: plant it in {TRITON}"
)
"""A decorator as `in_place_of`, for a part of our Triton attention."""


def always_split(plan: Plan, packed: Compact) -> Plan:
    """The plan with the prefix in two parts, and tiles so small that a short prefix fills both."""
    quarter, eighth = packed.longest.bit_length() - 2, packed.widest.bit_length() - 3
    return replace(plan, splits=2, tile=1 << max(quarter, eighth, 0))


def merged_wrongly(wrong: Callable[[Tensor, Tensor], tuple[Tensor, Tensor]]) -> Plant:
    """A decorator for a function that changes parts and log-sum-exps before the kernel's merge.

    Short prefixes are split too, so that the merge runs on small cases.
    """

    @in_launch("attend.merge")
    def with_merge(launch: TritonTree, kernel: Kernel, parts: Tensor, sums: Tensor, out: Tensor) -> None:
        launch.merge(kernel, *wrong(parts, sums), out)

    @in_launch("attend.plan")
    def with_plan(launch: TritonTree, query: Tensor, kv_heads: int, packed: Compact) -> Plan:
        return always_split(launch.plan(query, kv_heads, packed), packed)

    def plant(seams: Seams) -> Seams:
        return with_plan(with_merge(seams))

    plant.__doc__ = wrong.__doc__
    return plant


@attention_fault(
    "lanes-beyond-split-threshold",
    "family of catalogue BZ-101: LSE addressed wrongly in the split-KV combine, here without the lane's offset",
    "a batch with two prefixes so long that the kernel splits them",
    on=TRITON,
)
@in_launch("attend.merge")
def later_lanes_merged_by_first(launch: TritonTree, kernel: Kernel, parts: Tensor, sums: Tensor, out: Tensor) -> None:
    """The merge weighs the parts of every lane whose prefix is split by the log-sum-exps of the first such lane.

    The plan is unchanged: the interpreter splits prefixes of 128 columns or more, so the fault needs a long prefix.
    """
    # sums [S, B, H, T]: the parts of the prefix, then the block; a part without columns has minus infinity.
    num_parts = sums[:-1].isfinite().flatten(2).any(-1).sum(0)
    split_lanes = (num_parts > 1).nonzero().flatten().tolist()
    wrong = sums.clone()
    for lane in split_lanes:
        wrong[:, lane] = sums[:, split_lanes[0]]
    launch.merge(kernel, parts, wrong, out)


@attention_fault("values-read-transposed", "layout of values differs from that of keys", "two KV heads", on=TRITON)
@in_launch("attend.pages_of")
def value_strides_exchanged(launch: TritonTree, columns: AttentionInputs) -> Paging:
    """Values are read with the steps of heads and cells exchanged."""
    pages = launch.pages_of(columns)
    count, size, heads, dim = pages.value_cells.shape
    return replace(pages, value_cells=pages.value_cells.reshape(count, heads, size, dim).transpose(1, 2))


@attention_fault("tables-of-first-lane", "block table row of another request", "a batch over pages", on=TRITON)
@in_launch("attend.pages_of")
def tables_of_first_lane(launch: TritonTree, columns: AttentionInputs) -> Paging:
    """Each lane reads the pages of lane 0."""
    pages = launch.pages_of(columns)
    return replace(pages, table=pages.table[:1].expand_as(pages.table).contiguous())


@attention_fault(
    "merged-sums-transposed",
    "catalogue BZ-101: LSE layout wrong in the split-KV combine",
    "a split prefix, two heads and two rows",
    on=TRITON,
)
@merged_wrongly
def sums_transposed(parts: Tensor, sums: Tensor) -> tuple[Tensor, Tensor]:
    """Log-sum-exps are laid out by head and row, and merged as if by row and head."""
    return parts, sums.transpose(2, 3).contiguous().view(sums.shape)


@attention_fault(
    "merged-in-base-two", "catalogue BZ-101: LSE of another layout in the split-KV combine", "a split prefix", on=TRITON
)
@merged_wrongly
def sums_in_base_two(parts: Tensor, sums: Tensor) -> tuple[Tensor, Tensor]:
    """Log-sum-exps in base two are merged as natural ones."""
    return parts, sums * log2(e)


@attention_fault("last-split-dropped", "count of splits off by one", "a split prefix", on=TRITON)
@merged_wrongly
def last_split_dropped(parts: Tensor, sums: Tensor) -> tuple[Tensor, Tensor]:
    """The last part of a split prefix is left out of the merge."""
    # The last entry is the block's, the one before it the prefix's last part.
    kept_parts = [*range(len(parts) - 2), len(parts) - 1]
    return parts[kept_parts], sums[kept_parts]
