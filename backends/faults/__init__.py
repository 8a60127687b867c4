"""Publicly reported faults of speculative decoding, as patches of engine seams.

Each fault has a name and changes one seam of the engine (`backends/engine/seams.py`). Every module below this folder is
imported, and its faults are entered. A new fault is a decorated function or class in the file of its stage, or in a new
file there, and a case in `tests/corpus`.
"""

from functools import cache
from importlib import import_module
from pkgutil import walk_packages
from typing import TYPE_CHECKING, Any

if TYPE_CHECKING:
    from specverify.backends.base import Backend
    from specverify.backends.faults.fault import Fault

    ALL: tuple[Fault, ...]
    """Every fault, in the order of the stages at which they strike, then by file."""


@cache
def _every() -> "tuple[Fault, ...]":
    from specverify.backends.faults.fault import faults_in
    from specverify.reference.trace import Stage

    faults = (
        fault
        for module in sorted(walk_packages(__path__, f"{__name__}."), key=lambda each: each.name)
        for fault in faults_in(import_module(module.name))
    )
    return tuple(sorted(faults, key=lambda fault: [*Stage].index(fault.stage)))


def __getattr__(name: str) -> Any:
    """`ALL` when it is first asked for: the catalogue beside it is read without the engine that faults patch."""
    if name == "ALL":
        return _every()
    raise AttributeError(f"module {__name__!r} has no attribute {name!r}")


def fault_named(name: str) -> "Fault":
    """The fault called `name`.

    Raises:
        KeyError: when there is none; the message names the command that lists them.
    """
    for fault in _every():
        if fault.name == name:
            return fault
    raise KeyError(f"no fault is called {name!r}; `specverify list faults` names them")


def plant(backend: "Backend", fault: "Fault") -> None:
    """Plant `fault` in a backend that runs our engine; it stays as long as the backend object lives.

    Raises:
        Unsupported: for a backend without seams.
    """
    from specverify.backends.base import Unsupported
    from specverify.backends.engine.seams import Seams

    seams = getattr(backend, "seams", None)
    if not isinstance(seams, Seams):
        raise Unsupported(f"backend {backend.declaration.name} exposes no engine seams: no fault can be planted in it")
    backend.seams = fault.plant(seams)  # type: ignore[attr-defined]
