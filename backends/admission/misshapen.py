"""Misshapen: the refusal of an answer that no invariant could compare.

The refusal is one line for the author of the adapter.
"""

import numpy as np

from specverify.reference.trace import Stage

LONGEST = 60
"""The most characters of a refused value that the refusal quotes."""


class Misshapen(Exception):
    """A backend's answer has a type, a shape or a range that no invariant can compare.

    Attributes:
        stage: The stage that holds the refused field; None for a field of no stage.
        why: The refusal in one line: place, field, what was found, what is expected.
    """

    def __init__(self, stage: Stage | None, why: str) -> None:
        super().__init__(why)
        self.stage = stage
        self.why = why

    def within(self, place: str, stage: Stage | None = None) -> "Misshapen":
        """The same refusal with `place` ("step 2") in front, and with `stage` if it had none."""
        return Misshapen(self.stage if self.stage is not None else stage, f"{place}, {self.why}")


def refusal(field: str, value: object, expected: str, description: str = "") -> Misshapen:
    """The refusal of `value` in `field`, with `description` in place of the description by type and shape if given."""
    return Misshapen(None, f"{field}: {description or describe(value)}, expected {expected}")


def describe(value: object) -> str:
    """A value in words: numbers and short words as they are, everything else by type and shape.

    The `repr` of a foreign type is never called, since it may run any code.
    """
    # Python refuses to write integers of several thousand digits; their length in bits can always be told.
    if type(value) is int and value.bit_length() > LONGEST:
        return f"an int of {value.bit_length()} bits"
    if value is None or type(value) in (bool, int, float, complex, str, bytes):
        text = repr(value)
        return text if len(text) <= LONGEST else f"{text[:LONGEST]}…"
    if isinstance(value, np.generic):
        return f"{value.dtype} {describe(value.item())}" if value.dtype.kind in "biuf" else str(value.dtype)
    if isinstance(value, np.ndarray):
        return f"{value.dtype} array {describe_shape(value.shape)}"
    if isinstance(value, (list, tuple)):
        return _describe_list(value)
    return _describe_tensor(value) or type(value).__name__


def describe_shape(shape: object) -> str:
    """A shape as a refusal writes it: [5, 64]."""
    return f"[{', '.join(map(str, shape))}]" if isinstance(shape, tuple) else type(shape).__name__


def _describe_tensor(value: object) -> str | None:
    """A tensor by its dtype and shape; None for a value without them, and for an object that raises when asked."""
    try:
        shape, dtype = getattr(value, "shape", None), getattr(value, "dtype", None)
        return (
            None
            if shape is None or dtype is None
            else f"{dtype} {type(value).__name__.lower()} {describe_shape(shape)}"
        )
    except Exception:
        return None


def _describe_list(value: list[object] | tuple[object, ...]) -> str:
    """A list or tuple by its length and the types of its entries."""
    name = type(value).__name__
    kinds = sorted({type(entry).__name__ for entry in value})
    if not kinds:
        return f"an empty {name}"
    return f"{name} of {len(value)} ({', '.join(kinds[:3])}{', …' if len(kinds) > 3 else ''})"
