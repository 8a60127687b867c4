"""The launch of the Triton kernels of tree attention.

A `Plan` chooses tile sizes and the number of splits from the shapes. Without splits one kernel runs, with splits a
second one merges the parts.
"""

from collections.abc import Callable
from dataclasses import dataclass, replace
from typing import Any

import torch
from torch import Tensor

from specverify.backends.engine.attention.compact import Compact, compact
from specverify.backends.engine.attention.gathered import eager_gathered
from specverify.backends.engine.columns import Attend, AttentionInputs, Paging

Kernel = Any
"""A Triton kernel, compiled on its first launch or interpreted: `kernel[grid](*arguments, **constants)`."""


@dataclass(frozen=True)
class Plan:
    """The tile sizes and splits of one launch.

    Attributes:
        rows: Rows of a tile, a power of two of at least 16; the rows are query heads of one KV head times tree rows.
        tile: Columns that a program multiplies at once, a power of two of at least 16.
        splits: Number of parts of the prefix, each with its own program; with 0 one program takes prefix and block.
        warps: Warps of a program.
        stages: Loads in flight.
    """

    rows: int
    tile: int
    splits: int
    warps: int = 4
    stages: int = 2


SMALLEST = 16
"""The smallest side of `tl.dot`."""


def power_of_two(number: int) -> int:
    """The smallest power of two that is at least `number` and at least 16, the smallest side of `tl.dot`."""
    return max(16, 1 << (number - 1).bit_length())


def plan_for_cpu(query: Tensor, kv_heads: int, packed: Compact) -> Plan:
    """Plan few and large tiles, because every operation costs the interpreter the same time, whatever its size.

    A prefix of 128 columns or more is split in two, so that cases run the kernel with splits and without.
    """
    flat = query.shape[1] // kv_heads * query.shape[2]
    tile = min(power_of_two(max(packed.longest, packed.widest, 1)), 64)
    return Plan(min(power_of_two(flat), 128), tile, 2 if packed.longest >= 128 else 0)


