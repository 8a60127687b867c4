"""Dataclasses as JSON values, and back by their annotations.

Cases go by their own format (`specverify.reference.case_json`). Numbers that JSON does not know, arrays and values
without an annotation carry their kind with them.
"""

import math
import types
from collections import Counter
from collections.abc import Mapping
from dataclasses import MISSING, fields, is_dataclass
from enum import Enum
from functools import cache
from typing import Any, TypeVar, Union, get_args, get_origin, get_type_hints

import numpy as np

from specverify.reference.case import Case
from specverify.reference.case_json import case_of_record, case_to_json

T = TypeVar("T")


def to_json(value: Any) -> Any:
    """`value` as a JSON value: a dataclass as an object of its fields, defaults left out."""
    if isinstance(value, Case):
        return case_to_json(value)
    if is_dataclass(value) and not isinstance(value, type):
        return {
            field.name: to_json(getattr(value, field.name))
            for field in fields(value)
            if _differs_from_default(value, field)
        }
    if isinstance(value, Enum):
        return int(value.value)
    if isinstance(value, np.ndarray):
        return {
            "dtype": str(value.dtype),
            "shape": list(value.shape),
            "array": [to_json(entry) for entry in value.flat],
        }
    if isinstance(value, np.generic):
        return to_json(value.item())
    if isinstance(value, Mapping):
        if all(isinstance(key, str) for key in value):
            return {key: to_json(item) for key, item in value.items()}
        return [[to_json(key), to_json(item)] for key, item in value.items()]
    if isinstance(value, (set, frozenset)):
        return sorted(to_json(item) for item in value)
    if isinstance(value, (list, tuple)):
        return [to_json(item) for item in value]
    if isinstance(value, float) and not math.isfinite(value):
        return {"float": repr(value)}
    if value is None or isinstance(value, (bool, int, float)):
        return value
    # A lone surrogate is no UTF-8: it is written as its escape.
    return str(value).encode("utf-8", "backslashreplace").decode()


def _differs_from_default(value: Any, field: Any) -> bool:
    """Whether a field differs from its default, as most fields of most verdicts do not."""
    here = getattr(value, field.name)
    if isinstance(here, (dict, list, set)) and not here:
        return field.default_factory is MISSING or bool(field.default_factory())
    plain = here is None or isinstance(here, (bool, int, float, str, tuple, frozenset))
    return not plain or type(here) is not type(field.default) or here != field.default


def from_json(kind: type[T], content: Any) -> T:
    """The value of the annotated type `kind` in `content`.

    Raises:
        ValueError: The content is none of that type.
    """
    try:
        value: T = _read(kind, content)
    except (TypeError, KeyError, AttributeError, IndexError, ArithmeticError) as why:
        raise ValueError(f"no {kind.__name__}: {why}") from None
    return value


@cache
def _hints(kind: type) -> dict[str, Any]:
    return get_type_hints(kind)


def _read(kind: Any, content: Any) -> Any:
    """The value of `content` under the annotation `kind`."""
    origin, inner = get_origin(kind), get_args(kind)
    if kind is Case:
        return case_of_record(content)
    if isinstance(kind, type) and is_dataclass(kind):
        hints = _hints(kind)
        return kind(**{name: _read(hints[name], item) for name, item in content.items()})
    if origin in (Union, types.UnionType):
        return _one_of(inner, content)
    if origin is tuple:
        if len(inner) == 2 and inner[1] is Ellipsis:
            return tuple(_read(inner[0], item) for item in content)
        return tuple(_read(item_kind, part) for item_kind, part in zip(inner, content, strict=True))
    if origin is frozenset:
        return frozenset(_read(inner[0], item) for item in content)
    if origin is list:
        return [_read(inner[0], item) for item in content]
    if isinstance(origin, type) and issubclass(origin, Mapping):
        pairs = content.items() if isinstance(content, dict) else content
        if origin is Counter:
            return Counter({_read(inner[0], key): count for key, count in pairs})
        return {_read(inner[0], key): _read(inner[1], item) for key, item in pairs}
    if isinstance(kind, type) and issubclass(kind, Enum):
        return kind(content)
    if kind in (int, float, str, bool) and not isinstance(content, dict):
        return float(content) if kind is float else content
    return _plain(content)


def _one_of(kinds: tuple[Any, ...], content: Any) -> Any:
    """The value of a union: None, or the dataclass or container among `kinds`, or a plain value."""
    if content is None:
        return None
    container = next((kind for kind in kinds if is_dataclass(kind) or get_origin(kind) is not None), None)
    return _plain(content) if container is None else _read(container, content)


def _plain(content: Any) -> Any:
    """A value without an annotation: a number, a text, a list, or an array."""
    if isinstance(content, list):
        return [_plain(item) for item in content]
    if not isinstance(content, dict):
        return content
    if set(content) == {"float"}:
        return float(content["float"])
    if set(content) == {"dtype", "shape", "array"}:
        entries = [_plain(entry) for entry in content["array"]]
        array = np.array(entries, dtype=np.dtype(content["dtype"])).reshape(content["shape"])
        array.flags.writeable = False
        return array
    return {key: _plain(item) for key, item in content.items()}
