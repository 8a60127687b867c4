"""Rows of padding without a finite number, as a fixed-shape launch has them in unfilled buffers.

A captured graph runs as many rows as it was captured for. What stands in those that no request fills is undefined, NaN
among it, and no kernel may let it reach another row: not by a weight of 0, nor by a scale over the batch (vLLM issue
40047).
"""

from collections.abc import Iterator
from contextlib import contextmanager
from typing import Any

import torch
from torch import Tensor


def beyond(filled: list[int], width: int, device: torch.device) -> Tensor:
    """Whether each row of each lane is one of padding, bool [lanes, width]; `filled` rows of a lane are none."""
    return torch.arange(width, device=device) >= torch.tensor(filled, device=device)[:, None]


def may_lack_numbers(dtype: torch.dtype, device: torch.device) -> bool:
    """Whether a row without a finite number stays by itself in the matrix products of a dtype on a device.

    On the CPU in bfloat16 it does not: a row of odd width is multiplied together with the number behind it, at a
    weight of 0, and 0 * NaN is NaN (torch 2.13.0 with oneDNN on AMX: `tests/strangers/kernels/torch_linear_bfloat16.py`
    shows it).
    """
    return not (device.type == "cpu" and dtype == torch.bfloat16)


@contextmanager
def spoiled_padding(model: Any, filled: list[int]) -> Iterator[None]:
    """Inside the `with`, the rows behind the first `filled` ones of each lane are NaN from their embedding on.

    `model` is a transformers model, whose layers then compute NaN in these rows.
    """

    def spoil(_: Any, __: Any, output: Tensor) -> Tensor:
        return output.masked_fill(beyond(filled, output.shape[1], output.device)[..., None], torch.nan)

    handle = model.get_input_embeddings().register_forward_hook(spoil)
    try:
        yield
    finally:
        handle.remove()
