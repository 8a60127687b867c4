"""Bounds of rule N: how far a row may lie off, in sigmas of the control, and how far a single number.

There is a bound for each quantity and working dtype, beside the worst row that clean runs met. A sigma is the backend's
own error in plain decode of the same prompt (`closeness.Noise`), never below its a-priori size.

The worst rows were measured with torch 2.13 on x86-64. In float32, and for pairs: 100 drawn cases on `cpu-eager` and on
`cpu-fused`, built-in models of 1 to 3 layers; `tests/meta/invariants/test_numerics.py` measures them again. In 16 bits:
1,000 draws (361 to 379 models and prompts) per dtype on `cpu-eager` and on `ascend-fused-emulated`, whose kernel rounds
its weights. There the tail beyond the worst row in twenty falls by a factor e per .33 to .42 sigmas of logits and .38
to .90 sigmas of attention outputs; the bounds are where that tail reaches 1e-9 per model and prompt.

An earlier bound of 4.5 was measured on one model of 256 logits. Drawn models have as few as two logits, whose rms
scatters more: 4.9 was met once in 346 clean cases. Errors between 4.5 and 9 sigmas in 16 bits are left to the rules
that compare bit by bit, and to float32.

The rms of a row dilutes one wrong number among V by the root of V. So the largest error has a bound of its own, which
grows with the number of entries compared as the largest of so many normal errors does. Its unit is the rms error of the
row's other entries, and at least the sigma of rule N: then the quantile is Student's, whatever the row's own noise is.
Clean rows have thinner tails than that, since roundings are bounded.

An entry that is large itself, or stands in a column of large ones (a token or channel that outweighs the others), is
rounded in proportion: its unit is larger by that factor.
"""

from collections.abc import Iterator
from dataclasses import dataclass
from functools import cache

import numpy as np
from scipy.special import stdtrit

from specverify.reference.trace import Array

UNIT = {"float64": 2.0**-53, "float32": 2.0**-24, "bfloat16": 2.0**-8, "float16": 2.0**-11}
"""Unit roundoff of each working dtype."""


@dataclass(frozen=True)
class Bound:
    """The bound of one quantity in sigmas, and the worst row of clean runs."""

    sigmas: float
    worst: float


LOGITS: dict[str, Bound] = {
    "float32": Bound(6.0, 1.82),
    "bfloat16": Bound(9.0, 3.40),
    "float16": Bound(9.0, 4.90),
}
"""Stage scored, against the oracle. In float32 the bound is the tail extrapolated to 1e-9 per tree."""

PAIR: dict[str, Bound] = {
    "float32": Bound(6.0, 1.50),
    "bfloat16": Bound(6.0, 1.15),
    "float16": Bound(6.0, 1.31),
}
"""Stage scored, between two runs of one backend that a metamorphic invariant compares."""

INNER: dict[str, Bound] = {
    "float32": Bound(30.0, 3.30),
    "bfloat16": Bound(18.0, 6.62),
    "float16": Bound(18.0, 6.17),
}
"""Stages attended and committed: their vectors are short, so their rms scatters more than that of a vocabulary row."""


ALPHA = 1e-9
"""Probability that one clean row has an entry beyond its bound, for normal errors."""

FEWEST = 8
"""Entries of the shortest row that is asked: of fewer, the others say too little about the noise of one."""


@cache
def largest(count: int) -> float:
    """The bound of the largest error among `count`, in units of the others' rms error."""
    return -float(stdtrit(count - 2, ALPHA / (2 * count)))


def entries_beyond(
    observed: Array, expected: Array, sigma: float, granted: Array | float = 0.0
) -> Iterator[tuple[tuple[int, ...], float]]:
    """The largest error of each row that lies beyond its bound: (index of the entry, distance / bound), worst first.

    Rows [..., entries] with NaN or infinity are left to the bound of their rms. `sigma` is the noise of the rows by
    rule N. `granted` [..., 1], or a number, is an error that every entry of a row may have beside the noise
    (`rotation_error`); the distance counts beyond it.
    """
    if not observed.size or observed.shape[-1] < FEWEST:
        return
    count = observed.shape[-1]
    with np.errstate(over="ignore", invalid="ignore", divide="ignore"):
        ratio = _error_ratios(observed, expected, sigma, granted)
    worst = np.where(np.isfinite(ratio), ratio, 0.0).max(axis=-1) / largest(count)
    for flat in np.argsort(-worst, axis=None):
        row = tuple(int(part) for part in np.unravel_index(int(flat), worst.shape))
        if worst[row] <= 1:
            return
        yield (*row, int(np.nan_to_num(ratio[row]).argmax())), float(worst[row])


def rotation_error(keys: Array, first: int, dtype: str) -> Array:
    """How far an entry of each rotated key may lie off because angles of rotary embedding are rounded: [..., 1].

    The angle at position p is p times a frequency of at most 1. The frequency and the product are each rounded to the
    table's dtype (float32 in 16-bit models too), so that the angle is off by up to 2 p unit roundoffs. An entry moves
    by that times the other entry of its pair. One channel of a checkpoint's first layer may outweigh the others, whose
    rms then says little of it: SmolLM2-135M has keys of 8 beside an rms of 1.

    Args:
        keys: [..., columns, entries], the true keys.
        first: The position of their first column.
        dtype: The working dtype.
    """
    roundoff = min(UNIT[dtype], UNIT["float32"])
    positions = first + np.arange(keys.shape[-2])
    result: Array = 2 * roundoff * positions[:, None] * np.abs(keys).max(axis=-1, keepdims=True)
    return result


def _error_ratios(observed: Array, expected: Array, sigma: float, granted: Array | float) -> Array:
    """Each error beyond `granted` over its unit; the unit of a row's largest error leaves that error out."""
    error = np.maximum(np.abs(observed - expected) - granted, 0.0)
    size = np.sqrt(np.mean(np.square(expected), axis=-1, keepdims=True))
    column = np.sqrt(np.mean(np.square(expected), axis=tuple(range(expected.ndim - 1))))
    # A row or an array of zeros has no entry that outweighs the others.
    weight = np.maximum(np.abs(expected) / np.where(size > 0, size, np.inf), 1.0)
    overall = float(np.sqrt(np.mean(np.square(column))))
    weight = np.maximum(weight, column / overall if overall > 0 else 1.0)
    scaled = error / weight
    top = scaled.max(axis=-1, keepdims=True)
    other_rms = np.sqrt(
        (np.square(scaled).sum(axis=-1, keepdims=True) - np.square(top)).clip(0) / (scaled.shape[-1] - 1)
    )
    unit = np.maximum(other_rms, sigma)
    result: Array = scaled / np.where(unit > 0, unit, np.inf)
    return result
