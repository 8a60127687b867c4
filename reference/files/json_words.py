"""Words as plain JSON values: a dataclass becomes an object, a member of a union is tagged by its `kind`."""

from dataclasses import fields, is_dataclass
from typing import Any


def plain(value: Any) -> Any:
    """`value` as JSON would hold it: objects, lists, numbers, strings; tuples become lists, NumPy numbers numbers.

    A field whose metadata says `omit_default` is left out where it holds its default, so that a younger field changes
    neither older files nor their ids.
    """
    if is_dataclass(value) and not isinstance(value, type):
        held = [(field, getattr(value, field.name)) for field in fields(value)]
        content = {
            field.name: plain(item)
            for field, item in held
            if not (field.metadata.get("omit_default") and item == field.default)
        }
        tag = getattr(type(value), "TAG", None)  # of a class that stands beside others in one field
        return {"kind": tag, **content} if tag else content
    if isinstance(value, (tuple, list)):
        return [plain(item) for item in value]
    if isinstance(value, dict):
        return {str(key): plain(item) for key, item in value.items()}
    return value.item() if hasattr(value, "item") else value
