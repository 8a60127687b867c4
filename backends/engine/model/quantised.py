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

OF_FOUR_BITS = (*(f"{part}_proj.weight" for part in ("gate", "up", "down")), ".linear.weight")
"""The matrices that `int4` quantises: the feed-forward part."""

Dequantise: TypeAlias = Callable[[Tensor, Tensor], Tensor]
"""From numbers [out, in] and scales [out, 1] to weights, float64 [out, in]."""


def quantise(weight: Tensor, kind: str) -> tuple[Tensor, Tensor]:
    """The numbers of `weight` [out, in], int8 or float8_e4m3fn, and the scale of each row, float32 [out, 1]."""
    single = weight.float()
    scale = single.abs().amax(1, keepdim=True) / QUANTISED[kind]
    scale[scale == 0] = 1
    quotient = single / scale
    return (quotient.to(torch.float8_e4m3fn) if kind == "fp8" else quotient.round().to(torch.int8)), scale


def dequantise(numbers: Tensor, scale: Tensor) -> Tensor:
    """The weights for which the numbers stand; the products are exact in float64."""
    return numbers.double() * scale.double()


def quantise_state(state: dict[str, Tensor], kind: str, product: Dequantise) -> dict[str, Tensor]:
    """The weights with each matrix of this kind replaced by its quantised values, in the dtype that it had."""
    ends = OF_FOUR_BITS if kind == "int4" else NAMES
    return {
        name: product(*quantise(weight, kind)).to(weight.dtype) if name.endswith(ends) else weight
        for name, weight in state.items()
    }
