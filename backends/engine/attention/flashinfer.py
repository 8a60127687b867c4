"""Attention by FlashInfer's paged prefill kernel under a custom mask.

The calls follow FlashInfer's documented API.
"""

from dataclasses import dataclass
from importlib import import_module
from typing import Any, Protocol

import torch
from torch import Tensor

from specverify.backends.engine.attention.gathered import eager_gathered
from specverify.backends.engine.attention.triton_launch import pages_of
from specverify.backends.engine.columns import Attend, AttentionInputs

DTYPES = (torch.float16, torch.bfloat16)
HEAD_DIMS = (64, 128, 256)
"""Dtypes and head dimensions of FlashInfer's kernels; others are announced as a fallback and run eager attention."""


class Wrapper(Protocol):
    """`flashinfer.BatchPrefillWithPagedKVCacheWrapper`, layout NHD."""

    def plan(self, *positional: Any, **named: Any) -> None:
        """Set the lengths, pages and mask of the batch for the next `run`."""
        ...

    def run(self, query: Tensor, cells: tuple[Tensor, Tensor]) -> Tensor:
        """Attention of `query` [rows of all lanes, H, D] over keys and values [pages, size, kv_heads, D]."""
        ...


@dataclass(frozen=True)
class FlashInfer:
    """FlashInfer's kernel as an `Attend`; see `columns.Attend`.

    The batch is planned anew for every layer, which costs time but changes no result. This class was run against a
    stand-in that follows FlashInfer's documentation, and never on a GPU.

    The mask is boolean, True = visible, flattened lane by lane over [T, columns of the lane]. A row that sees no
    column, which only a padding row does, is shown column 0, and its output is set to zeros.

    Attributes:
        wrapper: FlashInfer's wrapper, which plans and runs.
        eager: The attention for dtypes and head dimensions without a kernel.
    """

    wrapper: Wrapper
    eager: Attend = eager_gathered

    def __call__(self, query: Tensor, columns: AttentionInputs, scaling: float) -> Tensor:
        """Attention of `query` [B, H, T, D] over `columns`, [B, H, T, D] in the dtype of the query."""
        columns.refuse_cap("FlashInfer")
        columns.refuse_indexed("FlashInfer")
        columns.refuse_sinks("FlashInfer")
        columns.refuse_unequal("FlashInfer")
        lanes, heads, rows, dim = query.shape
        if query.dtype not in DTYPES or dim not in HEAD_DIMS:
            dtype = str(query.dtype).removeprefix("torch.")
            columns.announce(f"FlashInfer has no kernel for {dtype}, head_dim {dim}: eager attention ran")
            return self.eager(query, columns, scaling)
        pages = pages_of(columns)
        lengths = pages.lengths.tolist()
        counts = [-(-length // pages.size) for length in lengths]
        masks = [columns.visible[lane, 0, :, :length].clone() for lane, length in enumerate(lengths)]
        blind = torch.stack([~mask.any(-1) for mask in masks])
        # Column 0 stands in, so that every row has a column for its softmax; these rows are set to zeros below.
        for lane, mask in enumerate(masks):
            mask[blind[lane], 0] = True
        self.wrapper.plan(
            _ends([rows] * lanes, query.device),
            _ends(counts, query.device),
            torch.cat([pages.table[lane, :count] for lane, count in enumerate(counts)]),
            # Columns in the last page of each lane, from 1 to the page size.
            torch.tensor([(length - 1) % pages.size + 1 for length in lengths], dtype=torch.int32, device=query.device),
            heads,
            pages.key_cells.shape[2],
            dim,
            pages.size,
            custom_mask=torch.cat([mask.flatten() for mask in masks]),
            sm_scale=scaling,
            q_data_type=query.dtype,
        )
        flat = query.transpose(1, 2).reshape(lanes * rows, heads, dim)
        output = self.wrapper.run(flat, (pages.key_cells.contiguous(), pages.value_cells.contiguous()))
        return output.view(lanes, rows, heads, dim).transpose(1, 2).masked_fill(blind[:, None, :, None], 0)


def _ends(counts: list[int], device: torch.device) -> Tensor:
    """int32 [len(counts) + 1]: the offset at which each lane begins, and the end of the last lane."""
    return torch.tensor([0, *torch.tensor(counts).cumsum(0).tolist()], dtype=torch.int32, device=device)


def installed_kernel(device: str) -> FlashInfer:
    """FlashInfer's own kernels, with 128 MiB of workspace.

    Raises:
        ImportError: if FlashInfer is not installed.
    """
    flashinfer = import_module("flashinfer")
    workspace = torch.empty(128 * 2**20, dtype=torch.uint8, device=device)
    return FlashInfer(flashinfer.BatchPrefillWithPagedKVCacheWrapper(workspace, "NHD"))
