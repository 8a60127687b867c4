"""The files of reports that a command is asked to write."""

from pathlib import Path

from specverify.setup.errors import UnusableInput


def check_apart(files: dict[str, str | None]) -> None:
    """Refuse reports that would overwrite each other.

    Raises:
        UnusableInput: Two options name one file; the message names options and file.
    """
    taken: dict[str, str] = {}
    for option, file in files.items():
        if file is None:
            continue
        place = "-" if file == "-" else str(Path(file).resolve())
        if place in taken:
            raise UnusableInput(f"{taken[place]} and {option} would be one file, {file}: give them different names")
        taken[place] = option
