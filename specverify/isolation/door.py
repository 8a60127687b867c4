"""The interface to an open backend, which runs in a process of its own.

Tests of other parts put a backend of this process behind the same interface.
"""

from typing import Protocol

from specverify.backends.base import Declaration
from specverify.isolation.backend_spec import BackendSpec
from specverify.isolation.here import Here, is_here
from specverify.isolation.isolated import Isolated
from specverify.isolation.limits import Patience, default_memory
from specverify.properties.residue import Residue
from specverify.properties.verdict.subject import Subject


class Door(Protocol):
    """An open backend.

    Attributes:
        declaration: The backend's declaration of itself.
        manifest: The facts of a run that depend on the backend, such as device and mode.
        complaints: One line for each problem between two answers.
        residue: What runs left behind and that changes no answer, by kind.
    """

    declaration: Declaration
    manifest: dict[str, str]
    complaints: list[str]
    residue: dict[str, Residue]

    def subject(self, keep: int = 48) -> Subject:
        """The backend as invariants see it; the Subject remembers `keep` runs."""
        ...

    def admit(self, names: tuple[str, ...], vocabularies: tuple[int, ...] = ()) -> None:
        """Admit custom processors in the process of the backend."""
        ...

    def set_threads(self, count: int) -> None:
        """Give a backend on the CPU `count` torch threads."""
        ...

    def __enter__(self) -> "Door":
        """Itself."""
        ...

    def __exit__(self, *_: object) -> None:
        """Close it."""
        ...


def open_backend(spec: BackendSpec, patience: Patience | None = None, memory: int | None = None) -> Door:
    """Open a backend in a process of its own; one that is an object of this process is opened here.

    Raises:
        Unknown, UnknownBackend, UnusableInput, WrongFlag, Unavailable, MissingInput: The backend cannot be opened.
    """
    if is_here(spec.backend):
        return Here(spec)
    return Isolated(spec, patience or Patience(), memory or default_memory())
