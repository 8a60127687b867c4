"""TOML files: reading by `tomllib` or, on Python 3.10, `tomli`; quoting."""

import sys
from pathlib import Path
from typing import Any

from specverify.setup.errors import UnusableInput

if sys.version_info >= (3, 11):
    import tomllib
else:
    import tomli as tomllib

LARGEST = 4 * 2**20
"""The largest file that is read, in bytes."""


def read_toml(path: Path) -> dict[str, Any]:
    """The content of a TOML file.

    Raises:
        UnusableInput: The file cannot be read, or holds no TOML; the line names it.
    """
    try:
        with path.open("rb") as file:
            raw = file.read(LARGEST + 1)
        if len(raw) > LARGEST:
            raise UnusableInput(f"{path}: larger than {LARGEST // 2**20} MiB: it is no file of settings")
        content: dict[str, Any] = tomllib.loads(raw.decode("utf-8-sig"))
    except OSError as why:
        raise UnusableInput(f"{path}: {why.strerror or why}") from None
    except UnicodeDecodeError as why:
        raise UnusableInput(f"{path}: not UTF-8 text (byte {why.start})") from None
    except (tomllib.TOMLDecodeError, RecursionError) as why:
        raise UnusableInput(f"{path}: not TOML: {why}") from None
    return content


def quote(text: str) -> str:
    r"""`text` as a basic string of TOML.

    >>> print(quote('a "b"\n'))
    "a \"b\"\u000a"
    """
    plain = text.replace("\\", "\\\\").replace('"', '\\"')
    escaped = "".join(char if char.isprintable() else _escape(char) for char in plain)
    return f'"{escaped}"'


def _escape(char: str) -> str:
    # TOML knows no lone surrogates.
    number = 0xFFFD if 0xD800 <= ord(char) <= 0xDFFF else ord(char)
    return f"\\u{number:04x}" if number < 0x10000 else f"\\U{number:08x}"
