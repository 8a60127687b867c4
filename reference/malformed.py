"""Malformed: the error for a field that holds a value it may not hold.

The error carries the path of the field.
"""

from collections.abc import Iterator
from contextlib import contextmanager


class Malformed(ValueError):
    """A field holds a value that it may not hold.

    Attributes:
        path: Path of the field inside its object, such as `tree.parent[3]`; empty for the object itself.
        why: One sentence without the path.
    """

    def __init__(self, path: str, why: str) -> None:
        super().__init__(f"{path}: {why}" if path else why)
        self.path = path
        self.why = why

    def under(self, prefix: str) -> "Malformed":
        """The same complaint with the path seen from the object that holds this one as its field `prefix`."""
        joint = "" if not self.path or self.path.startswith("[") else "."
        return Malformed(f"{prefix}{joint}{self.path}", self.why)


@contextmanager
def under(prefix: str) -> Iterator[None]:
    """Put `prefix` in front of the path of any complaint raised inside."""
    try:
        yield
    except Malformed as why:
        raise why.under(prefix) from None
