"""The door to an open backend: whether it runs in a process of its own or, in tests of other things, in this one."""

from typing import Protocol

from backends.base import Declaration
from properties.verdict.subject import Subject
from specverify.isolation.isolated import Isolated
from specverify.isolation.limits import Patience, default_memory
from specverify.isolation.wanted import Wanted


class Door(Protocol):
    """An open backend.

    Attributes:
        declaration: As it declares itself.
        manifest: What of a run depends on it, in words.
        complaints: What went wrong between two answers, one line each.
    """

    declaration: Declaration
    manifest: dict[str, str]
    complaints: list[str]

    def subject(self, keep: int = 48) -> Subject:
        """The backend as invariants see it, which remembers `keep` runs."""
        ...

    def admit(self, names: tuple[str, ...], vocabularies: tuple[int, ...] = ()) -> None:
        """Admit custom processors where the backend runs."""
        ...

    def __enter__(self) -> "Door":
        """Itself."""
        ...

    def __exit__(self, *_: object) -> None:
        """Close it."""
        ...


def opened(wanted: Wanted, patience: Patience | None = None, memory: int | None = None) -> Door:
    """Open a backend in a process of its own.

    Raises:
        Unknown, UnknownBackend, UnusableInput, WrongFlag, Unavailable, MissingInput: when it cannot be opened.
    """
    return Isolated(wanted, patience or Patience(), memory or default_memory())
