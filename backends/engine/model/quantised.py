"""Quantised matrices of drafts, by the rule of `specverify.reference.quantisation.QUANTISED`.

They become numbers with a scale and a zero point for each group of columns when the model is opened; forwards run on
the products in the working dtype.
"""

from collections.abc import Callable
from typing import TypeAlias

import torch
from torch import Tensor

from specverify.reference.quantisation import QUANTISED

NAMES = ("_proj.weight", "fc.weight", ".linear.weight")
"""Ends of the names of matrices that are quantised; `fc` and `linear` are matrices of heads."""

OF_FEED_FORWARD = (*(f"{part}_proj.weight" for part in ("gate", "up", "down")), ".linear.weight")
"""The matrices of the feed-forward part."""

Dequantise: TypeAlias = Callable[[Tensor, Tensor, Tensor], Tensor]
"""From numbers [out, groups, columns], scales and zero points [out, groups, 1] to weights, float64 [out, groups *
columns]."""


def quantise(weight: Tensor, kind: str) -> tuple[Tensor, Tensor, Tensor]:
    """The numbers, scales and zero points of `weight` [out, in].

    Returns:
        numbers [out, groups, columns], int8 or float8_e4m3fn; columns that the last group lacks stand for weights of 0.
        scale [out, groups, 1], float32.
        zero point [out, groups, 1], int8; 0 for kinds without.
    """
    form = QUANTISED[kind]
    columns = form.group or weight.shape[1]
    padded = torch.nn.functional.pad(weight.float(), (0, -weight.shape[1] % columns))
    groups = padded.reshape(len(weight), -1, columns)
    if form.has_zero_points:
        lowest = groups.amin(2, keepdim=True).clamp(max=0)
        scale = (groups.amax(2, keepdim=True).clamp(min=0) - lowest) / form.largest
        scale[scale == 0] = 1
        zero = (-lowest / scale).round().clamp(0, form.largest)
        return ((groups / scale).round() + zero).clamp(0, form.largest).to(torch.int8), scale, zero.to(torch.int8)
    scale = groups.abs().amax(2, keepdim=True) / form.largest
    scale[scale == 0] = 1
    quotient = groups / scale
    numbers = quotient.to(torch.float8_e4m3fn) if kind == "fp8" else quotient.round().to(torch.int8)
    return numbers, scale, torch.zeros_like(scale, dtype=torch.int8)


def dequantise(numbers: Tensor, scale: Tensor, zero: Tensor) -> Tensor:
    """The weights for which the numbers stand, [out, groups * columns]; the products are exact in float64."""
    return ((numbers.double() - zero.double()) * scale.double()).flatten(1)


def quantise_state(state: dict[str, Tensor], kind: str, product: Dequantise) -> dict[str, Tensor]:
    """The weights with each matrix of this kind replaced by its quantised values, in the dtype that it had."""
    ends = OF_FEED_FORWARD if QUANTISED[kind].feed_forward else NAMES
    return {
        name: product(*quantise(weight, kind))[:, : weight.shape[1]].to(weight.dtype) if name.endswith(ends) else weight
        for name, weight in state.items()
    }
