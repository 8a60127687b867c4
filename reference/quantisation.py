"""Rows: the rule for weights of eight or four bits with a scale for each row.

A draft may run on weights of fewer bits than its target. Oracle and engine round them by this rule, each with code of
its own.
"""

from specverify.reference.malformed import Malformed

QUANTISED = {"int4": 7.0, "int8": 127.0, "fp8": 448.0}
"""Kinds of quantised weights, each with its largest number M: integers, and the 8-bit floats e4m3 (no infinity).

The matrices [out, in] named `*_proj.weight` are quantised, and in a draft head also `fc.weight` and `*.linear.weight`;
embedding, head, norms and biases are not. `int4` is for the feed-forward part alone (Llama at scale, arXiv 2508.08192):
`gate_proj`, `up_proj`, `down_proj` and `*.linear.weight`. Weights are first rounded to the working dtype. Each row, an
output channel, has the scale max|w| / M, or 1 if all its weights are 0. Its numbers are w / scale, rounded to the
nearest integer or e4m3 number, ties to even. The model computes with number * scale, rounded to its dtype. Up to that
product all values are float32.
"""


def check_quantised(kind: str) -> None:
    """Raise Malformed for weights of a kind that is neither empty nor one of QUANTISED."""
    if kind and kind not in QUANTISED:
        raise Malformed("quantised", f"{kind!r} is none of {', '.join(QUANTISED)}")
