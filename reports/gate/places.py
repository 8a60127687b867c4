"""The place in a file of the repository at which a run of the engine broke."""

import os
import re
from collections.abc import Iterator
from pathlib import Path

from specverify.properties.tally import Failure

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
        named_parts = Path(frame["file"]).parts
        # A frame of a file at the root begins with the root's own name.
        resolved_root = root.resolve()
        inner_path = next(
            (
                file
                for file in _find_files(root, named_parts[-1])
                if (resolved_root / file).parts[-len(named_parts) :] == named_parts
            ),
            None,
        )
        if inner_path is not None and int(frame["line"]):
            return inner_path.as_posix(), int(frame["line"])
    return None


def _find_files(root: Path, name: str) -> Iterator[Path]:
    """Files called `name` below `root`, as paths from there, without those of hidden and foreign folders."""
    for num_folders, (folder, subfolders, names) in enumerate(os.walk(root)):
        if num_folders == MOST_FOLDERS:
            return
        subfolders[:] = sorted(
            subfolder for subfolder in subfolders if not subfolder.startswith(".") and subfolder not in FOREIGN
        )
        if name in names:
            yield Path(folder, name).relative_to(root)
