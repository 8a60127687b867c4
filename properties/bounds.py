"""Bounds of rule N: how many sigmas of the control a row may lie off, by quantity and working dtype, and what was met.

A sigma is the backend's own error in plain decode of the same prompt (`closeness.Noise`), never below its a-priori
size. Beside each bound stands the worst row of clean runs: 100 drawn cases per dtype and backend, `cpu-eager` and
`cpu-fused` (SDPA), torch 2.13 on x86-64, built-in models of 1 to 3 layers; 626 layers of attention outputs, 348 blocks
of logits, 1,762 pairs and 2,972 layers of KV per dtype. `tests/meta/test_numerics.py` measures them again.
"""

from dataclasses import dataclass


@dataclass(frozen=True)
class Bound:
    """What a row may lie off, in sigmas, and the worst that clean runs were met to be."""

    sigmas: float
    worst: float


LOGITS: dict[str, Bound] = {
    "float32": Bound(6.0, 1.82),
    "bfloat16": Bound(4.5, 3.40),
    "float16": Bound(4.5, 2.48),
}
"""Stage scored, against the oracle; tails extrapolated to 1e-9 per tree (statistics-and-numerics, C.2 and C.3)."""

PAIR: dict[str, Bound] = {
    "float32": Bound(6.0, 1.50),
    "bfloat16": Bound(6.0, 1.15),
    "float16": Bound(6.0, 1.31),
}
"""Stage scored, two runs of one backend in a metamorphic comparison (part D)."""

INNER: dict[str, Bound] = {
    "float32": Bound(30.0, 3.30),
    "bfloat16": Bound(12.0, 3.30),
    "float16": Bound(12.0, 4.80),
}
"""Stages attended and committed: short vectors, so their rms scatters more than that of a vocabulary row."""
