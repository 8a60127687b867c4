"""Arrays at the door: lists, tensors and arrays become read-only NumPy arrays of the expected kind and shape."""

from typing import Any

import numpy as np

from backends.admission.misshapen import described, refusal, sized
from reference.trace import Array

Axis = tuple[str, int | None]
"""An axis by name, and its length; None where any length goes."""

CHARS = {"float": "efd", "int": "bhilq", "bool": "?"}
"""For each kind the dtypes, by their NumPy character, that pass as they are."""

CAST = {"float": ("f", "iu", np.float64), "int": ("i", "u", np.int64), "bool": ("b", "iu", np.bool_)}
"""For each kind: dtype kinds that are of it, dtype kinds that are converted, and what they are converted to."""

DEEPEST = 8
"""Nested lists of arrays are looked at this deep."""


def array(field: str, value: object, kind: str, axes: tuple[Axis, ...], read_only: bool = True) -> Array:
    """`value` as a NumPy array of `kind` ("float", "int", "bool") with these axes, C-contiguous.

    A NumPy array that is already so, and read-only, passes as it is; everything else is copied. Floats keep their
    width of 16, 32 or 64 bits; bfloat16 becomes float32, integers in the place of floats become float64, unsigned
    integers int64, and 0 and 1 in the place of bools become bools.

    Args:
        field: How the refusal names it.
        value: A NumPy array, a tensor (anything with `detach`, `cpu` and `numpy`), nested lists of numbers, or lists
            of arrays or tensors that stack.
        kind: A key of CHARS.
        axes: The expected axes.
        read_only: Whether a writeable array is copied; False where nobody keeps the array.

    Raises:
        Misshapen: naming the field, what was found, and what is expected.
    """
    if type(value) is np.ndarray and value.dtype.char in CHARS[kind] and value.dtype.isnative:
        held = value
    else:
        held = _converted(field, value, kind, axes)
    if not _fits(held.shape, axes):
        raise refusal(field, value, worded(kind, axes), _found(value, held))
    flags = held.flags
    if (read_only and flags.writeable) or not flags.c_contiguous:
        held = np.array(held, order="C")
        held.flags.writeable = not read_only
    return held


def _fits(shape: tuple[int, ...], axes: tuple[Axis, ...]) -> bool:
    """Whether a shape has these axes; a loop and no generator, since every array of every run passes here."""
    if len(shape) != len(axes):
        return False
    for got, axis in zip(shape, axes):  # noqa: B905, SIM110 - of equal length
        if got != axis[1] and axis[1] is not None:
            return False
    return True


def _as_it_is(value: Array, kind: str) -> bool:
    """Whether the dtype needs no conversion."""
    dtype = value.dtype
    return dtype.char in CHARS[kind] and dtype.isnative


def worded(kind: str, axes: tuple[Axis, ...]) -> str:
    """The expected type and shape in words: float [nodes=5, vocabulary=64]."""
    inside = ", ".join(name if size is None else f"{name}={size}" for name, size in axes)
    return f"{kind} [{inside}]"


def is_array_like(value: object) -> bool:
    """Whether `value` is an array or a tensor of some library, by what it offers and not by its type."""
    if isinstance(value, (np.ndarray, np.generic)):
        return True
    offered = type(value)
    return hasattr(offered, "__array__") or (hasattr(offered, "detach") and hasattr(offered, "numpy"))


def read(value: object) -> Array | str:
    """`value` as a NumPy array of whatever dtype and shape it has; else a few words on why there is none."""
    try:
        if is_array_like(value):
            return _from_library(value)
        if isinstance(value, (list, tuple)):
            return _stacked(value)
    except Exception as why:  # a stranger's array may raise anything
        return f"{described(value)} that cannot be read ({type(why).__name__}: {' '.join(str(why).split())[:80]})"
    return described(value)


def _from_library(value: Any) -> Array:
    """The numbers of a NumPy array, or of a tensor on any device: detached, on the host, bfloat16 widened."""
    if isinstance(value, (np.ndarray, np.generic)):
        return np.asarray(value)
    if not hasattr(value, "detach"):
        return np.asarray(value)
    host = value.detach().cpu()
    narrow = str(getattr(host, "dtype", "")).rpartition(".")[2]
    if narrow == "bfloat16" or narrow.startswith("float8"):
        host = host.float()
    return np.asarray(host.numpy())


def _stacked(value: list[Any] | tuple[Any, ...]) -> Array | str:
    """A list of numbers or of arrays of one shape as one array; else words on why they do not stack."""
    first: Any = value
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
    parts = [read(one) for one in value]
    broken = next((part for part in parts if isinstance(part, str)), None)
    if broken is not None:
        return f"{name} with {broken}"
    arrays = [part for part in parts if isinstance(part, np.ndarray)]
    shapes = sorted({part.shape for part in arrays})
    if len(shapes) > 1:
        return f"{name} of {len(value)} arrays of unequal shapes {', '.join(map(sized, shapes[:3]))}"
    return np.stack(arrays)


def _converted(field: str, value: object, kind: str, axes: tuple[Axis, ...]) -> Array:
    """`value` as a new array of `kind`; raises Misshapen where its numbers are of another."""
    held = read(value)
    if isinstance(held, str):
        raise refusal(field, value, worded(kind, axes), held)
    of_kind, convertible, target = CAST[kind]
    if not held.size and isinstance(value, (list, tuple)):
        return held.astype(target)
    if held.dtype.kind in of_kind:
        return held if _as_it_is(held, kind) else held.astype(target)
    found = _found(value, held)
    if held.dtype.kind not in convertible:
        raise refusal(field, value, worded(kind, axes), found)
    if kind == "bool" and held.size and not 0 <= held.min() <= held.max() <= 1:
        raise refusal(field, value, worded(kind, axes), f"{found} with other values than 0 and 1")
    if kind == "int" and held.size and held.max() > np.iinfo(np.int64).max:
        raise refusal(field, value, worded(kind, axes), f"{found} with values beyond 64 bits")
    return held.astype(target)


def _found(value: object, held: Array) -> str:
    """The value that was found, in words: a list by the dtype and shape of its array, any other value by its own."""
    if isinstance(value, (list, tuple)):
        return f"{type(value).__name__} of {held.dtype} {sized(held.shape)}"
    return described(value)
