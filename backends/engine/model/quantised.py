"""Quantised matrices of drafts, by the rule of `specverify.reference.quantisation.QUANTISED`.

They become numbers with a scale for each row when the model is opened; forwards run on the products in the working
dtype.
"""

from collections.abc import Callable
from typing import TypeAlias

import torch
from torch import Tensor

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
