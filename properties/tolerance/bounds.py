"""Bounds of rule N: how far a row may lie off, in sigmas of the control.

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
"""

from dataclasses import dataclass

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
