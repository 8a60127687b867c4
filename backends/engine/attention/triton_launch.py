"""The launch of our Triton kernel: block sizes and splits from the shape, then one kernel, or two where it splits."""

from collections.abc import Callable
from dataclasses import dataclass
from typing import Any

import torch
from torch import Tensor

from backends.engine.attention.compact import Compact, compact
from backends.engine.attention.gathered import eager_gathered
from backends.engine.columns import Attend, AttentionInputs, Paging

Kernel = Any
"""A Triton kernel, compiled on its first launch or interpreted: `kernel[grid](*arguments, **constants)`."""


@dataclass(frozen=True)
class Plan:
    """How one launch is cut.

    Attributes:
        rows: Rows of a tile, a power of two of at least 16: query heads of one KV head times tree rows.
        tile: Columns that a program multiplies at once, a power of two of at least 16.
        splits: Parts of the prefix that programs of their own take; 0 for one program for prefix and block.
        warps: Warps of a program.
        stages: Loads in flight.
    """

    rows: int
    tile: int
    splits: int
    warps: int = 4
    stages: int = 2


def power_of_two(number: int) -> int:
    """The smallest power of two that is at least `number` and at least 16, the least that a dot product takes."""
    return max(16, 1 << (number - 1).bit_length())


def plan_for_cpu(query: Tensor, kv_heads: int, packed: Compact) -> Plan:
    """Few and large tiles: to the interpreter every operation costs the same, whatever its size.

    Prefixes of 128 columns and more are split in two, so that both ways of the kernel run.
    """
    flat = query.shape[1] // kv_heads * query.shape[2]
    tile = min(power_of_two(max(packed.longest, packed.widest, 1)), 64)
    return Plan(min(power_of_two(flat), 128), tile, 2 if packed.longest >= 128 else 0)


