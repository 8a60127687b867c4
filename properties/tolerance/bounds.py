"""Bounds of rule N: how many sigmas of the control a row may lie off, by quantity and working dtype, and what was met.

A sigma is the backend's own error in plain decode of the same prompt (`closeness.Noise`), never below its a-priori
size. Beside each bound stands the worst row of clean runs (torch 2.13, x86-64). In float32, and for pairs: 100 drawn
cases on `cpu-eager` and on `cpu-fused`, built-in models of 1 to 3 layers; `tests/meta/invariants/test_numerics.py`
measures them again. In 16 bits: 1,000 draws (361 to 379 models and prompts) per dtype on `cpu-eager` and on
`ascend-fused-emulated`, whose kernel rounds its weights. There the excess over the worst in twenty falls off by a
factor e per .33 to .42 sigmas of logits and .38 to .90 of attention outputs; the bounds are where that tail meets 1e-9
per model and prompt.

A bound of 4.5 was measured on one model of 256 logits. Drawn models have as few as two, whose rms
scatters more: 4.9 was met once in 346 clean cases. What lies between 4.5 and 9 sigmas in 16 bits is left to the rules
that compare bit by bit, and to float32.
"""

from dataclasses import dataclass


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
"""Stage scored, against the oracle; float32: tail extrapolated to 1e-9 per tree."""

PAIR: dict[str, Bound] = {
    "float32": Bound(6.0, 1.50),
    "bfloat16": Bound(6.0, 1.15),
    "float16": Bound(6.0, 1.31),
}
"""Stage scored, two runs of one backend in a metamorphic comparison (part D)."""

INNER: dict[str, Bound] = {
    "float32": Bound(30.0, 3.30),
    "bfloat16": Bound(18.0, 6.62),
    "float16": Bound(18.0, 6.17),
}
"""Stages attended and committed: short vectors, so their rms scatters more than that of a vocabulary row."""
