"""The engine's own random stream, one per request, counter-based.

A coin depends on its request's seed and its index alone, so no other request and no unused coin changes it.
"""

import torch
from torch import Tensor

GOLDEN, FIRST, SECOND = -7046029254386353131, -4658895280553007687, -7723592293110705685
"""The constants of SplitMix64 (Steele et al. 2014) as signed 64-bit integers."""


def uniforms(seeds: Tensor, start: int, count: int) -> Tensor:
    """The uniforms `start` to `start + count` of each request's stream: float64 [B, count], multiples of 2^-53.

    Coin i of a request is a SplitMix64 hash of (seed, i) alone. `seeds` is int64 [B].
    """
    counter = torch.arange(start, start + count, device=seeds.device)
    key = _mix(seeds * GOLDEN + 1)
    bits = _mix(key[:, None] + (counter + 1)[None] * GOLDEN)
    # The upper 53 bits; the mask clears the copies of the sign that an arithmetic shift brings in.
    return (bits >> 11 & (1 << 53) - 1).double() * 2.0**-53


def _mix(state: Tensor) -> Tensor:
    """SplitMix64's finaliser; the masks make its shifts logical, since torch's shifts on int64 are arithmetic."""
    state = (state ^ (state >> 30 & (1 << 34) - 1)) * FIRST
    state = (state ^ (state >> 27 & (1 << 37) - 1)) * SECOND
    return state ^ (state >> 31 & (1 << 33) - 1)
