"""The folder of a first contact: one file for each part that has begun, and the page of all of them.

A file is written whole or not at all, so that the folder can be read at any moment, and a run that was cut off goes on
behind the parts that it finds.
"""

import json
from pathlib import Path
from typing import Any

from specverify.first_contact.parts import BEGUN, SHORT, Part, Result
from specverify.reports.pages.first_contact import first_contact_page
from specverify.reports.writing import Unwritable, flat_json, write_whole
from specverify.setup.errors import UnusableInput

PAGE = "page.txt"
"""The page."""

FORMAT = 1
"""The version of the files; the field `first_contact` holds it."""


class Folder:
    """The folder `path` of a first contact on `device`; it is made if need be.

    Raises:
        UnusableInput: A file in it is of another device, or cannot be read.
        Unwritable: The system refuses.
    """

    def __init__(self, path: Path, device: str) -> None:
        self.path = path
        self._device = device
        try:
            path.mkdir(parents=True, exist_ok=True)
        except OSError as error:
            raise Unwritable.from_os_error(path, error) from None
        self.results: dict[str, Result] = {}
        for file in sorted(path.glob("part-*.json")):
            content = self._read(file)
            self.results[content["part"]] = Result(content["state"], content["seconds"], content["figures"])

    def _read(self, file: Path) -> dict[str, Any]:
        try:
            content: dict[str, Any] = json.loads(file.read_text("utf-8"))
            if content["first_contact"] == FORMAT and content["device"] == self._device:
                return content
            why = f"it is of {content['device']}, in format {content['first_contact']}"
        except (OSError, ValueError, KeyError, TypeError) as error:
            why = f"it cannot be read ({type(error).__name__})"
        raise UnusableInput(f"{file}: {why}; choose another --into, or remove the folder")

    def unfinished(self) -> frozenset[str]:
        """The names of the parts that began and have not ended, or not with all their items."""
        return frozenset(name for name, result in self.results.items() if result.state in (BEGUN, SHORT))

    def keep(self, part: Part, result: Result) -> None:
        """Write what a part has told, and the page with it."""
        self.results[part.name] = result
        content = {
            "first_contact": FORMAT,
            "device": self._device,
            "part": part.name,
            "state": result.state,
            "seconds": result.seconds,
            "figures": result.figures,
        }
        write_whole(self.path / f"part-{part.name.replace(' ', '-')}.json", flat_json(content).encode())

    def write_page(self, parts: tuple[Part, ...]) -> str:
        """Write the page of all `parts`, those that have not run among them; returns it."""
        page = first_contact_page(
            self._device, [(part.name, part.tells, self.results.get(part.name)) for part in parts]
        )
        write_whole(self.path / PAGE, page.encode())
        return page
