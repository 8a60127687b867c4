"""The place in a file of the repository at which a run of the engine broke."""

import os
import re
from collections.abc import Iterator
from pathlib import Path

from properties.tally import Failure

FRAME = re.compile(r"(?P<file>[^:*?\"<>|\n]{1,400}):(?P<line>\d{1,7}) in ")
"""A frame of a traceback, as a finding's `said` holds it: the last two parts of the path, and the line."""

MOST_FOLDERS = 5000
"""Folders of the repository that are looked through."""

FOREIGN = frozenset({"site-packages", "node_modules", "__pycache__"})
"""Folders whose files are not the repository's own."""


def place_of(failure: Failure, root: Path) -> tuple[str, int] | None:
    """The innermost frame of a broken run whose file lies below `root`: its path from there, and its line."""
    for line in reversed(failure.finding.said):
        frame = FRAME.match(line.strip())
        if frame is None or "\0" in frame["file"]:
            continue
        named = Path(frame["file"]).parts
        # A frame of a file at the root begins with the root's own name.
        whole = root.resolve()
        inside = next(
            (file for file in _find_files(root, named[-1]) if (whole / file).parts[-len(named) :] == named), None
        )
        if inside is not None and int(frame["line"]):
            return inside.as_posix(), int(frame["line"])
    return None


def _find_files(root: Path, name: str) -> Iterator[Path]:
    """Files called `name` below `root`, as paths from there, without those of hidden and foreign folders."""
    for at, (folder, below, names) in enumerate(os.walk(root)):
        if at == MOST_FOLDERS:
            return
        below[:] = sorted(one for one in below if not one.startswith(".") and one not in FOREIGN)
        if name in names:
            yield Path(folder, name).relative_to(root)
