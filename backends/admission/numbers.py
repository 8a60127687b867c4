"""Admission of numbers: integers, reals, bools, words and tuples of numbers.

Numbers may come as Python, NumPy or tensor scalars; they become Python values, or the answer is refused.
"""

import math
from collections.abc import Callable
from typing import SupportsFloat, TypeVar

import numpy as np

from backends.admission.arrays import is_array_like, read
from backends.admission.misshapen import refusal
from reference.trace import Array

Number = TypeVar("Number", int, float)

WHOLE, REAL = frozenset({int}), frozenset({float})
"""The types of tuple entries that need no conversion."""

Named = tuple[str, str]
"""The words of a refusal for the expected numbers: for a single number, and for several."""

INT: Named = ("an int", "ints")
TOKEN: Named = ("a token id", "token ids")


def whole(field: str, value: object, low: int | None = None, high: int | None = None, named: Named = INT) -> int:
    """`value` as a Python int from `low` to `high`, both inclusive; None for no limit.

    NumPy integers, and arrays or tensors of integers without axes, are accepted; bools, floats and strings are not.

    Raises:
        Misshapen: for everything else.
    """
    number = _whole(value)
    if number is None or (low is not None and number < low) or (high is not None and number > high):
        raise refusal(field, value, _range(named[0], low, high))
    return number


def wholes(
    field: str, value: object, low: int | None = None, high: int | None = None, named: Named = INT
) -> tuple[int, ...]:
    """`value` as a tuple of Python ints from `low` to `high`: a tuple, list, range, 1-D array or tensor of integers.

    Raises:
        Misshapen: for everything else; an entry that is refused is named by its index.
    """
    # A tuple of Python ints, the common case, is checked without a call for each entry.
    if type(value) is not tuple or not WHOLE.issuperset(map(type, value)):
        expected = _range(named[1], low, high)
        return _each(field, value, "iu", expected, lambda at, one: whole(at, one, low, high, named))
    if value and ((low is not None and min(value) < low) or (high is not None and max(value) > high)):
        for at, one in enumerate(value):
            whole(f"{field}[{at}]", one, low, high, named)
    return value


def real(field: str, value: object, finite: bool = False) -> float:
    """`value` as a Python float; NaN and infinities are admitted unless `finite` is set.

    Raises:
        Misshapen: for a value that is no number, and for a bool.
    """
    number = _real(value)
    if number is None or (finite and not math.isfinite(number)):
        raise refusal(field, value, "a finite number" if finite else "a number")
    return number


def reals(field: str, value: object) -> tuple[float, ...]:
    """`value` as a tuple of Python floats: a tuple, list, 1-D array or tensor of numbers, NaN included.

    Raises:
        Misshapen: for everything else; an entry that is refused is named by its index.
    """
    if type(value) is tuple and REAL.issuperset(map(type, value)):
        return value
    return _each(field, value, "fiu", "numbers", lambda at, one: real(at, one))


def flag(field: str, value: object) -> bool:
    """`value` as a Python bool; raises Misshapen for everything but a bool of Python or NumPy."""
    if isinstance(value, (bool, np.bool_)):
        return bool(value)
    raise refusal(field, value, "True or False")


def word(field: str, value: object) -> str:
    """`value` as a Python str; a member of a string enumeration gives its value; Misshapen for everything else."""
    if isinstance(value, str):
        # A subclass may define its own `__str__`; the plain one gives the text itself.
        return value if type(value) is str else str.__str__(value)
    raise refusal(field, value, "a str")


def _whole(value: object) -> int | None:
    """`value` as an int; None where it is not an integer."""
    if type(value) is int:
        return value
    if isinstance(value, (bool, np.bool_)):
        return None
    if isinstance(value, (int, np.integer)):
        return int(value)
    held = _without_axes(value)
    return int(held) if held is not None and held.dtype.kind in "iu" else None


def _real(value: object) -> float | None:
    """`value` as a float; None where it is not a number."""
    if type(value) is float:
        return value
    # A bool is an int in Python, but no number of a trace is meant by it.
    if isinstance(value, (bool, np.bool_)):
        return None
    if isinstance(value, (int, float, np.integer, np.floating)):
        number: SupportsFloat = value
    else:
        held = _without_axes(value)
        if held is None or held.dtype.kind not in "fiu":
            return None
        number = held
    try:
        return float(number)
    # An int beyond the range of float64.
    except OverflowError:
        return None


def _without_axes(value: object) -> Array | None:
    """The array of a NumPy or tensor scalar; None for any other value."""
    held = read(value) if is_array_like(value) else None
    return held if isinstance(held, np.ndarray) and held.ndim == 0 else None


def _each(
    field: str, value: object, kinds: str, expected: str, convert: Callable[[str, object], Number]
) -> tuple[Number, ...]:
    """The entries of a tuple, list, range or 1-D array whose dtype kind is one of `kinds`, each converted."""
    if isinstance(value, (list, tuple, range)):
        return tuple(convert(f"{field}[{at}]", one) for at, one in enumerate(value))
    if is_array_like(value):
        held = read(value)
        if isinstance(held, np.ndarray) and held.ndim == 1 and held.dtype.kind in kinds:
            # `tolist` gives Python numbers, which `convert` checks one by one.
            return tuple(convert(f"{field}[{at}]", one) for at, one in enumerate(held.tolist()))
    raise refusal(field, value, f"a tuple of {expected}")


def _range(what: str, low: int | None, high: int | None) -> str:
    """A range of numbers in words."""
    if low is None and high is None:
        return what
    return f"{what} of at least {low}" if high is None else f"{what} from {low} to {high}"
