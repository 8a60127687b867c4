"""The tensors of a checkpoint whose folder transformers cannot be handed.

Its weights are quantised, or it holds a text model beside towers of other modalities. transformers 5.23 has readings of
its own of quantised weights: that of 8-bit floats takes the size of a block from the number of scales, which is another
one where the last block of an axis is cut off; that of 4-bit floats needs kernels from the hub.
"""

from concurrent.futures import ThreadPoolExecutor
from pathlib import Path
from typing import Any

import torch
from safetensors import safe_open
from torch import Tensor

from specverify.backends.base import Unsupported
from specverify.reference.files import mxfp4
from specverify.reference.files.block_scales import FACTORS, block_size
from specverify.reference.files.stored import EIGHT_BITS, FLOATS, INTEGERS
from specverify.reference.files.text_model import is_composite, text_tensor
from specverify.reference.files.weight_files import weight_files


def checkpoint_state(folder: Path, content: dict[str, Any], dtype: torch.dtype) -> dict[str, Tensor]:
    """Every tensor of the safetensors files of a folder, quantised ones multiplied by their factors, in `dtype`.

    The other tensors are as they are stored: transformers holds some of them wider than the working dtype.

    Of a model of several modalities it is every tensor of the text model, by its name in a checkpoint of that alone.

    Args:
        folder: The checkpoint.
        content: What its config.json holds.
        dtype: The working dtype, that of the products.

    Raises:
        Unsupported: The factors of a matrix are missing.
        UnreadableCheckpoint: The weights are quantised in another way.
    """
    # A thread of its own: a torch function mode of the caller (`transformers_reference.wide`) would replace the dtypes
    # that safetensors names, and modes belong to threads.
    with ThreadPoolExecutor(1) as apart:
        return apart.submit(_read, folder, content, dtype).result()


def _read(folder: Path, content: dict[str, Any], dtype: torch.dtype) -> dict[str, Tensor]:
    state = dict[str, Tensor]()
    for file in weight_files(folder, {**FLOATS, **INTEGERS, **EIGHT_BITS})[1]:
        with safe_open(file, framework="pt") as tensors:
            state |= {name: tensors.get_tensor(name) for name in tensors.keys()}  # noqa: SIM118  # no mapping
    if is_composite(content):
        named_tensors = ((text_tensor(name), tensor) for name, tensor in state.items())
        state = {name: tensor for name, tensor in named_tensors if name is not None}
        content = content["text_config"] | {name: content[name] for name in ("quantization_config",) if name in content}
    if mxfp4.is_mxfp4(content):
        return _unpack(folder, state, dtype)
    block = block_size(folder / "config.json", content)
    return state if block is None else _scale(folder, state, block, dtype)


def _scale(folder: Path, state: dict[str, Tensor], block: tuple[int, int], dtype: torch.dtype) -> dict[str, Tensor]:
    factors = {name: tensor for name, tensor in state.items() if name.endswith(FACTORS)}
    scaled = {name: tensor for name, tensor in state.items() if name not in factors}
    for name, tensor in scaled.items():
        if tensor.dtype == torch.float8_e4m3fn:
            if f"{name}{FACTORS}" not in factors:
                raise Unsupported(f"{folder}: tensor {name}{FACTORS} is missing, the factors of 8-bit floats")
            scaled[name] = blockwise_product(tensor, factors[f"{name}{FACTORS}"], *block).to(dtype)
    return scaled


def blockwise_product(numbers: Tensor, factors: Tensor, rows: int, columns: int) -> Tensor:
    """The weights [out, in], float64, of 8-bit numbers and of factors [ceil(out / rows), ceil(in / columns)]."""
    spread = factors.double().repeat_interleave(rows, 0).repeat_interleave(columns, 1)
    return numbers.double() * spread[: numbers.shape[0], : numbers.shape[1]]


def _unpack(folder: Path, state: dict[str, Tensor], dtype: torch.dtype) -> dict[str, Tensor]:
    unpacked = dict[str, Tensor]()
    for name, tensor in state.items():
        if name.endswith(mxfp4.BLOCKS):
            stack = name.removesuffix(mxfp4.BLOCKS)
            if f"{stack}{mxfp4.SCALES}" not in state:
                raise Unsupported(f"{folder}: tensor {stack}{mxfp4.SCALES} is missing, the scales of 4-bit floats")
            unpacked[stack] = four_bit_product(tensor, state[f"{stack}{mxfp4.SCALES}"]).to(dtype)
        elif not name.endswith(mxfp4.SCALES):
            unpacked[name] = tensor
    return unpacked


def four_bit_product(blocks: Tensor, scales: Tensor) -> Tensor:
    """The stack, float64 [experts, in, out], of bytes [experts, out, in / 32, 16] and scales [..., in / 32].

    The products are exact.
    """
    numbers = torch.tensor(mxfp4.NUMBERS, dtype=torch.float64)
    lower, upper = numbers[(blocks % 16).long()], numbers[blocks.div(16, rounding_mode="floor").long()]
    exponents = scales.double()[..., None] - mxfp4.BIAS
    weights = torch.stack([lower, upper], dim=-1).flatten(-2) * torch.exp2(exponents)
    return weights.flatten(-2).transpose(-1, -2).contiguous()
