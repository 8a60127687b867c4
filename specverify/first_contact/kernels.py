"""Launches of our Triton kernels, one for each way in which the JIT specialises them.

Each is compared with the split path in torch. The JIT makes an argument of value 1 a constant and knows a multiple of
16, so that each kind of value is other code. The scenes hold one row and many, one KV head and several, pages of one
cell, an odd number and a multiple of 16; with splits of the prefix and without, with sinks and without, under a window
and without, for narrow and wide heads.
"""

import time
from collections.abc import Iterator
from dataclasses import dataclass, replace
from itertools import product
from typing import Any

import torch
from torch import Tensor

from specverify.backends.engine.attention.compact import Compact
from specverify.backends.engine.attention.measured.ways import TRITON, ways_on
from specverify.backends.engine.attention.split import Split
from specverify.backends.engine.attention.triton_launch import Plan
from specverify.backends.engine.columns import AttentionInputs, Paging
from specverify.first_contact.cases import LEFT

KERNEL_DTYPES = ("float32", "bfloat16", "float16")
"""The dtypes of our kernels."""

HEAD_DIMS = (16, 64, 80, 128, 256)
"""Widths of heads: those of real models, and one that no power of two holds."""

SIZES = ((1, 1, 1), (1, 4, 7), (7, 1, 16), (16, 2, 1), (33, 2, 16))
"""Rows, KV heads, and cells of a page: ones, odd numbers, and multiples of 16."""

PREFIX = 70
"""Committed columns: more than a tile, and no multiple of one."""

SLACK = {"float32": 64 * 2.0**-24, "bfloat16": 4 * 2.0**-8, "float16": 4 * 2.0**-11}
"""How far two attentions of numbers up to 4 may lie apart, in units of the largest value."""


@dataclass(frozen=True)
class Launch:
    """One launch of the kernels.

    Attributes:
        dim: Numbers of a head.
        rows: Rows of the tree.
        kv_heads: KV heads; each serves two query heads.
        page: Cells of a page.
        splits: Parts of the prefix with a program of their own; 0 for one program.
        window: Columns of the prefix that rows see; 0 for all.
        sinks: Whether each head has a sink.
    """

    dim: int
    rows: int
    kv_heads: int
    page: int
    splits: int
    window: int
    sinks: bool

    def __str__(self) -> str:
        return (
            f"head {self.dim}, {self.rows} rows, {self.kv_heads} KV heads, page {self.page}, "
            f"{self.splits} splits, window {self.window}{', sinks' if self.sinks else ''}"
        )


def launches() -> Iterator[Launch]:
    """All launches of one dtype."""
    for dim, (rows, kv_heads, page), splits, (window, sinks) in product(
        HEAD_DIMS, SIZES, (0, 3), ((0, False), (9, True))
    ):
        yield Launch(dim, rows, kv_heads, page, splits, window, sinks)


def inputs_of(launch: Launch, dtype: torch.dtype, device: str) -> tuple[Tensor, AttentionInputs]:
    """Query and columns of a launch: a chain of rows over a prefix in pages, random numbers, NaN in free cells."""
    generator = torch.Generator().manual_seed(launch.dim * launch.rows)
    width = PREFIX + launch.rows
    pages = -(-width // launch.page)
    cells = torch.full((2, pages + 1, launch.page, launch.kv_heads, launch.dim), torch.nan)
    numbers = torch.randn(2, width, launch.kv_heads, launch.dim, generator=generator)
    order = torch.randperm(pages, generator=generator) + 1
    for column in range(width):
        cells[:, order[column // launch.page], column % launch.page] = numbers[:, column]
    query = torch.randn(1, 2 * launch.kv_heads, launch.rows, launch.dim, generator=generator)
    visible = torch.ones(launch.rows, width, dtype=torch.bool).tril(PREFIX)
    if launch.window:
        visible[:, : PREFIX - launch.window] = False
    sinks = torch.randn(2 * launch.kv_heads, generator=generator).to(device) if launch.sinks else None
    key_cells, value_cells = cells.to(device, dtype).unbind(0)
    paging = Paging(
        key_cells,
        value_cells,
        order.to(device, torch.int32)[None],
        torch.tensor([width], dtype=torch.int32, device=device),
    )
    columns = AttentionInputs(
        key_cells[:1, :0].transpose(1, 2),
        value_cells[:1, :0].transpose(1, 2),
        visible[None, None].to(device),
        torch.tensor([PREFIX], dtype=torch.int32),
        paging,
        lambda _: None,
        sinks=sinks,
    )
    return query.to(device, dtype), columns


def launch_kernels(device: str, dtype: str, until: float) -> tuple[bool, dict[str, Any]]:
    """Whether a launch differs from the split path or raises; how many ran, and each that did not agree.

    From the time `until` of `time.monotonic` on no further launch begins; LEFT counts those that did not.

    Raises:
        ImportError: Triton is missing.
    """
    kernel: Any = next(way.attend for way in ways_on(device) if way.name == TRITON)
    reference = Split()
    worst = 0.0
    faulty: list[str] = []
    count = 0
    left = 0
    for launch in launches():
        if time.monotonic() >= until:
            left += 1
            continue
        count += 1
        query, columns = inputs_of(launch, getattr(torch, dtype), device)

        def plan(query: Tensor, kv_heads: int, packed: Compact, launch: Launch = launch) -> Plan:
            planned: Plan = kernel.plan(query, kv_heads, packed)
            return replace(planned, splits=launch.splits)

        try:
            expected = reference(query, columns, launch.dim**-0.5).float()
            observed = replace(kernel, plan=plan)(query, columns, launch.dim**-0.5).float()
            error = float((observed - expected).abs().max()) / max(1.0, float(expected.abs().max()))
        except Exception as why:  # a compiler or a driver may raise anything, and the next launch is another kernel
            faulty.append(f"{launch}: {type(why).__name__}: {' '.join(str(why).split())[:200]}")
            continue
        worst = max(worst, error)
        if not error <= SLACK[dtype]:
            faulty.append(f"{launch}: {error:.2g} apart, at most {SLACK[dtype]:.2g}")
    figures = {"launches": count, LEFT: left or None, "worst": worst, "bound": SLACK[dtype], "faulty": faulty[:20]}
    return bool(faulty), figures
