"""FlashInfer's paged prefill kernel under a custom mask, as an attention of the engine, by its documented API."""

from dataclasses import dataclass
from importlib import import_module
from typing import Any, Protocol

import torch
from torch import Tensor

from backends.engine.attention.gathered import eager_gathered
from backends.engine.attention.triton_launch import paged
from backends.engine.columns import Attend, AttentionInputs

DTYPES = (torch.float16, torch.bfloat16)
HEAD_DIMS = (64, 128, 256)
"""The shapes and dtypes that its kernels are compiled for; others are announced and left to eager attention."""


class Wrapper(Protocol):
    """`flashinfer.BatchPrefillWithPagedKVCacheWrapper`, layout NHD."""

    def plan(self, *positional: Any, **named: Any) -> None:
        """Lengths, pages and mask of the batch."""
        ...

    def run(self, query: Tensor, cells: tuple[Tensor, Tensor]) -> Tensor:
        """Attention of `query` [rows of all lanes, H, D] over keys and values [pages, size, kv_heads, D]."""
        ...


@dataclass(frozen=True)
class FlashInfer:
    """An attention, see `columns.Attend`; it is planned anew for every layer, which costs time and no correctness.

    It was run against a stand-in that follows the documentation, and never on a GPU.

    The mask is boolean, True = visible, flattened lane by lane over [T, columns of the lane]. A row that sees nothing,
    which only padding does, is shown column 0 and comes out as zeros.

    Attributes:
        wrapper: What plans and runs.
        eager: What takes dtypes and head dimensions that it has no kernel for.
    """

    wrapper: Wrapper
    eager: Attend = eager_gathered

    def __call__(self, query: Tensor, columns: AttentionInputs, scaling: float) -> Tensor:
        """[B, H, T, D] in the query's dtype."""
        columns.refuse_cap("FlashInfer")
        lanes, heads, rows, dim = query.shape
        if query.dtype not in DTYPES or dim not in HEAD_DIMS:
            dtype = str(query.dtype).removeprefix("torch.")
            columns.announce(f"FlashInfer has no kernel for {dtype}, head_dim {dim}: eager attention ran")
            return self.eager(query, columns, scaling)
        pages = paged(columns)
        lengths = pages.lengths.tolist()
        counts = [-(-length // pages.size) for length in lengths]
        shown = [columns.visible[lane, 0, :, :length].clone() for lane, length in enumerate(lengths)]
        blind = torch.stack([~one.any(-1) for one in shown])
        for lane, one in enumerate(shown):
            one[blind[lane], 0] = True
        self.wrapper.plan(
            _ends([rows] * lanes, query.device),
            _ends(counts, query.device),
            torch.cat([pages.table[lane, :count] for lane, count in enumerate(counts)]),
            torch.tensor([(length - 1) % pages.size + 1 for length in lengths], dtype=torch.int32, device=query.device),
            heads,
            pages.key_cells.shape[2],
            dim,
            pages.size,
            custom_mask=torch.cat([one.flatten() for one in shown]),
            sm_scale=scaling,
            q_data_type=query.dtype,
        )
        flat = query.transpose(1, 2).reshape(lanes * rows, heads, dim)
        mixed = self.wrapper.run(flat, (pages.key_cells.contiguous(), pages.value_cells.contiguous()))
        return mixed.view(lanes, rows, heads, dim).transpose(1, 2).masked_fill(blind[:, None, :, None], 0)


def _ends(counts: list[int], device: torch.device) -> Tensor:
    """int32 [len(counts) + 1]: where each lane begins, and the end of the last."""
    return torch.tensor([0, *torch.tensor(counts).cumsum(0).tolist()], dtype=torch.int32, device=device)


def installed(device: str) -> FlashInfer:
    """FlashInfer's own kernels, with 128 MiB of workspace.

    Raises:
        ImportError: where it is not installed.
    """
    theirs = import_module("flashinfer")
    workspace = torch.empty(128 * 2**20, dtype=torch.uint8, device=device)
    return FlashInfer(theirs.BatchPrefillWithPagedKVCacheWrapper(workspace, "NHD"))
