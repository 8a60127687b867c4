"""The one error of the words: a value that is not what its field may hold, with the path of the field."""

from collections.abc import Iterator
from contextlib import contextmanager


class Malformed(ValueError):
    """A field holds what it may not.

    Attributes:
        path: Path of the field inside its object, such as `tree.parent[3]`; empty for the object itself.
        why: One sentence without the path.
    """

    def __init__(self, path: str, why: str) -> None:
        super().__init__(f"{path}: {why}" if path else why)
        self.path = path
        self.why = why

    def under(self, prefix: str) -> "Malformed":
        """The same complaint seen from the object that holds this one as its field `prefix`."""
        joint = "" if not self.path or self.path.startswith("[") else "."
        return Malformed(f"{prefix}{joint}{self.path}", self.why)


@contextmanager
def under(prefix: str) -> Iterator[None]:
    """Complaints raised inside are those of the field `prefix`."""
    try:
        yield
    except Malformed as why:
        raise why.under(prefix) from None
