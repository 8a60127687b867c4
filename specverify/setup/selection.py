"""Names on the command line that mean something without an engine: invariants by glob, KV layouts."""

from fnmatch import fnmatchcase

from backends.shipped import ROWS
from properties.invariants import ALL
from properties.verdict.invariant import Invariant
from reference.layout import KINDS


class Unknown(ValueError):
    """A name on the command line means nothing; the message says what would."""


def invariants_matching(globs: tuple[str, ...]) -> tuple[Invariant, ...]:
    """The invariants that any of `globs` names; all of them for no glob.

    Raises:
        Unknown: for a glob that matches nothing.
    """
    for glob in globs:
        if not any(fnmatchcase(one.name, glob) for one in ALL):
            raise Unknown(f"no invariant matches {glob!r}: `specverify list invariants` names them")
    return tuple(one for one in ALL if not globs or any(fnmatchcase(one.name, glob) for glob in globs))


def check_layout(layout: str, backends: tuple[str, ...]) -> None:
    """Refuse a KV layout that nobody knows, or that one of `backends` of ours does not declare.

    A stranger's backend is asked where it is opened, in a process of its own.

    Raises:
        Unknown: for either.
    """
    if layout not in KINDS:
        raise Unknown(f"no KV layout is called {layout!r}: known are {', '.join(KINDS)}")
    for backend in backends:
        declared = next((row.layouts for row in ROWS if row.name == backend), None)
        if declared is not None:
            check_declared(layout, backend, declared)


def check_declared(layout: str, backend: str, declared: tuple[str, ...]) -> None:
    """Raise Unknown where the KV layouts that `backend` declares do not hold `layout`."""
    if layout not in declared:
        raise Unknown(f"{backend} declares no KV layout {layout}: it has {', '.join(declared) or 'none'}")
