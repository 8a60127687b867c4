"""Thread counts of BLAS and OpenMP, by environment variables.

Small matrices get one thread, a real checkpoint gets what is faster. A variable that the user has set is kept.
"""

import os
import time
from collections.abc import Callable, Iterator
from contextlib import contextmanager

from specverify.isolation.usable_cores import usable_cores

NAMES = ("OMP_NUM_THREADS", "OPENBLAS_NUM_THREADS", "MKL_NUM_THREADS")

WORTH = 0.75
"""The part of the time on one thread below which several are worth their processor time; one thread has stable bits."""

_set_names: set[str] = set()
"""The variables that `set_one_thread` set, as opposed to the user."""


def set_one_thread() -> None:
    """Set one thread for this process, unless the user has set a number, and that threads that wait do not spin.

    Where a process gets several later, spinning ones would take the processor from those that work. It must be called
    before NumPy is first imported, since BLAS and OpenMP read the variables then; processes inherit them.
    """
    os.environ.setdefault("OMP_WAIT_POLICY", "PASSIVE")
    for name in NAMES:
        if name not in os.environ:
            os.environ[name] = "1"
            _set_names.add(name)


def faster_count(set_count: Callable[[int], None], run: Callable[[], object]) -> int:
    """All usable cores where `run` takes less than WORTH of its time on one of them, twice; else one thread.

    The number is left set. `run` is called once to read what it needs, then once with each number, and once more where
    all cores were faster: beside another program their threads wait for each other, and take several times as long.
    """
    cores = usable_cores()
    if cores == 1:
        set_count(1)
        return 1
    run()
    faster = cores if all(_is_worth(cores, set_count, run) for _ in range(2)) else 1
    set_count(faster)
    return faster


def _is_worth(cores: int, set_count: Callable[[int], None], run: Callable[[], object]) -> bool:
    seconds: dict[int, float] = {}
    for count in (cores, 1):
        set_count(count)
        began = time.perf_counter()
        run()
        seconds[count] = time.perf_counter() - began
    return seconds[cores] < WORTH * seconds[1]


@contextmanager
def for_checkpoint(count: int = 0) -> Iterator[None]:
    """Inside the `with`, torch has `count` threads in this process; 0 for all cores, or for the user's own number."""
    import torch  # not for the commands that run no model

    before = torch.get_num_threads()
    if count or NAMES[0] in _set_names:
        torch.set_num_threads(count or usable_cores())
    yield
    torch.set_num_threads(before)


@contextmanager
def for_workers(count: int) -> Iterator[None]:
    """Inside the `with`, started worker processes get `count` threads, unless the user has set a number."""
    before = {name: os.environ.get(name) for name in NAMES}
    for name, value in before.items():
        # A value that `set_one_thread` set for this process is not the user's wish.
        if value is None or name in _set_names:
            os.environ[name] = str(count)
    try:
        yield
    finally:
        for name, value in before.items():
            if value is None:
                os.environ.pop(name, None)
            else:
                os.environ[name] = value
