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
