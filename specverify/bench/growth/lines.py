"""Straight lines through measured times: what one unit more costs."""

from collections.abc import Mapping
from typing import Any

import numpy as np


def line_through(points: Mapping[int, float]) -> dict[str, Any]:
    """The least-squares line through times by size.

    Returns:
        base_ms and each_ms (the line at size 0, and what one more adds), straight (R squared: the share of the variance
        that the line explains; None where all times are equal or there are fewer than three).
    """
    sizes, times = np.array(list(points), dtype=float), np.array(list(points.values()))
    if len(sizes) < 2:
        return {"base_ms": float(times[0]), "each_ms": None, "straight": None}
    each, base = np.polyfit(sizes, times, 1)
    around = float(np.square(times - times.mean()).sum())
    residual = float(np.square(times - (base + each * sizes)).sum())
    straight = 1 - residual / around if around and len(sizes) > 2 else None
    return {"base_ms": float(base), "each_ms": float(each), "straight": straight}
