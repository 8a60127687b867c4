"""The files of reports that a command is asked to write."""

from pathlib import Path

from specverify.setup.errors import UnusableInput


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
