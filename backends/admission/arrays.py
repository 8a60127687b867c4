"""Admission of arrays: lists, tensors and NumPy arrays become NumPy arrays.

The result is read-only by default, C-contiguous, and of the kind ("float", "int", "bool") and the shape that the field
of the trace asks for; any other value is refused.
"""

from typing import Any

import numpy as np

from specverify.backends.admission.misshapen import describe, describe_shape, refusal
from specverify.reference.trace import Array

Axis = tuple[str, int | None]
"""The name of an axis and its expected length; None admits any length."""

CHARS = {"float": "efd", "int": "bhilq", "bool": "?"}
"""The dtypes of each kind that are admitted without conversion, by NumPy type character."""

CAST = {"float": ("f", "iu", np.float64), "int": ("i", "u", np.int64), "bool": ("b", "iu", np.bool_)}
"""For each kind: NumPy dtype kinds that belong to it, dtype kinds that are converted to it, and the target dtype."""

DEEPEST = 8
"""The number of list levels that are searched for the first array or number of a nested list."""


def admit_array(field: str, value: object, kind: str, axes: tuple[Axis, ...], read_only: bool = True) -> Array:
    """`value` as a C-contiguous NumPy array of `kind` ("float", "int", "bool") with the axes `axes`.

    A read-only, C-contiguous NumPy array of that kind is returned as it is; everything else is copied. Floats keep
    their width of 16, 32 or 64 bits. bfloat16 becomes float32, integers given for floats become float64, unsigned
    integers become int64, and the integers 0 and 1 given for bools become bools.

    Args:
        field: The name of the field in a refusal.
        value: A NumPy array, a tensor (anything with `detach`, `cpu` and `numpy`), nested lists of numbers, or lists of
            arrays or tensors that stack.
        kind: A key of CHARS.
        axes: The expected axes.
        read_only: Whether a writeable array is copied and frozen; False where the caller does not keep the array.

    Raises:
        Misshapen: naming the field, what was found, and what is expected.
    """
    # The fast path: an array of the right dtype needs no conversion.
    if type(value) is np.ndarray and value.dtype.char in CHARS[kind] and value.dtype.isnative:
        result = value
    else:
        result = _convert(field, value, kind, axes)
    if not _has_axes(result.shape, axes):
        raise refusal(field, value, expected_array(kind, axes), _describe_refused(value, result))
    flags = result.flags
    # A backend may write to its own buffer after the step; a read-only copy keeps the trace as it was.
    if (read_only and flags.writeable) or not flags.c_contiguous:
        result = np.array(result, order="C")
        result.flags.writeable = not read_only
    return result


def _has_axes(shape: tuple[int, ...], axes: tuple[Axis, ...]) -> bool:
    """Whether a shape has these axes.

    The check is a loop and not a generator expression, because it runs for every array of every run.
    """
    if len(shape) != len(axes):
        return False
    for length, axis in zip(shape, axes):  # noqa: B905, SIM110 - of equal length
        if length != axis[1] and axis[1] is not None:
            return False
    return True


def _needs_no_conversion(value: Array, kind: str) -> bool:
    """Whether the dtype needs no conversion."""
    dtype = value.dtype
    return dtype.char in CHARS[kind] and dtype.isnative


def expected_array(kind: str, axes: tuple[Axis, ...]) -> str:
    """The expected type and shape in words: float [nodes=5, vocabulary=64]."""
    inside = ", ".join(name if size is None else f"{name}={size}" for name, size in axes)
    return f"{kind} [{inside}]"


def is_array_like(value: object) -> bool:
    """Whether `value` is an array or a tensor of some library.

    The methods of its type decide, so that torch need not be imported and other libraries are admitted too.
    """
    if isinstance(value, (np.ndarray, np.generic)):
        return True
    value_type = type(value)
    return hasattr(value_type, "__array__") or (hasattr(value_type, "detach") and hasattr(value_type, "numpy"))


def read_array(value: object) -> Array | str:
    """`value` as a NumPy array of any dtype and shape, or a few words that say why it cannot be read as one."""
    try:
        if is_array_like(value):
            return _from_library(value)
        if isinstance(value, (list, tuple)):
            return _stack(value)
    except Exception as why:  # a stranger's array may raise anything
        return f"{describe(value)} that cannot be read ({type(why).__name__}: {' '.join(str(why).split())[:80]})"
    return describe(value)


def _from_library(value: Any) -> Array:
    """A NumPy array, or a tensor on any device, as a NumPy array on the host.

    A tensor is detached; bfloat16 and float8 are widened to float32.
    """
    if isinstance(value, (np.ndarray, np.generic)):
        return np.asarray(value)
    if not hasattr(value, "detach"):
        return np.asarray(value)
    host = value.detach().cpu()
    narrow = str(getattr(host, "dtype", "")).rpartition(".")[2]
    # NumPy has neither bfloat16 nor float8, and `Tensor.numpy` refuses both.
    if narrow == "bfloat16" or narrow.startswith("float8"):
        host = host.float()
    return np.asarray(host.numpy())


def _stack(value: list[Any] | tuple[Any, ...]) -> Array | str:
    """A list of numbers, or of arrays of equal shape, as one array; otherwise words that say why it does not stack."""
    first: Any = value
    # The first innermost entry decides whether the list holds numbers or arrays.
    for _ in range(DEEPEST):
        if not isinstance(first, (list, tuple)) or not first:
            break
        first = first[0]
    name = type(value).__name__
    if not is_array_like(first):
        try:
            return np.array(value)
        except ValueError:
            return f"{name} of {len(value)} rows of unequal length"
    parts = [read_array(entry) for entry in value]
    broken = next((part for part in parts if isinstance(part, str)), None)
    if broken is not None:
        return f"{name} with {broken}"
    arrays = [part for part in parts if isinstance(part, np.ndarray)]
    shapes = sorted({part.shape for part in arrays})
    if len(shapes) > 1:
        return f"{name} of {len(value)} arrays of unequal shapes {', '.join(map(describe_shape, shapes[:3]))}"
    return np.stack(arrays)


def _convert(field: str, value: object, kind: str, axes: tuple[Axis, ...]) -> Array:
    """`value` as a new array of `kind`; raises Misshapen where its numbers are of another kind."""
    result = read_array(value)
    if isinstance(result, str):
        raise refusal(field, value, expected_array(kind, axes), result)
    of_kind, convertible, target = CAST[kind]
    # NumPy gives an empty list the dtype float64, which says nothing about the kind that was meant.
    if not result.size and isinstance(value, (list, tuple)):
        return result.astype(target)
    if result.dtype.kind in of_kind:
        return result if _needs_no_conversion(result, kind) else result.astype(target)
    description = _describe_refused(value, result)
    if result.dtype.kind not in convertible:
        raise refusal(field, value, expected_array(kind, axes), description)
    if kind == "bool" and result.size and not 0 <= result.min() <= result.max() <= 1:
        raise refusal(field, value, expected_array(kind, axes), f"{description} with other values than 0 and 1")
    # An unsigned 64-bit integer beyond this would wrap to a negative one.
    if kind == "int" and result.size and result.max() > np.iinfo(np.int64).max:
        raise refusal(field, value, expected_array(kind, axes), f"{description} with values beyond 64 bits")
    return result.astype(target)


def _describe_refused(value: object, array: Array) -> str:
    """The refused value in words: a list by its array's dtype and shape, any other value as `describe` gives it."""
    if isinstance(value, (list, tuple)):
        return f"{type(value).__name__} of {array.dtype} {describe_shape(array.shape)}"
    return describe(value)
