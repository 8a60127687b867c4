"""BLAS and OpenMP threads: one for small matrices, all cores for a real checkpoint, the user's own wish before both."""

import os

NAMES = ("OMP_NUM_THREADS", "OPENBLAS_NUM_THREADS", "MKL_NUM_THREADS")

_ours: set[str] = set()


def single() -> None:
    """One thread in this process, where the user set nothing; call it before NumPy is first imported."""
    for name in NAMES:
        if name not in os.environ:
            os.environ[name] = "1"
            _ours.add(name)


class ForWorkers:
    """Environment in which worker processes start: `count` threads, where the user set nothing."""

    def __init__(self, count: int) -> None:
        self._count = str(count)
        self._before: dict[str, str | None] = {}

    def __enter__(self) -> None:
        self._before = {name: os.environ.get(name) for name in NAMES}
        for name, value in self._before.items():
            if value is None or name in _ours:
                os.environ[name] = self._count

    def __exit__(self, *_: object) -> None:
        for name, value in self._before.items():
            if value is None:
                os.environ.pop(name, None)
            else:
                os.environ[name] = value
