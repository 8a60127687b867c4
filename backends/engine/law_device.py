"""Where laws are computed: on the device, or on the host where the device computes no float64.

Exact laws, the coins of a step and the intervals that they decide are float64. Whether an NPU computes all of it is not
documented by operator, so it is asked, once.
"""

from functools import lru_cache

import torch
from torch import Tensor

LOGITS = ((0.25, -1.5, 3.0, 0.25), (2.0, 2.0, -0.125, 1e-9))
"""Logits of two laws; the first has a tie."""

APART = 1e-12
"""How far numbers of device and host may lie apart: far below what float32 resolves."""


def law_device(device: torch.device) -> torch.device:
    """`device`, or the host where the device declines float64."""
    return device if why_no_float64(device) is None else torch.device("cpu")


@lru_cache(maxsize=8)
def why_no_float64(device: torch.device) -> str | None:
    """Why laws are not computed on `device`, in one line; None where they are."""
    if device.type == "cpu":
        return None
    if device.type == "cuda" and not torch.cuda.is_available():
        return None  # every such device computes float64, and none is here to be asked
    expected = laws_of(torch.tensor(LOGITS, dtype=torch.float64))
    try:
        observed = [law.cpu() for law in laws_of(torch.tensor(LOGITS, dtype=torch.float64).to(device))]
    except (RuntimeError, TypeError, NotImplementedError) as why:
        return f"float64: {' '.join(str(why).split())[:160]}"
    for law, twin in zip(observed, expected, strict=True):
        # A device may compute float64 in a narrower type, and say nothing.
        if law.dtype != twin.dtype or not torch.allclose(law.double(), twin.double(), rtol=0, atol=APART):
            return "float64: the device's numbers are not those of float64"
    return None


def laws_of(logits: Tensor) -> list[Tensor]:
    """The results of each operator that the engine applies to a law in float64, of logits [B, V]."""
    law = logits.softmax(-1)
    ordered, order = torch.sort(law, descending=True, stable=True)
    edges = torch.where(law > 0, law.cumsum(-1) / law.sum(-1, keepdim=True), 0.0).cummax(-1).values
    coins = torch.floor(edges * 2.0**53) * 2.0**-53
    place = law.argmax(-1, keepdim=True)
    return [
        law,
        logits.log_softmax(-1),
        ordered,
        order,
        edges,
        coins,
        law.gather(-1, place),
        torch.maximum(law, coins).scatter(-1, place, 0.0),
        torch.minimum(law, coins).clamp(0.0, 1.0),
        law.masked_fill(law < 0.5, -torch.inf).amax(-1),
    ]