def plan_for_gpu(query: Tensor, kv_heads: int, packed: Compact) -> Plan:
    """As many splits as fill the device twice, none shorter than eight tiles.

    float32 is multiplied without tensor cores, from registers, so its tiles are small.
    """
    lanes, heads, rows, dim = query.shape
    flat = heads // kv_heads * rows
    small = query.dtype == torch.float32
    tile = (32 if dim <= 128 else 16) if small else (64 if dim <= 128 else 32)
    height = min(power_of_two(flat), 32 if small else 128 if dim <= 128 else 64)
    programs = lanes * kv_heads * -(-flat // height)
    busy = 2 * torch.cuda.get_device_properties(query.device).multi_processor_count
    splits = min(busy // programs, packed.longest // (8 * tile), 64)
    return Plan(height, tile, splits if splits > 1 else 0, 8 if height == 128 else 4, 2)


def paged(columns: AttentionInputs) -> Paging:
    """The pages of `columns`; gathered keys are taken for one page a lane, read where they lie."""
    if columns.paging is not None:
        return columns.paging
    lanes, _, width, _ = columns.key.shape
    table = torch.arange(lanes, dtype=torch.int32, device=columns.key.device)[:, None]
    lengths = torch.full((lanes,), width, dtype=torch.int32, device=columns.key.device)
    return Paging(columns.key.transpose(1, 2), columns.value.transpose(1, 2), table, lengths)


def merge_by(kernel: Kernel, parts: Tensor, sums: Tensor, out: Tensor) -> None:
    """Merge `parts` float32 [S, B, H, T, D] by `sums` float32 [S, B, H, T] into `out` [B, H, T, D]."""
    count, dim = sums[0].numel(), out.shape[-1]
    rows = 16 if out.is_cuda else min(power_of_two(count), 1024)
    kernel[(-(-count // rows),)](
        parts, sums, out, count, PARTS=len(parts), DIM=dim, WIDE=power_of_two(dim), ROWS=rows, num_warps=4
    )


@dataclass(frozen=True)
class TritonTree:
    """An attention, see `columns.Attend`: our Triton kernel over paged or gathered columns; its parts can be exchanged.

    Prefills go through it too: their rows are a block of causal bits over the prefix committed before, and a path of
    their own would be one more to verify.

    Attributes:
        tree: `triton_kernels.tree`.
        merged: `triton_kernels.merge`.
        plan: Query, KV heads and what rows see to how the launch is cut.
        compact: Query and columns to what each row sees.
        paged: Columns to the pages that the kernel reads.
        merge: Partial softmaxes to the attention.
        widen: Whether 16-bit numbers are multiplied as float32.
        eager: What runs in its place where no fused attention shall.
    """

    tree: Kernel
    merged: Kernel
    plan: Callable[[Tensor, int, Compact], Plan]
    compact: Callable[[Tensor, AttentionInputs], Compact] = compact
    paged: Callable[[AttentionInputs], Paging] = paged
    merge: Callable[[Kernel, Tensor, Tensor, Tensor], None] = merge_by
    widen: bool = False
    eager: Attend = eager_gathered

    def __call__(self, query: Tensor, columns: AttentionInputs, scaling: float) -> Tensor:
        """Attention of `query` [B, H, T, D] over `columns`, in the dtype of the query.

        Raises:
            ValueError: see `compact.compact`; and for float64, which Triton's dot product does not take.
        """
        columns.refuse_cap("the Triton kernel")
        if query.dtype == torch.float64:
            raise ValueError("the Triton kernel computes in float32, float16 and bfloat16, not in float64")
        packed = self.compact(query, columns)
        pages = self.paged(columns)
        lanes, heads, rows, dim = query.shape
        kv_heads = pages.key_cells.shape[2]
        plan = self.plan(query, kv_heads, packed)
        query, keys, values = (_dense(one) for one in (query, pages.key_cells, pages.value_cells))
        if keys.stride() != values.stride():
            keys, values = keys.contiguous(), values.contiguous()
        out = torch.empty((lanes, heads, rows, dim), dtype=query.dtype, device=query.device)
        parts, sums = out, packed.first  # without splits nothing is written to `sums`
        if plan.splits:
            parts = torch.empty((plan.splits + 1, *out.shape), dtype=torch.float32, device=out.device)
            sums = torch.empty(parts.shape[:-1], dtype=torch.float32, device=out.device)
        group = heads // kv_heads
        grid = (lanes * kv_heads, -(-group * rows // plan.rows), plan.splits + 1)
        self.tree[grid](
            *(query, keys, values, pages.table, packed.first, packed.prefix, packed.widths, packed.bits, parts, sums),
            *(query.stride()[:3]),
            *(keys.stride()[:3]),
            *(pages.table.shape[1], pages.size, rows, packed.bits.shape[2], kv_heads, scaling),
            **{"GROUP": group, "DIM": dim, "WIDE": power_of_two(dim), "ROWS": plan.rows, "TILE": plan.tile},
            **{"SPLITS": plan.splits, "PARTLY": packed.partly, "WIDEN": self.widen and query.dtype != torch.float32},
            **{"num_warps": plan.warps, "num_stages": plan.stages},
        )
        if plan.splits:
            self.merge(self.merged, parts, sums, out)
        return out


def _dense(tensor: Tensor) -> Tensor:
    """The kernel walks along a head with stride 1; the other strides it is told, the same for keys and values."""
    return tensor if tensor.stride(-1) == 1 else tensor.contiguous()


def interpreted() -> TritonTree:
    """The kernel under Triton's interpreter, on the CPU; neither the environment nor other kernels notice.

    Raises:
        ImportError: where Triton, or its interpreter, is not there.
    """
    from triton.runtime.interpreter import InterpretedFunction

    from backends.engine.attention import triton_kernels as kernels

    return TritonTree(InterpretedFunction(kernels.tree), InterpretedFunction(kernels.merge), plan_for_cpu, widen=True)


def compiled() -> TritonTree:
    """The kernel as Triton compiles it for the GPU of its tensors.

    Raises:
        ImportError: where Triton is not there.
    """
    import triton

    from backends.engine.attention import triton_kernels as kernels

    return TritonTree(triton.jit(kernels.tree), triton.jit(kernels.merge), plan_for_gpu)
