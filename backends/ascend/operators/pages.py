"""Paged caches of Ascend's attention: cache shapes and block tables."""

from dataclasses import dataclass

import torch
from torch import Tensor

from specverify.backends.ascend.operators.rules import NotEmulated, demand, demand_defined


@dataclass(frozen=True)
class Cache:
    """Keys and values in blocks.

    Attributes:
        key: [blocks, block size, KV_N, D].
        value: As `key`.
        rule: The rule that a block id outside the cache breaks.
    """

    key: Tensor
    value: Tensor
    rule: str = "fia.block-id"

    def columns(self, table: Tensor, length: int) -> tuple[Tensor, Tensor]:
        """Keys and values [KV_N, length, D] of the request with block table `table`, int32 [blocks].

        The device checks no id. While a probe asks for the kernel's behaviour, foreign memory reads as NaN.
        """
        size, total = self.key.shape[1], self.key.shape[0]
        # Division that rounds up: the last block may be partly filled.
        num_blocks = -(-length // size)
        ids = table[:num_blocks].long()
        exists = (ids >= 0) & (ids < total)
        all_there = bool(exists.all()) and len(ids) == num_blocks
        demand_defined(all_there, self.rule, f"block ids {ids.tolist()} for {num_blocks} blocks of a cache of {total}")
        sides = []
        for cells in (self.key, self.value):
            # Clamped for the gather; blocks that do not exist become NaN below.
            blocks = cells[ids.clamp(0, total - 1)]
            if not all_there:
                blocks = blocks.clone()
                blocks[~exists] = float("nan")
            sides.append(blocks.flatten(0, 1)[:length].transpose(0, 1))
        return sides[0], sides[1]


def check_table(table: Tensor, batch: int, size: int, rows: int) -> None:
    """Check a block table and a block size for `batch` requests of `rows` query rows each."""
    check_ids(table, batch)
    # One row goes to the incremental kernel, which takes smaller blocks.
    if rows == 1:
        message = (
            f"blockSize={size}, it need align to 16 when kv dtype is fp16/bf16, and can't be 0 or greater than 512"
        )
        demand(0 < size <= 512 and size % 16 == 0, "fia.block-size-one-row", message)
    else:
        message = f"block size({size}) should be a multiple of 128, and can't greater than 512 when PA enable"
        demand(0 < size <= 512 and size % 128 == 0, "fia.block-size", message)


def check_ids(table: Tensor, batch: int) -> None:
    """Check dtype and shape of a block table for `batch` requests."""
    message = f"blockTable only support int32 when PA enable, got {table.dtype}"
    demand(table.dtype == torch.int32, "fia.table-int32", message)
    message = f"the block table must be (B = {batch}, blocks), but is {list(table.shape)}"
    demand(table.dim() == 2 and table.shape[0] == batch, "fia.table-shape", message)


def cache_of(key: Tensor, value: Tensor, heads: int, dim: int, size: int, layout: str) -> Cache:
    """The cache with `key` and `value` as its cells, for a query in `layout`."""
    if key.dim() == 5:
        raise NotEmulated("an NZ cache")
    message = f"keyCache {list(key.shape)} with blockSize {size}, {heads} KV heads, D = {dim} and a query in {layout}"
    if key.dim() == 3:
        demand(key.shape[2] <= 65535, "fia.cache-width", f"KV_N*D of the cache is {key.shape[2]}, at most 65535")
        demand(key.shape[1:] == (size, heads * dim) and key.shape == value.shape, "fia.cache-shape", message)
        return Cache(key.view(-1, size, heads, dim), value.view(-1, size, heads, dim))
    fits = key.dim() == 4 and layout in ("BNSD", "TND") and key.shape == value.shape
    demand(fits and tuple(key.shape[1:]) == (heads, size, dim), "fia.cache-shape", message)
    return Cache(key.transpose(1, 2), value.transpose(1, 2))
