"""Words as plain JSON values: a dataclass becomes an object, a member of a union is tagged by its `kind`."""

from dataclasses import fields, is_dataclass
from typing import Any

TAGS = {
    "Seeded": "seeded",
    "Checkpoint": "checkpoint",
    "Scripted": "scripted",
    "Ngram": "ngram",
    "LanguageModel": "model",
}
"""The `kind` written for each class that stands in a union."""


def plain(value: Any) -> Any:
    """`value` as JSON would hold it: objects, lists, numbers, strings; tuples become lists, NumPy numbers numbers."""
    if is_dataclass(value) and not isinstance(value, type):
        content = {field.name: plain(getattr(value, field.name)) for field in fields(value)}
        tag = TAGS.get(type(value).__name__)
        return {"kind": tag, **content} if tag else content
    if isinstance(value, (tuple, list)):
        return [plain(item) for item in value]
    if isinstance(value, dict):
        return {str(key): plain(item) for key, item in value.items()}
    return value.item() if hasattr(value, "item") else value
