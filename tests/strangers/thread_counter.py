"""Our engine, which tells the number of its threads as a reason of a fallback."""

from dataclasses import replace

import torch

from specverify.backends.base import Declaration
from specverify.backends.compositions import open_cpu
from specverify.reference.case import Case
from specverify.reference.trace import Trace


class ThreadCounter:
    def __init__(self) -> None:
        self._inner = open_cpu()
        self.declaration: Declaration = replace(self._inner.declaration, name="thread-counter")

    def run(self, case: Case) -> Trace:
        return replace(self._inner.run(case), fallbacks={f"{torch.get_num_threads()} threads": 1})


def open_() -> ThreadCounter:
    return ThreadCounter()
