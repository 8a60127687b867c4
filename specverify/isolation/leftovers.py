"""Leftovers: state that a run changed, and that by itself changes no answer of a later case.

Libraries set environment variables, filters of warnings and handlers of signals when they are first used, and an engine
that samples draws from the global generators. Each kind is told once for the backend, with the first case that left it.
What can change answers is a finding (`specverify.isolation.residue`).
"""

import gc
import os
import random
import sys
import warnings
from collections.abc import Callable, Iterable
from typing import Any

import numpy as np

MERSENNE_BYTES = 2500
"""Bytes of the state of a Mersenne twister in NumPy: 624 words, and the place of the next one."""

NAMED = 4
"""Most environment variables that a phrase names."""


def _environment() -> dict[Any, Any]:
    # The mapping inside `os.environ` holds bytes: a copy of `os.environ` itself decodes every value.
    return dict(vars(os.environ).get("_data", os.environ))


def _numpy_words() -> bytes | str:
    """The state of NumPy's global generator; its bytes are read where they lie, in a hundredth of the time."""
    import ctypes

    generator = np.random.mtrand.get_bit_generator()
    if type(generator) is np.random.MT19937:
        return ctypes.string_at(generator.ctypes.state_address, MERSENNE_BYTES)
    return repr(generator.state)


def _torch_words(torch: Any) -> list[tuple[int, bytes]]:
    """Seed and state of torch's global generators: the processor's, and each device's where CUDA is in use."""
    generators = [torch.default_generator]
    if torch.cuda.is_initialized():
        generators += torch.cuda.default_generators
    return [(generator.initial_seed(), generator.get_state().numpy().tobytes()) for generator in generators]


def _processors() -> Any:
    return os.sched_getaffinity(0) if hasattr(os, "sched_getaffinity") else None


READERS: dict[str, Callable[[], Any]] = {
    "environment": _environment,
    "warnings filters": lambda: list(warnings.filters),
    "import path": lambda: list(sys.path),
    "recursion limit": sys.getrecursionlimit,
    "garbage collection": gc.isenabled,
    "processors": _processors,
    "random numbers of Python": random.getstate,
    "random numbers of NumPy": _numpy_words,
}
"""Each kind of state, and how it is read."""

TORCH_WORDS = "random numbers of torch"
"""The kind of state that only a process with torch has."""

PHRASES = {
    "warnings filters": "changed the list of warnings filters",
    "import path": "changed sys.path",
    "recursion limit": "changed the recursion limit",
    "garbage collection": "turned the garbage collector on or off",
    "processors": "changed the processors on which the process may run",
    "random numbers of Python": "moved the global generator of Python's random",
    "random numbers of NumPy": "moved NumPy's global generator",
}
"""What a run did, by the kind of state that differs; those that are missing have words of their own."""


def leftovers() -> dict[str, Any]:
    """The value of each kind of state."""
    values = {kind: read() for kind, read in READERS.items()}
    torch: Any = sys.modules.get("torch")
    if torch is not None:
        values[TORCH_WORDS] = _torch_words(torch)
    return values


def changed_phrases(before: dict[str, Any], now: dict[str, Any]) -> dict[str, str]:
    """A phrase for each kind of state that differs, whose subject is the run."""
    kinds = [kind for kind in before if now[kind] != before[kind]]
    return {kind: _phrase(kind, before[kind], now[kind]) for kind in kinds}


def _phrase(kind: str, before: Any, now: Any) -> str:
    if kind == "environment":
        return _variables(before, now)
    if kind == TORCH_WORDS:
        is_seeded = any(old[0] != new[0] for old, new in zip(before, now, strict=False))
        return "seeded torch's global generator" if is_seeded else "moved torch's global generator"
    return PHRASES[kind]


def _variables(before: dict[Any, Any], now: dict[Any, Any]) -> str:
    """The environment variables that differ, by their names: a value may be a secret."""
    names = {
        "set": [name for name in now if name not in before],
        "changed": [name for name in now if name in before and now[name] != before[name]],
        "deleted": [name for name in before if name not in now],
    }
    parts = [f"{verb} {_names(some)}" for verb, some in names.items() if some]
    return f"{', '.join(parts)} in the environment"


def _names(names: Iterable[Any]) -> str:
    words = sorted(os.fsdecode(name) for name in names)
    more = f" and {len(words) - NAMED} more" if len(words) > NAMED else ""
    return f"{', '.join(words[:NAMED])}{more}"
