"""Files of JSON and text that a user names.

A file that cannot be read ends the command with one line.
"""

import json
from pathlib import Path
from typing import Any

from specverify.setup.errors import UnusableInput


def json_in(path: Path) -> Any:
    """The content of a JSON file; raises UnusableInput where it cannot be read or holds no JSON."""
    try:
        return json.loads(text_in(path))
    except ValueError as why:
        raise UnusableInput(f"{path}: no JSON: {why}") from None


def text_in(path: Path) -> str:
    """The content of a UTF-8 file; raises UnusableInput where it cannot be read."""
    try:
        return path.read_text(encoding="utf-8")
    except (OSError, UnicodeDecodeError) as why:
        raise UnusableInput(f"{path}: {getattr(why, 'strerror', None) or why}") from None


def check_apart(files: dict[str, str | None]) -> None:
    """Refuse reports that would overwrite each other.

    Raises:
        UnusableInput: Two options name one file; the message names options and file.
    """
    option_of_place: dict[str, str] = {}
    for option, file in files.items():
        if file is None:
            continue
        place = "-" if file == "-" else str(Path(file).resolve())
        if place in option_of_place:
            raise UnusableInput(
                f"{option_of_place[place]} and {option} would be one file, {file}: give them different names"
            )
        option_of_place[place] = option
