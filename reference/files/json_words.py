"""Dataclasses of the reference as plain JSON values.

A dataclass becomes an object; a member of a union gets the key `kind`.
"""

from collections.abc import Callable
from dataclasses import Field, fields, is_dataclass
from typing import Any


def is_younger(owner: type, field: "Field[Any]") -> bool:
    """Whether the metadata of a field of the dataclass `owner` says `omit_default`."""
    return bool(field.metadata.get("omit_default"))


def plain(value: Any, may_omit: Callable[[type, "Field[Any]"], bool] = is_younger) -> Any:
    """`value` as JSON holds it: objects, lists, numbers, strings; tuples become lists, NumPy numbers become numbers.

    A field that holds its default is left out where `may_omit` agrees. Without another word those are the fields whose
    metadata says `omit_default`, so that a field added later changes neither older files nor their ids.
    """
    if is_dataclass(value) and not isinstance(value, type):
        owner = type(value)
        content = {
            field.name: plain(getattr(value, field.name), may_omit)
            for field in fields(value)
            if not (getattr(value, field.name) == field.default and may_omit(owner, field))
        }
        tag = getattr(owner, "TAG", None)  # only classes that share a field with other classes have a tag
        return {"kind": tag, **content} if tag else content
    if isinstance(value, (tuple, list)):
        return [plain(item, may_omit) for item in value]
    if isinstance(value, dict):
        return {str(key): plain(item, may_omit) for key, item in value.items()}
    return value.item() if hasattr(value, "item") else value