def plan_for_gpu(query: Tensor, kv_heads: int, packed: Compact) -> Plan:
    """Plan as many splits as fill the device twice, none shorter than eight tiles.

    Tiles are as large as registers and the device's shared memory hold; `tests/kernel_resources.json` has what they
    take. float32 is multiplied without tensor cores, from registers, so its tiles are small.
    """
    # Wide heads get smaller tiles: a tile of keys holds tile * head_dim numbers.
    lanes, heads, rows, dim = query.shape
    flat = heads // kv_heads * rows
    device = torch.cuda.get_device_properties(query.device)
    is_float32 = query.dtype == torch.float32
    if is_float32:
        tile = 32 if dim <= 64 else 16
        most_rows = 32 if dim <= 128 else 16
        warps = 4 if dim <= 64 else 8
    else:
        # Before Hopper both operands of a product lie in registers.
        widest = 128 if getattr(device, "major", HOPPER) >= HOPPER else 64
        tile = 64 if dim <= widest else 32
        most_rows = 128 if dim <= 128 else 64
        warps = 4 if dim <= 128 else 8
    height = min(power_of_two(flat), most_rows)
    plan = Plan(height, tile, 0, 8 if height == 128 else warps, 2)
    plan = fit_shared_memory(plan, power_of_two(dim), query.element_size(), _shared_memory_of(device))
    programs = lanes * kv_heads * -(-flat // plan.rows)
    splits = min(2 * device.multi_processor_count // programs, packed.longest // (8 * plan.tile), 64)
    # One split alone would only add a merge.
    return replace(plan, splits=splits if splits > 1 else 0)


HOPPER = 9
"""The major compute capability of Hopper."""

LEAST_SHARED_MEMORY = 48 * 1024
"""Bytes of shared memory that a block may have on every GPU, where the device tells no more."""


def _shared_memory_of(device: Any) -> int:
    return int(getattr(device, "shared_memory_per_block_optin", 0) or LEAST_SHARED_MEMORY)


BARRIERS = 1024
"""Bytes of shared memory beside the tiles; newer GPUs keep barriers there, 544 bytes on sm_100."""


def shared_bytes(plan: Plan, wide: int, size: int) -> int:
    """Bytes of shared memory of a block at most: queries, the keys and values in flight, and one tile of scores.

    Args:
        plan: The tiles.
        wide: Numbers of a row of a tile.
        size: Bytes of a number.
    """
    tiles = plan.rows * wide * size + plan.stages * 2 * plan.tile * wide * size + plan.rows * plan.tile * 4
    return tiles + BARRIERS


def fit_shared_memory(plan: Plan, wide: int, size: int, limit: int) -> Plan:
    """`plan` with tiles that `limit` bytes hold: fewer columns first, then fewer rows, then one load in flight."""
    while shared_bytes(plan, wide, size) > limit:
        if plan.tile > SMALLEST:
            plan = replace(plan, tile=plan.tile // 2)
        elif plan.rows > SMALLEST:
            plan = replace(plan, rows=plan.rows // 2)
        elif plan.stages > 1:
            plan = replace(plan, stages=1)
        else:
            break
    return plan


def pages_of(columns: AttentionInputs) -> Paging:
    """The pages of `columns`; gathered keys count as one page per lane and are not copied."""
    if columns.paging is not None:
        return columns.paging
    lanes, _, width, _ = columns.key.shape
    table = torch.arange(lanes, dtype=torch.int32, device=columns.key.device)[:, None]
    lengths = torch.full((lanes,), width, dtype=torch.int32, device=columns.key.device)
    return Paging(columns.key.transpose(1, 2), columns.value.transpose(1, 2), table, lengths)


def merge_by(kernel: Kernel, parts: Tensor, sums: Tensor, out: Tensor) -> None:
    """Merge `parts` float32 [S, B, H, T, D] by `sums` float32 [S, B, H, T] into `out` [B, H, T, D]."""
    count = sums[0].numel()
    dim = out.shape[-1]
    rows = 16 if out.is_cuda else min(power_of_two(count), 1024)
    kernel[(-(-count // rows),)](
        parts, sums, out, count, PARTS=len(parts), DIM=dim, WIDE=power_of_two(dim), ROWS=rows, num_warps=4
    )


@dataclass(frozen=True)
class TritonTree:
    """Our Triton kernel over paged or gathered columns, as an `Attend` with replaceable parts; see `columns.Attend`.

    Prefills use the same kernel: their rows are a block with causal bits over the prefix committed before. A separate
    kernel for prefills would be one more to verify.

    Attributes:
        tree_kernel: `triton_kernels.tree`.
        merge_kernel: `triton_kernels.merge`.
        plan: From query, number of KV heads and visibility to the plan of the launch.
        compact: From query and columns to the visibility of each row.
        pages_of: From columns to the pages that the kernel reads.
        merge: From partial softmaxes to the attention.
        widen: Whether 16-bit numbers are multiplied as float32.
        eager: The attention that replaces this one in a mode without fused attention.
    """

    tree_kernel: Kernel
    merge_kernel: Kernel
    plan: Callable[[Tensor, int, Compact], Plan]
    compact: Callable[[Tensor, AttentionInputs], Compact] = compact
    pages_of: Callable[[AttentionInputs], Paging] = pages_of
    merge: Callable[[Kernel, Tensor, Tensor, Tensor], None] = merge_by
    widen: bool = False
    eager: Attend = eager_gathered

    def __call__(self, query: Tensor, columns: AttentionInputs, scaling: float) -> Tensor:
        """Attention of `query` [B, H, T, D] over `columns`, in the dtype of the query.

        Raises:
            ValueError: see `compact.compact`; and for float64, which Triton's dot product does not take.
        """
        columns.refuse_cap("the Triton kernel")
        columns.refuse_indexed("the Triton kernel")
        columns.refuse_unequal("the Triton kernel")
        if query.dtype == torch.float64:
            raise ValueError("the Triton kernel computes in float32, float16 and bfloat16, not in float64")
        packed = self.compact(query, columns)
        pages = self.pages_of(columns)
        lanes, heads, rows, dim = query.shape
        kv_heads = pages.key_cells.shape[2]
        plan = self.plan(query, kv_heads, packed)
        query, keys, values = (_dense(tensor) for tensor in (query, pages.key_cells, pages.value_cells))
        if keys.stride() != values.stride():  # the kernel is given one set of strides for both
            keys, values = keys.contiguous(), values.contiguous()
        out = torch.empty((lanes, heads, rows, dim), dtype=query.dtype, device=query.device)
        parts = out
        sums = packed.first  # without splits `sums` is not written: any tensor serves as the argument
        if plan.splits:
            parts = torch.empty((plan.splits + 1, *out.shape), dtype=torch.float32, device=out.device)
            sums = torch.empty(parts.shape[:-1], dtype=torch.float32, device=out.device)
        # Without sinks that argument is not read, and any tensor serves.
        sinks = packed.first if columns.sinks is None else columns.sinks.to(torch.float32).contiguous()
        group = heads // kv_heads
        grid = (lanes * kv_heads, -(-group * rows // plan.rows), plan.splits + 1)
        self.tree_kernel[grid](
            *(query, keys, values, pages.table, sinks),
            *(packed.first, packed.prefix, packed.widths, packed.bits, parts, sums),
            *(query.stride()[:3]),
            *(keys.stride()[:3]),
            *(pages.table.shape[1], pages.size, rows, packed.bits.shape[2], kv_heads, scaling),
            **{"GROUP": group, "DIM": dim, "WIDE": power_of_two(dim), "ROWS": plan.rows, "TILE": plan.tile},
            **{"SPLITS": plan.splits, "PARTLY": packed.partly, "WIDEN": self.widen and query.dtype != torch.float32},
            **{"SINKS": columns.sinks is not None},
            **{"num_warps": plan.warps, "num_stages": plan.stages},
        )
        if plan.splits:
            self.merge(self.merge_kernel, parts, sums, out)
        return out


def _dense(tensor: Tensor) -> Tensor:
    """`tensor` with stride 1 along a head, which the kernel assumes; the other strides are arguments of the kernel."""
    return tensor if tensor.stride(-1) == 1 else tensor.contiguous()


def interpreted_kernel() -> TritonTree:
    """The kernel under Triton's interpreter, on the CPU; neither the environment nor other kernels are changed.

    Raises:
        ImportError: if Triton or its interpreter is missing.
    """
    from triton.runtime.interpreter import InterpretedFunction

    from specverify.backends.engine.attention import triton_kernels as kernels

    # `widen`, because the interpreter stores bfloat16 as uint16, and NumPy would multiply these as integers.
    return TritonTree(InterpretedFunction(kernels.tree), InterpretedFunction(kernels.merge), plan_for_cpu, widen=True)


def compiled_kernel() -> TritonTree:
    """The kernel, compiled by Triton for the GPU that holds its tensors.

    Raises:
        ImportError: if Triton is missing.
    """
    import triton

    from specverify.backends.engine.attention import triton_kernels as kernels

    return TritonTree(triton.jit(kernels.tree), triton.jit(kernels.merge), plan_for_gpu)
