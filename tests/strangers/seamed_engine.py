"""A stranger's engine for tests: its own name and numbers, on our engine, whose seams it exposes."""

from dataclasses import replace

from specverify.backends.engine.backend import EngineBackend
from specverify.backends.engine.seams import Seams
from specverify.reference.case import Case
from specverify.reference.trace import Trace


class SeamedEngine:
    """Declares float32 alone; hands `seams` through, so that a fault can be planted."""

    def __init__(self) -> None:
        self._inner = EngineBackend("seamed", "cpu")
        self.declaration = replace(self._inner.declaration, dtypes=("float32",))

    @property
    def seams(self) -> Seams:
        """What its engine is composed of."""
        return self._inner.seams

    @seams.setter
    def seams(self, seams: Seams) -> None:
        self._inner.seams = seams

    def run(self, case: Case) -> Trace:
        """Run `case`."""
        return self._inner.run(case)


def seamed() -> SeamedEngine:
    """The factory."""
    return SeamedEngine()
