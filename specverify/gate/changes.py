"""The files that changed since a commit, as git tells them."""

import subprocess
from fnmatch import fnmatchcase
from pathlib import Path

from specverify.reports.format import cut
from specverify.setup.errors import MissingInput, UnusableInput

GIT_S = 60
"""Seconds that git may take."""


def changed_since(reference: str, folder: Path) -> list[str]:
    """Paths of files below `folder`, relative to it, that differ from the commit before both sides parted.

    Files that git does not track count as changed.

    Raises:
        UnusableInput: The commit is unknown, or `folder` lies in no repository.
        MissingInput: There is no git.
    """
    base = _git(folder, "merge-base", "--", reference, "HEAD").strip()
    changed = _git(folder, "diff", "--name-only", "--relative", "-z", base)
    untracked = _git(folder, "ls-files", "--others", "--exclude-standard", "-z")
    return sorted({name for name in f"{changed}\0{untracked}".split("\0") if name})


def matching(names: list[str], globs: tuple[str, ...]) -> list[str]:
    """The entries of `names` that one of `globs` matches; `*` stands for slashes too."""
    return [name for name in names if any(fnmatchcase(name, glob) for glob in globs)]


def _git(folder: Path, *words: str) -> str:
    try:
        ended = subprocess.run(["git", *words], cwd=folder, capture_output=True, text=True, timeout=GIT_S)
    except FileNotFoundError:
        raise MissingInput("--changed-since needs git, which is not installed") from None
    except subprocess.TimeoutExpired:
        raise MissingInput(f"--changed-since: git {words[0]} took more than {GIT_S} s") from None
    if ended.returncode:
        message = cut(ended.stderr.strip() or f"exit code {ended.returncode}", 160)
        raise UnusableInput(f"--changed-since: git {words[0]}: {message}")
    return ended.stdout
