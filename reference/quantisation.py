"""Rows: the rule for weights of eight or four bits with a scale for each row, or group of columns.

A draft may run on weights of fewer bits than its target. Oracle and engine round them by this rule, each with code of
its own.
"""

from dataclasses import dataclass

from specverify.reference.malformed import Malformed


@dataclass(frozen=True)
class FewBits:
    """How the matrices of a model are rounded.

    Attributes:
        largest: The largest number M.
        group: The number of columns that share a scale; 0 for all columns of a row.
        has_zero_points: Whether the numbers run from 0 to M, each group with a number for the weight 0; else they run
            from -M to M.
        feed_forward: Whether the feed-forward part alone is rounded.
    """

    largest: float
    group: int = 0
    has_zero_points: bool = False
    feed_forward: bool = False


QUANTISED = {
    "int4": FewBits(7.0, feed_forward=True),
    "int4-groups": FewBits(7.0, group=16),
    "int4-zero-points": FewBits(15.0, group=16, has_zero_points=True),
    "int8": FewBits(127.0),
    "fp8": FewBits(448.0),
}
"""Kinds of quantised weights: integers, and the 8-bit floats e4m3 (no infinity).

The matrices [out, in] named `*_proj.weight` are quantised, and in a draft head also `fc.weight` and `*.linear.weight`;
embedding, head, norms and biases are not. `int4` is for the feed-forward part alone (Llama at scale, arXiv 2508.08192):
`gate_proj`, `up_proj`, `down_proj` and `*.linear.weight`. Weights are first rounded to the working dtype. The columns
of a row, an output channel, form groups from the left, of which the last may be smaller. Up to the products all values
are float32, and every rounding is to the nearest number, ties to even.

Without zero points a group has the scale max|w| / M, or 1 if all its weights are 0. Its numbers are w / scale, rounded
to an integer or an e4m3 number. With zero points the scale is the range from min(w, 0) to max(w, 0) over M, or 1 if the
range is empty; the zero point is -min / scale, rounded, and a number is w / scale, rounded, plus the zero point, both
between 0 and M (GPTQ, AWQ, torchao's asymmetric mapping). The model computes with (number - zero point) * scale, in its
dtype. Groups have 16 columns, where publications have 32 to 128, because rows of drawn models are short.
"""


def check_quantised(kind: str) -> None:
    """Raise Malformed for weights of a kind that is neither empty nor one of QUANTISED."""
    if kind and kind not in QUANTISED:
        raise Malformed("quantised", f"{kind!r} is none of {', '.join(QUANTISED)}")
