"""Fields of a checkpoint's JSON files, with defaults and checks of type and size."""

import json
import math
from pathlib import Path
from typing import Any

from specverify.reference.files.regular import read_whole

LARGEST_CONFIG = 16 * 2**20
"""Largest config.json that is read, in bytes; published ones hold a few kilobytes."""

LARGEST_INDEX = 64 * 2**20
"""Largest model.safetensors.index.json that is read, in bytes; the largest published ones hold about ten megabytes."""

LARGEST_SIZE = 2**24
"""The largest vocabulary and the longest sequence that are read: the bounds of a case file."""

LARGEST_NUMBER = 2**53
"""Bound of the whole numbers of a config.json: below it, float64 holds each of them exactly."""

MOST_LETTERS = 60
"""Most letters of a value from the file that a message repeats."""


class UnreadableCheckpoint(ValueError):
    """A checkpoint directory cannot be read: one line that says what is wrong, in which file, and what to do."""


def quote_value(value: Any) -> str:
    """`value`, decoded JSON, for a message: its kind and length, or Python's notation cut to SHOWN letters."""
    if isinstance(value, list) and len(value) <= 4 and not any(isinstance(entry, (list, dict)) for entry in value):
        return f"[{', '.join(map(quote_value, value))}]"
    if isinstance(value, (list, dict)):
        return f"{'a list' if isinstance(value, list) else 'an object'} of {len(value)} entries"
    # Python refuses to print an int of more than 4300 digits: the digits are counted instead.
    if isinstance(value, int) and abs(value) >= LARGEST_NUMBER:
        return f"a number of {math.ceil(value.bit_length() * math.log10(2))} digits"
    text = repr(value[: MOST_LETTERS + 1] if isinstance(value, str) else value)
    return text if len(text) <= MOST_LETTERS else f"{text[:MOST_LETTERS]}…"


class Fields:
    """The fields of one JSON object, with the defaults of its model family."""

    def __init__(self, where: Path, content: dict[str, Any], defaults: dict[str, Any]) -> None:
        self.where = where
        self.content = {**defaults, **content}

    def refuse(self, reason: str) -> UnreadableCheckpoint:
        """The complaint `reason` about the file."""
        return UnreadableCheckpoint(f"{self.where}: {reason}")

    def get(self, name: str) -> Any:
        """The value of the field `name`, unchecked; None where the file has none."""
        return self.content.get(name)

    def number(self, name: str, default: float | None = None) -> float:
        """The finite number in the field `name`, an int below LARGEST_NUMBER or a float; `default` where it is null.

        Raises:
            UnreadableCheckpoint: no such number.
        """
        value = default if self.get(name) is None else self.get(name)
        if value is None:
            raise self.refuse(f"field {name} is missing; add it as the model's author published it")
        # In Python a bool is an int; in JSON `true` is no number.
        if isinstance(value, bool) or not isinstance(value, (int, float)):
            raise self.refuse(f"field {name} is {quote_value(value)}, not a number; correct it")
        if not _is_moderate(value):
            raise self.refuse(f"field {name} is {quote_value(value)}, not a number that a model can have; correct it")
        return value

    def integer(self, name: str, default: int | None = None) -> int:
        """The whole number in the field `name`, below LARGEST_NUMBER; `default` where it is null.

        Raises:
            UnreadableCheckpoint: no such number.
        """
        value = self.number(name, default)
        if not isinstance(value, int):
            raise self.refuse(f"field {name} is {quote_value(value)}, not a whole number; correct it")
        return value

    def size(self, name: str) -> int:
        """The whole number from 1 to LARGEST_SIZE in the field `name`.

        Raises:
            UnreadableCheckpoint: no such number.
        """
        value = self.integer(name)
        if value < 1:
            raise self.refuse(f"field {name} is {value}, not a size; correct it")
        if value > LARGEST_SIZE:
            raise self.refuse(f"field {name} is {value}, more than the {LARGEST_SIZE} that a case can hold")
        return value

    def flag(self, name: str, default: bool = False) -> bool:
        """The truth value in the field `name`; `default` where it is null.

        Raises:
            UnreadableCheckpoint: no truth value.
        """
        value = default if self.get(name) is None else self.get(name)
        if not isinstance(value, bool):
            raise self.refuse(f"field {name} is {quote_value(value)}, neither true nor false; correct it")
        return value

    def numbers(self, name: str) -> tuple[float, ...]:
        """The list of finite numbers in the field `name`, as floats; empty where the field is null.

        Raises:
            UnreadableCheckpoint: no such list.
        """
        value = self.get(name)
        if value is None:
            return ()
        if not isinstance(value, list) or any(isinstance(x, bool) or not isinstance(x, (int, float)) for x in value):
            raise self.refuse(f"{name} is not a list of numbers; correct it")
        if not all(map(_is_moderate, value)):
            raise self.refuse(f"{name} holds a number that no model can have; correct it")
        return tuple(float(x) for x in value)


def _is_moderate(value: float) -> bool:
    """Whether a number is finite and, where it is whole, small enough for float64 to hold it exactly."""
    return abs(value) < LARGEST_NUMBER if isinstance(value, int) else math.isfinite(value)


def read_json(file: Path, most: int = LARGEST_CONFIG) -> dict[str, Any]:
    """The JSON object in the regular file `file`, of at most `most` bytes.

    Raises:
        UnreadableCheckpoint: the file is missing, irregular, too large, or holds something else.
    """
    try:
        content = json.loads(read_whole(file, most).decode("utf-8"))
    except FileNotFoundError:
        raise UnreadableCheckpoint(
            f"{file.parent}: {file.name} is missing; point to a Hugging Face checkpoint directory"
        ) from None
    except OSError as error:
        raise unreadable(file, error) from None
    except (ValueError, RecursionError):
        raise UnreadableCheckpoint(f"{file}: not JSON; download the file again") from None
    except MemoryError:
        raise UnreadableCheckpoint(f"{file}: too large for the memory of this machine") from None
    if not isinstance(content, dict):
        raise UnreadableCheckpoint(f"{file}: holds no JSON object; download the file again")
    return content


def unreadable(file: Path, error: OSError) -> UnreadableCheckpoint:
    """The complaint that the system cannot read `file`, or that `specverify.reference.files.regular` refuses it."""
    todo = "check its permissions" if isinstance(error, PermissionError) else "download the file again"
    return UnreadableCheckpoint(f"{file}: cannot be read ({error.strerror or error}); {todo}")
