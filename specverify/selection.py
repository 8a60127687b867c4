"""Names on the command line that mean something without an engine: invariants by glob."""

from fnmatch import fnmatchcase

from properties.invariant import Invariant
from properties.invariants import ALL


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
