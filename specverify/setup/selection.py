"""Names on the command line that need no engine: invariants by glob, KV layouts."""

from fnmatch import fnmatchcase

from backends.shipped import ROWS
from properties.invariants import ALL
from properties.verdict.invariant import Invariant
from reference.layout import KINDS


class Unknown(ValueError):
    """A name on the command line is unknown; the message lists the known names, or the command that lists them."""


def invariants_matching(globs: tuple[str, ...]) -> tuple[Invariant, ...]:
    """The invariants that any of `globs` matches; all invariants without globs.

    Raises:
        Unknown: A glob matches no invariant.
    """
    for glob in globs:
        if not any(fnmatchcase(one.name, glob) for one in ALL):
            raise Unknown(f"no invariant matches {glob!r}: `specverify list invariants` names them")
    return tuple(one for one in ALL if not globs or any(fnmatchcase(one.name, glob) for glob in globs))


def check_layout(layout: str, backends: tuple[str, ...]) -> None:
    """Check that a KV layout exists, and that those of `backends` that are ours declare it.

    A backend that is not ours is checked when it is opened, in a process of its own.

    Raises:
        Unknown: The layout does not exist, or a backend does not declare it.
    """
    if layout not in KINDS:
        raise Unknown(f"no KV layout is called {layout!r}: known are {', '.join(KINDS)}")
    for backend in backends:
        # The registry's rows are read, so that nothing is opened for this check.
        declared = next((row.layouts for row in ROWS if row.name == backend), None)
        if declared is not None:
            check_declared(layout, backend, declared)


def check_dtypes(asked: tuple[str, ...], backend: str, declared: tuple[str, ...]) -> None:
    """Raise Unknown, naming the first working dtype that is asked for and not declared by `backend`."""
    missing = next((one for one in asked if one not in declared), None)
    if missing is not None:
        raise Unknown(f"{backend} declares no dtype {missing}: it has {', '.join(declared)}")


def check_declared(layout: str, backend: str, declared: tuple[str, ...]) -> None:
    """Check that `layout` is among the KV layouts that `backend` declares.

    Raises:
        Unknown: It is not.
    """
    if layout not in declared:
        raise Unknown(f"{backend} declares no KV layout {layout}: it has {', '.join(declared) or 'none'}")
