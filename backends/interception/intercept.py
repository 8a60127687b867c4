"""Interception: the exact law of an unmodified eager sampler.

Every draw of `random`, NumPy or torch becomes a fork; the sampler is run once for each course of its draws.
"""

import random
from collections.abc import Callable, Iterator
from contextlib import contextmanager
from fractions import Fraction
from typing import Any

import numpy as np
import torch

from backends.interception.forking import Coin, Fork, NotInterceptable, T, TooManyRuns, courses, refuse
from backends.interception.torch_draws import Draws

__all__ = ["NotInterceptable", "TooManyRuns", "intercepted"]


def intercepted(fn: Callable[[], T], *, most_runs: int = 1_000_000, most_draws: int = 10_000) -> dict[T, Fraction]:
    """The exact law of the value that `fn` returns, from one run of `fn` for every course of its draws.

    Known draws: random.random; numpy.random's random, rand, uniform (one number) and choice with p, also those of
    default_rng; torch.rand, rand_like and uniform_, whose numbers may be moved and compared; multinomial with its exact
    float weights; exponential_ as far as argmax(weights / noise), each row of noise once. `fn` must keep no memory
    between its runs. Seeding is ignored during the runs. Afterwards, also after an error, random, NumPy and torch have
    their own functions again.

    Raises:
        NotInterceptable: `fn` used a draw in another way, or made another draw; the message names it.
        TooManyRuns: There are more runs, or more draws in one run, than allowed.
    """

    def run(fork: Fork) -> T:
        with _patched(fork), Draws(fork):
            # A generator whose state moves was used by a name that the patches did not reach.
            before = _states()
            outcome = fn()
            moved = [name for name, state in _states().items() if state != before[name]]
        if moved:
            refuse(f"{moved[0]} drew a number by a way that is not watched (a name imported from it?)")
        return outcome

    return courses(run, most_runs, most_draws)


def _states() -> dict[str, Any]:
    held = np.random.get_state(legacy=False)  # noqa: NPY002
    bits = held["state"]
    torchs = torch.default_generator.get_state().numpy().tobytes()
    return {"random": _PYTHON.getstate(), "numpy.random": (bits["pos"], bits["key"].tobytes()), "torch": torchs}


# The hidden generators whose methods are the module-level functions of random and numpy.random.
_PYTHON: random.Random = random._inst
_NUMPY = np.random.mtrand._rand


@contextmanager
def _patched(fork: Fork) -> Iterator[None]:
    """The module-level functions of random and numpy.random replaced: by coins, or by refusals."""

    def coin(*sizes: object) -> Coin:
        if sizes and sizes not in ((0, 1), (0.0, 1.0)):
            refuse(f"a coin with arguments {sizes}")
        return Coin(fork)

    def choice(a: Any, size: None = None, replace: bool = True, p: Any = None) -> Any:
        if size is not None or p is None:
            refuse("numpy's choice without p, or of several")
        picked = fork.branch([Fraction(float(weight)) for weight in p], "numpy's choice")
        return picked if isinstance(a, (int, np.integer)) else a[picked]

    # The generator that `default_rng` returns during a run.
    class Generator:
        def __init__(self, *seed: object) -> None:
            self.random = self.uniform = coin
            self.choice = choice

        def __getattr__(self, name: str) -> Any:
            refuse(f"numpy.random.Generator.{name}")

    ours: dict[tuple[Any, str], Any] = {(random, "random"): coin, (random, "uniform"): coin}
    ours |= {(np.random, name): coin for name in ("random", "random_sample", "ranf", "sample", "rand", "uniform")}
    ours |= {(np.random, "choice"): choice, (np.random, "default_rng"): Generator}
    # A sampler may seed itself: seeding is accepted and does nothing, since there is no stream to seed.
    ours |= {(where, "seed"): lambda *seed, **more: None for where in (random, np.random)}
    ours |= {(torch, "manual_seed"): lambda seed: torch.default_generator}
    # The module-level functions are bound methods of one hidden generator; each that is not known is refused.
    for module, source in ((random, _PYTHON), (np.random, _NUMPY)):
        for name in dir(module):
            drawing = getattr(getattr(module, name), "__self__", None) is source
            if drawing and name not in ("getstate", "setstate", "get_state", "set_state"):
                ours.setdefault((module, name), lambda *a, what=f"{module.__name__}.{name}", **k: refuse(what))
    # All originals are read before the first is replaced, so that `finally` can restore every one.
    found = {at: getattr(*at) for at in ours}
    try:
        for (module, name), replacement in ours.items():
            setattr(module, name, replacement)
        yield
    finally:
        for (module, name), original in found.items():
            setattr(module, name, original)
