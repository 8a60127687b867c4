"""Backends that are objects of this process: no other process can import a notebook's function.

Such a backend runs in this process. A crash or a hang of it is one of this process, and what a run leaves behind is not
looked for.
"""

import itertools
from collections.abc import Callable, Iterator
from contextlib import contextmanager

from specverify.backends.base import Backend, Declaration, Unsupported
from specverify.isolation.backend_spec import BackendSpec
from specverify.properties.residue import Residue
from specverify.properties.tally import HERE
from specverify.properties.verdict.subject import Subject
from specverify.setup.selection import Unknown

_factories: dict[str, Callable[[], Backend]] = {}
"""The factories of such backends by name, while they are offered."""

_numbers = itertools.count(1)


@contextmanager
def offered(label: str, open_: Callable[[], Backend]) -> Iterator[str]:
    """Inside the `with`, the backend that `open_` returns has the yielded name, in this process alone."""
    name = f"{HERE}{label}" if f"{HERE}{label}" not in _factories else f"{HERE}{label}-{next(_numbers)}"
    _factories[name] = open_
    try:
        yield name
    finally:
        del _factories[name]


def is_here(name: str) -> bool:
    """Whether a name stands for a backend that this process offers."""
    return name in _factories


class Here:
    """An open backend of this process; see `specverify.isolation.door.Door`.

    Raises:
        Unknown: A fault is to be planted, and the backend has no seams.
        Misshapen: Its declaration names an unknown value.
    """

    def __init__(self, spec: BackendSpec) -> None:
        # Imported here, since they bring torch, which a worker needs for nothing else.
        from specverify.backends import faults
        from specverify.backends.admission import check_declaration
        from specverify.setup.subjects import fault_named, manifest

        self._backend = _factories[spec.backend]()
        check_declaration(self._backend.declaration)
        if spec.fault is not None:
            try:
                faults.plant(self._backend, fault_named(spec.fault))
            except Unsupported as why:
                raise Unknown(str(why)) from None
        if spec.mode is not None:
            raise Unknown(f"--mode {spec.mode}: a backend of this process has no modes of ours")
        self.declaration: Declaration = self._backend.declaration
        self.manifest = manifest(self._backend)
        self.complaints: list[str] = []
        self.residue: dict[str, Residue] = {}

    def subject(self, keep: int = 48) -> Subject:
        """The backend as invariants see it."""
        from specverify.setup.subjects import subject_of

        return subject_of(self._backend, keep)

    def admit(self, names: tuple[str, ...], vocabularies: tuple[int, ...] = ()) -> None:
        """Admit custom processors in this process."""
        from specverify.setup import processors

        processors.admit(names, *vocabularies)

    def set_threads(self, count: int) -> None:
        """Give a backend on the CPU `count` torch threads: they are those of this process."""
        if self.declaration.device == "cpu":
            import torch

            torch.set_num_threads(count)

    def __enter__(self) -> "Here":
        return self

    def __exit__(self, *_: object) -> None: ...
