"""Files that a user names: those that a command reads, and those that it is asked to write.

A file that cannot be read or written ends the command with one line.
"""

import json
from collections.abc import Callable
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import click

from specverify.reports.writing import Unwritable, check_writable, write_json, write_whole
from specverify.setup.errors import UnusableInput

OWN_FOLDER = ".specverify"
"""The folder for what commands leave, if the user names none."""


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


def make_folder(folder: Path) -> None:
    """Make a folder, and those above it, unless it is there; raises Unwritable where the system refuses.

    A new folder `.specverify` hides itself from git, whatever the project's own .gitignore says.
    """
    ours = next((place for place in (folder, *folder.parents) if place.name == OWN_FOLDER), None)
    is_new = ours is not None and not ours.exists()
    try:
        folder.mkdir(parents=True, exist_ok=True)
        if is_new and ours is not None:
            (ours / ".gitignore").write_text("*\n", encoding="utf-8")
    except OSError as why:
        raise Unwritable.from_os_error(folder, why) from None


def write_or_reason(file: str, content: bytes) -> list[str]:
    """Write a file; the reason where it cannot be written, else nothing."""
    try:
        write_whole(file, content)
    except Unwritable as why:
        return [str(why)]
    return []


@dataclass(frozen=True)
class Outputs:
    """The files that a command is asked to write, each checked before the work begins.

    Attributes:
        json_file: A file for the figures as JSON, `-` for standard output, or None.
        html_file: A file for the HTML page, or None.
        table: A file for the table of `bench attention`, or None.

    Raises:
        UnusableInput: Two of them are one file.
        Unwritable: One of them cannot be written.
    """

    json_file: str | None
    html_file: str | None = None
    table: str | None = None

    def __post_init__(self) -> None:
        check_apart({"--json": self.json_file, "--html": self.html_file, "--table": self.table})
        for file in filter(None, (self.json_file, self.html_file, self.table)):
            check_writable(file)

    @property
    def take_stdout(self) -> bool:
        """Whether one of them is standard output, which must then hold nothing else."""
        return "-" in (self.json_file, self.html_file)

    def write(self, page: str, figures: Any, html_page: Callable[[], bytes] | None = None) -> None:
        """Print the page, and write the figures and the HTML page where they are asked for."""
        click.echo(page, err=self.take_stdout)
        self.write_files(figures, html_page)

    def write_files(self, figures: Any, html_page: Callable[[], bytes] | None = None) -> None:
        """Write the figures and the HTML page where they are asked for; the page is made only then."""
        if self.json_file is not None:
            write_json(self.json_file, figures)
        if self.html_file is not None and html_page is not None:
            write_whole(self.html_file, html_page())
