"""Search for packages that shadow our dependencies on Python's path.

A shadowing package has the same name and lies before the right one on the path. This file imports the standard library
only: it runs before any other import of ours, and any other module might be shadowed itself.
"""

import os
import re
import sys
from collections.abc import Sequence
from dataclasses import dataclass
from functools import cache
from importlib.machinery import ModuleSpec, PathFinder
from importlib.util import find_spec
from pathlib import Path
from types import ModuleType

DEPENDENCIES = (
    "numpy",
    "scipy",
    "hypothesis",
    "torch",
    "transformers",
    "safetensors",
    "jsonschema",
    "click",
    "rich",
    "junitparser",
)
"""Required packages of others; each has the same name on a package index and in Python."""

COMMANDS = ("specverify", "specverify-script")
"""Names under which installers put our command, without `.exe` and `.py`."""


@dataclass(frozen=True)
class Shadow:
    """A name that Python would import from the wrong place.

    Attributes:
        name: The name of the package.
        found_file: The file that Python finds first.
        entry: The entry of `sys.path` that holds `found_file`.
        meant: The folder or file of the right package.
    """

    name: str
    found_file: Path
    entry: Path
    meant: Path

    @property
    def line(self) -> str:
        """One line that names the hidden package, the file that hides it, and the remedy."""
        return f"`{self.name}` is {self.found_file}, which hides {self.meant}: {self._remedy(self.entry)}"

    def _remedy(self, entry: Path) -> str:
        entries = os.environ.get("PYTHONPATH", "").split(os.pathsep) if os.environ.get("PYTHONPATH") else []
        if entry in [Path(path_entry).resolve() for path_entry in entries]:
            return f"take {entry} out of PYTHONPATH, or rename it"
        return "start from another folder, call `specverify` in place of `python -m specverify`, or rename it"


class ShadowedName(ImportError):
    """One of our dependencies would be imported from the wrong place."""


@cache
def shadows() -> tuple[Shadow, ...]:
    """Dependencies that Python finds in the current folder although another entry of the path holds them too.

    They are searched once, so that `RightPlaces` does not change the answer later.
    """
    here = _here()
    # An empty entry of `sys.path` means the current folder.
    entries = [entry for entry in sys.path if Path(entry or ".").resolve() == here]
    if here is None or not entries:
        return ()
    other_entries = [entry for entry in sys.path if entry not in entries]
    shadowed = []
    for name in DEPENDENCIES:
        first = _place(name)
        if first is not None and first[1] == here:
            elsewhere = _place(name, other_entries)
            if elsewhere is not None and elsewhere[0] != first[0]:
                shadowed.append(Shadow(name, *first, elsewhere[0]))
    return tuple(shadowed)


def _here() -> Path | None:
    """The current folder; None if it was removed."""
    try:
        return Path.cwd().resolve()
    except OSError:
        return None


def _place(name: str, entries: Sequence[str] | None = None) -> tuple[Path, Path] | None:
    """The file of the package or module `name`, and the folder from which it is imported; nothing is imported.

    Args:
        name: A top-level name, without a dot.
        entries: The folders to search in place of `sys.path`.
    """
    try:
        spec = find_spec(name) if entries is None else PathFinder.find_spec(name, list(entries))
    except ValueError:  # a module made at run time, without a spec that names its file
        return None
    if spec is None or not spec.origin or not spec.has_location:
        return None
    file = Path(spec.origin).resolve()
    return file, (file.parent if spec.submodule_search_locations is None else file.parent.parent)


class RightPlaces:
    """A finder, placed before all others, that imports shadowed names from their right folders.

    Only `doctor` uses it: the command reports shadowed names and must itself run in spite of them.
    """

    def __init__(self, shadowed: tuple[Shadow, ...]) -> None:
        self._entries = {shadow.name: [str(_holder(shadow.meant))] for shadow in shadowed}

    def find_spec(
        self, name: str, path: Sequence[str] | None = None, target: ModuleType | None = None
    ) -> ModuleSpec | None:
        """The spec of a shadowed name, from its right folder; None for other names (see `sys.meta_path`)."""
        if name not in self._entries:
            return None
        return PathFinder.find_spec(name, self._entries[name], target)


def _holder(meant: Path) -> Path:
    """The folder from which the package or module at `meant` is imported."""
    if meant.name == "__init__.py":
        return meant.parent.parent
    return meant.parent


def guard() -> None:
    """Stop if a name is shadowed.

    Our command ends with one line on standard error and exit code 3; `doctor` goes on, with the right packages.

    Raises:
        ShadowedName: A name is shadowed, and another program imports `specverify`.
    """
    shadowed = shadows()
    if not shadowed:
        return
    more = f" (and {len(shadowed) - 1} more: `specverify doctor` names them)" if len(shadowed) > 1 else ""
    if not _is_command(sys.argv, sys.orig_argv):
        raise ShadowedName(f"{shadowed[0].line}{more}")
    # Only the first argument: an option's value may also be "doctor".
    if "doctor" in sys.argv[1:2]:
        sys.meta_path.insert(0, RightPlaces(shadowed))
        return
    print(f"specverify: {shadowed[0].line}{more}", file=sys.stderr)  # noqa: T201 - click itself may be shadowed
    raise SystemExit(3)


def _is_command(arguments: Sequence[str], original: Sequence[str]) -> bool:
    """Whether this process is our command, not another program that imports us.

    Args:
        arguments: `sys.argv`; its first entry is `-m` while Python looks for the module that `-m` names.
        original: `sys.orig_argv`, with the interpreter's own options.
    """
    if arguments[:1] != ["-m"]:
        name = Path(arguments[0]).name if arguments else ""
        return name.removesuffix(".exe").removesuffix(".py").removesuffix(".pyw") in COMMANDS
    for word, after in zip(original[1:], [*original[2:], ""], strict=True):
        # `-m` may stand behind other short options (`-Im`), or directly before the module's name.
        if re.fullmatch("-[A-Za-z]*m", word):
            return after == "specverify"
        if word.startswith("-m"):
            return word == "-mspecverify"
    return False
