"""Interception: the exact law of an unmodified eager sampler.

Every draw of `random`, NumPy or torch becomes a fork; the sampler is run once for each course of its draws.
"""

from collections.abc import Callable
from dataclasses import dataclass
from fractions import Fraction
from typing import Any, Generic

from specverify.backends.interception.errors import DecidesTooOften, NotInterceptable, TooManyRuns
from specverify.backends.interception.forking import Fork, T, courses
from specverify.backends.interception.ledger import Ledger
from specverify.backends.interception.python_draws import PythonDraws
from specverify.backends.interception.torch_draws import Draws
from specverify.backends.randomness.hooks import Call, hooks
from specverify.backends.randomness.positions import Positions

__all__ = ["DecidesTooOften", "Enumeration", "NotInterceptable", "TooManyRuns", "enumerate_law", "exact_law"]


@dataclass(frozen=True)
class Enumeration(Generic[T]):
    """The exact law of a function that draws.

    Attributes:
        law: Each returned value with its probability.
        shared: The random numbers that decided twice, each with both places in the code.
    """

    law: dict[T, Fraction]
    shared_numbers: tuple[str, ...]


def exact_law(fn: Callable[[], T], *, most_runs: int = 1_000_000, most_draws: int = 10_000) -> dict[T, Fraction]:
    """The exact law of the value that `fn` returns; see `enumerate_law`."""
    return enumerate_law(fn, most_runs=most_runs, most_draws=most_draws).law


def enumerate_law(fn: Callable[[], T], *, most_runs: int = 1_000_000, most_draws: int = 10_000) -> Enumeration[T]:
    """The exact law of the value that `fn` returns, from one run of `fn` for every course of its draws.

    Every draw has a place: the stream that its generator reads, and its offset there
    (`specverify.backends.randomness`). Draws of one place are one number. Streams of unequal seeds are independent, and
    so are all words of a stream.

    Known draws: those of `random` and of any `random.Random`; numpy.random's random, uniform, exponential, gumbel,
    choice and integers, also of any generator that is made in the run; torch.rand, rand_like, uniform_, exponential_,
    multinomial, bernoulli, randint and randperm. Their numbers may be moved, compared and computed with: sums and
    products with floats, logarithms, powers. An arg-max or a topk over such a row decides; for races of exponential
    numbers, and so for Gumbel noise, the law is exact in the weights, also where several races read the same noise.
    `fn` must keep no memory between its runs. Afterwards, also after an error, random, NumPy and torch have their own
    functions and states again.

    Raises:
        NotInterceptable: `fn` used a draw in another way, or made another draw; the message names it.
        TooManyRuns: There are more runs, or more draws in one run, than allowed.
        DecidesTooOften: Draws of one place decide in a way whose joint law is not known; the message names them.
    """
    positions = Positions()
    shared_numbers: dict[str, None] = {}
    draws: list[PythonDraws] = []

    def answer(call: Call) -> Any:
        return draws[-1](call)

    def run(fork: Fork) -> T:
        ledger = Ledger(fork, positions)
        draws.append(PythonDraws(ledger))
        try:
            with Draws(ledger):
                outcome = fn()
            ledger.close()
        except DecidesTooOften as why:
            shared_numbers.update(dict.fromkeys(ledger.numbers.shared_by_text))
            raise DecidesTooOften(str(why), tuple(shared_numbers)) from None
        finally:
            draws.pop()
            ledger.restore()
        shared_numbers.update(dict.fromkeys(ledger.numbers.shared_by_text))
        return outcome

    with hooks(answer):
        law = courses(run, most_runs, most_draws)
    return Enumeration(law, tuple(shared_numbers))
