"""Dataclasses of the reference as plain JSON values.

A dataclass becomes an object; a member of a union gets the key `kind`.
"""

from dataclasses import fields, is_dataclass
from typing import Any


def plain(value: Any) -> Any:
    """`value` as JSON holds it: objects, lists, numbers, strings; tuples become lists, NumPy numbers become numbers.

    A field whose metadata says `omit_default` is left out where it holds its default, so that a field added later
    changes neither older files nor their ids.
    """
    if is_dataclass(value) and not isinstance(value, type):
        held = [(field, getattr(value, field.name)) for field in fields(value)]
        content = {
            field.name: plain(item)
            for field, item in held
            if not (field.metadata.get("omit_default") and item == field.default)
        }
        tag = getattr(type(value), "TAG", None)  # only classes that share a field with other classes have a tag
        return {"kind": tag, **content} if tag else content
    if isinstance(value, (tuple, list)):
        return [plain(item) for item in value]
    if isinstance(value, dict):
        return {str(key): plain(item) for key, item in value.items()}
    return value.item() if hasattr(value, "item") else value
