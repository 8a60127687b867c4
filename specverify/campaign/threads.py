"""Thread counts of BLAS and OpenMP, by environment variables.

Small matrices get one thread, a real checkpoint gets all cores. A variable that the user has set is kept.
"""

import os
from collections.abc import Iterator
from contextlib import contextmanager

NAMES = ("OMP_NUM_THREADS", "OPENBLAS_NUM_THREADS", "MKL_NUM_THREADS")

_set_names: set[str] = set()
"""The variables that `set_one_thread` set, as opposed to the user."""


def set_one_thread() -> None:
    """Set one thread for this process, unless the user has set a number.

    It must be called before NumPy is first imported, since BLAS reads the variables then.
    """
    for name in NAMES:
        if name not in os.environ:
            os.environ[name] = "1"
            _set_names.add(name)


@contextmanager
def for_checkpoint(count: int = 0) -> Iterator[None]:
    """Inside the `with`, torch has `count` threads in this process; 0 for all cores, or for the user's own number."""
    import torch  # not for the commands that run no model

    before = torch.get_num_threads()
    if count or NAMES[0] in _set_names:
        torch.set_num_threads(count or os.cpu_count() or 1)
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
