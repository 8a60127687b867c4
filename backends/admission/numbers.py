"""Admission of numbers: integers, reals, bools, words and tuples of numbers.

Numbers may come as Python, NumPy or tensor scalars; they become Python values, or the answer is refused.
"""

import math
from collections.abc import Callable
from typing import SupportsFloat, TypeVar

import numpy as np

from specverify.backends.admission.arrays import is_array_like, read_array
from specverify.backends.admission.misshapen import refusal
from specverify.reference.trace import Array

Number = TypeVar("Number", int, float)

INT_TYPES, FLOAT_TYPES = frozenset({int}), frozenset({float})
"""The types of tuple entries that need no conversion."""

Nouns = tuple[str, str]
"""The words of a refusal for the expected numbers: for a single number, and for several."""

INT: Nouns = ("an int", "ints")
TOKEN: Nouns = ("a token id", "token ids")


def admit_int(field: str, value: object, low: int | None = None, high: int | None = None, nouns: Nouns = INT) -> int:
    """`value` as a Python int from `low` to `high`, both inclusive; None for no limit.

    NumPy integers, and arrays or tensors of integers without axes, are accepted; bools, floats and strings are not.

    Raises:
        Misshapen: for everything else.
    """
    number = _as_int(value)
    if number is None or (low is not None and number < low) or (high is not None and number > high):
        raise refusal(field, value, _range(nouns[0], low, high))
    return number


def admit_ints(
    field: str, value: object, low: int | None = None, high: int | None = None, nouns: Nouns = INT
) -> tuple[int, ...]:
    """`value` as a tuple of Python ints from `low` to `high`: a tuple, list, range, 1-D array or tensor of integers.

    Raises:
        Misshapen: for everything else; an entry that is refused is named by its index.
    """
    # A tuple of Python ints, the common case, is checked without a call for each entry.
    if type(value) is not tuple or not INT_TYPES.issuperset(map(type, value)):
        expected = _range(nouns[1], low, high)
        return _convert_each(
            field, value, "iu", expected, lambda place, entry: admit_int(place, entry, low, high, nouns)
        )
    if value and ((low is not None and min(value) < low) or (high is not None and max(value) > high)):
        for index, entry in enumerate(value):
            admit_int(f"{field}[{index}]", entry, low, high, nouns)
    return value


def admit_float(field: str, value: object, finite: bool = False) -> float:
    """`value` as a Python float; NaN and infinities are admitted unless `finite` is set.

    Raises:
        Misshapen: for a value that is no number, and for a bool.
    """
    number = _as_float(value)
    if number is None or (finite and not math.isfinite(number)):
        raise refusal(field, value, "a finite number" if finite else "a number")
    return number


def admit_floats(field: str, value: object) -> tuple[float, ...]:
    """`value` as a tuple of Python floats: a tuple, list, 1-D array or tensor of numbers, NaN included.

    Raises:
        Misshapen: for everything else; an entry that is refused is named by its index.
    """
    if type(value) is tuple and FLOAT_TYPES.issuperset(map(type, value)):
        return value
    return _convert_each(field, value, "fiu", "numbers", lambda place, entry: admit_float(place, entry))


def admit_flag(field: str, value: object) -> bool:
    """`value` as a Python bool; raises Misshapen for everything but a bool of Python or NumPy."""
    if isinstance(value, (bool, np.bool_)):
        return bool(value)
    raise refusal(field, value, "True or False")


def admit_word(field: str, value: object) -> str:
    """`value` as a Python str; a member of a string enumeration gives its value; Misshapen for everything else."""
    if isinstance(value, str):
        # A subclass may define its own `__str__`; the plain one gives the text itself.
        return value if type(value) is str else str.__str__(value)
    raise refusal(field, value, "a str")


def _as_int(value: object) -> int | None:
    """`value` as an int; None where it is not an integer."""
    if type(value) is int:
        return value
    if isinstance(value, (bool, np.bool_)):
        return None
    if isinstance(value, (int, np.integer)):
        return int(value)
    array = _scalar_array(value)
    return int(array) if array is not None and array.dtype.kind in "iu" else None


def _as_float(value: object) -> float | None:
    """`value` as a float; None where it is not a number."""
    if type(value) is float:
        return value
    # A bool is an int in Python, but no number of a trace is meant by it.
    if isinstance(value, (bool, np.bool_)):
        return None
    if isinstance(value, (int, float, np.integer, np.floating)):
        number: SupportsFloat = value
    else:
        array = _scalar_array(value)
        if array is None or array.dtype.kind not in "fiu":
            return None
        number = array
    try:
        return float(number)
    # An int beyond the range of float64.
    except OverflowError:
        return None


def _scalar_array(value: object) -> Array | None:
    """The array of a NumPy or tensor scalar; None for any other value."""
    array = read_array(value) if is_array_like(value) else None
    return array if isinstance(array, np.ndarray) and array.ndim == 0 else None


def _convert_each(
    field: str, value: object, kinds: str, expected: str, convert: Callable[[str, object], Number]
) -> tuple[Number, ...]:
    """The entries of a tuple, list, range or 1-D array whose dtype kind is one of `kinds`, each converted."""
    if isinstance(value, (list, tuple, range)):
        return tuple(convert(f"{field}[{index}]", entry) for index, entry in enumerate(value))
    if is_array_like(value):
        array = read_array(value)
        if isinstance(array, np.ndarray) and array.ndim == 1 and array.dtype.kind in kinds:
            # `tolist` gives Python numbers, which `convert` checks one by one.
            return tuple(convert(f"{field}[{index}]", entry) for index, entry in enumerate(array.tolist()))
    raise refusal(field, value, f"a tuple of {expected}")


def _range(noun: str, low: int | None, high: int | None) -> str:
    """A range of numbers in words."""
    if low is None and high is None:
        return noun
    return f"{noun} of at least {low}" if high is None else f"{noun} from {low} to {high}"
