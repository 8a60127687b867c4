"""Weights of 8 bits: quantised matrices of drafts, and checkpoints that store 8-bit floats.

The rule of a draft is that of `specverify.reference.quantisation.QUANTISED`: its matrices become numbers with a scale
for each row when the model is opened; its forwards run on the products in the working dtype. The rule of a checkpoint
is that of `specverify.reference.files.block_scales`. transformers 5.23 has its own reading, which takes the size of a
block from the number of scales: it is another one where the last block of an axis is cut off.
"""

from collections.abc import Callable
from concurrent.futures import ThreadPoolExecutor
from pathlib import Path
from typing import TypeAlias

import torch
from safetensors import safe_open
from torch import Tensor

from specverify.backends.base import Unsupported
from specverify.reference.files.block_scales import FACTORS
from specverify.reference.files.stored import EIGHT_BITS, FLOATS
from specverify.reference.files.weight_files import weight_files
from specverify.reference.quantisation import QUANTISED

NAMES = ("_proj.weight", "fc.weight", ".linear.weight")
"""Ends of the names of matrices that are quantised; `fc` and `linear` are matrices of heads."""

Dequantise: TypeAlias = Callable[[Tensor, Tensor], Tensor]
"""From numbers [out, in] and scales [out, 1] to weights, float64 [out, in]."""


def quantise(weight: Tensor, kind: str) -> tuple[Tensor, Tensor]:
    """The numbers of `weight` [out, in], int8 or float8_e4m3fn, and the scale of each row, float32 [out, 1]."""
    single = weight.float()
    scale = single.abs().amax(1, keepdim=True) / QUANTISED[kind]
    scale[scale == 0] = 1
    quotient = single / scale
    return (quotient.round().to(torch.int8) if kind == "int8" else quotient.to(torch.float8_e4m3fn)), scale


def dequantise(numbers: Tensor, scale: Tensor) -> Tensor:
    """The weights for which the numbers stand; the products are exact in float64."""
    return numbers.double() * scale.double()


def quantise_state(state: dict[str, Tensor], kind: str, product: Dequantise) -> dict[str, Tensor]:
    """The weights with every matrix of NAMES replaced by its quantised values, in the dtype that it had."""
    return {
        name: product(*quantise(weight, kind)).to(weight.dtype) if name.endswith(NAMES) else weight
        for name, weight in state.items()
    }


def blockwise_product(numbers: Tensor, factors: Tensor, rows: int, columns: int) -> Tensor:
    """The weights [out, in], float64, of 8-bit numbers and of factors [ceil(out / rows), ceil(in / columns)]."""
    spread = factors.double().repeat_interleave(rows, 0).repeat_interleave(columns, 1)
    return numbers.double() * spread[: numbers.shape[0], : numbers.shape[1]]


def dequantise_checkpoint(folder: Path, rows: int, columns: int, dtype: torch.dtype) -> dict[str, Tensor]:
    """Every tensor of the safetensors files of a folder, 8-bit floats multiplied by their factors, in `dtype`.

    Raises:
        Unsupported: The factors of a matrix are missing.
    """
    # A thread of its own: a torch function mode of the caller (`transformers_reference.wide`) would replace the dtypes
    # that safetensors names, and modes belong to threads.
    with ThreadPoolExecutor(1) as apart:
        return apart.submit(_read, folder, rows, columns, dtype).result()


def _read(folder: Path, rows: int, columns: int, dtype: torch.dtype) -> dict[str, Tensor]:
    state = dict[str, Tensor]()
    for file in weight_files(folder, {**FLOATS, **EIGHT_BITS})[1]:
        with safe_open(file, framework="pt") as tensors:
            state |= {name: tensors.get_tensor(name) for name in tensors.keys()}  # noqa: SIM118  # no mapping
    factors = {name: state.pop(name) for name in [*state] if name.endswith(FACTORS)}
    for name, tensor in state.items():
        if tensor.dtype == torch.float8_e4m3fn:
            if f"{name}{FACTORS}" not in factors:
                raise Unsupported(f"{folder}: tensor {name}{FACTORS} is missing, the factors of 8-bit floats")
            tensor = blockwise_product(tensor, factors[f"{name}{FACTORS}"], rows, columns)
        state[name] = tensor.to(dtype)
    return state
