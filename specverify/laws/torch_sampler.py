"""The exact law of an unchanged sampler written in torch.

Each random draw of the sampler is intercepted and forked, and every possible course is run. The sampler is a function
of two tables, `sampler(target, draft)`. The sampler calls a table with the tokens emitted or drafted so far in the
round, and gets the log-probabilities of the next token: float64 [vocabulary]. It returns the tokens of one speculative
round. It may draw with `random`, NumPy and torch as engines do (`specverify.backends.interception`), from generators of
its own: those of one seed read the same numbers, and those of unequal seeds are independent.
"""

import operator
from collections.abc import Callable
from fractions import Fraction
from typing import Any

import torch
from torch import Tensor

from specverify.backends.interception.intercept import DecidesTooOften, NotInterceptable, TooManyRuns, enumerate_law
from specverify.backends.randomness.hooks import hooked_names, names_replaced
from specverify.laws.user_rule import brief, function_named
from specverify.laws.world_options import Tables
from specverify.reference.oracle.law import expected_length, sorted_biases, total_variation
from specverify.reports.pages.law import LawFacts
from specverify.setup.errors import UnusableInput

NOISE = 1e-6
"""Total variation allowed to a correct sampler: it may compute in float32, whose coins have 2^24 values."""

MOST_RUNS = 100_000
"""Most courses of a sampler in one world."""


def torch_law(name: str, tables: Tables, claims: bool, most: int | None = None) -> LawFacts:
    """The facts about the sampler `pkg.module:function` in the world `tables`; the tree of the world is not read.

    Raises:
        UnusableInput: The sampler cannot be imported, raises, returns no tokens, has too many courses, or uses a draw
            in a way that the interception cannot follow.
        DecidesTooOften: The same random numbers decide in a way whose joint law is not known.
    """
    where = f"--torch {name}"
    # A generator that the module makes when it is imported is followed too, and so is a name that it imports.
    with names_replaced(hooked_names()):
        sampler = function_named(name, where)
    count = 0

    def block() -> tuple[int, ...]:
        nonlocal count
        count += 1
        try:
            return _tokens(sampler(_table(tables.target_row), _table(lambda path: tables.draft_row(path, 0))))
        except (NotInterceptable, TooManyRuns, DecidesTooOften):
            raise
        except (Exception, SystemExit) as why:  # the user's code may raise anything, which becomes one line
            raise UnusableInput(f"{where}: raised {brief(why)}; a sampler takes (target, draft)") from why

    try:
        enumeration = enumerate_law(block, most_runs=MOST_RUNS if most is None else most)
    except (NotInterceptable, TooManyRuns) as why:
        raise UnusableInput(f"{where}: {why}") from None
    law: dict[tuple[int, ...], Any] = dict(enumeration.law)
    for tokens in law:
        if not tokens or not all(0 <= token < tables.vocab for token in tokens):
            raise UnusableInput(f"{where}: returned {list(tokens)}, not tokens of the vocabulary of {tables.vocab}")
    # The sampler decides how many tokens a round may have.
    height = max(map(len, law))
    off = total_variation(law, tables.target_row, height)
    return LawFacts(
        rule=name,
        setting="",
        draws="as the sampler draws",
        tree=f"the sampler's own; {tables.vocab} tokens",
        promise=True if claims else None,
        condition="",
        source="",
        sentence="",
        why="",
        biased=float(off) > NOISE,
        exact=False,
        total_variation=float(off),
        expected=float(expected_length(law)),
        height=height,
        cells=len(law),
        evaluations=count,
        biases=tuple(sorted_biases(law, tables.target_row, height)),
        shared_draws=enumeration.shared_numbers,
    )


def _table(row: Callable[[tuple[int, ...]], Any]) -> Callable[[Any], Tensor]:
    """The function that gives the sampler the log-probabilities after the tokens of a round."""

    def after(tokens: Any = ()) -> Tensor:
        weights = [float(Fraction(weight)) for weight in row(_tokens(tokens))]
        return torch.tensor(weights, dtype=torch.float64).log()

    return after


def _tokens(ids: Any) -> tuple[int, ...]:
    """Token ids from a tensor, a list, a tuple or a single id; TypeError for anything else."""
    listed = ids.tolist() if isinstance(ids, Tensor) else ids
    return tuple(operator.index(token) for token in ([listed] if isinstance(listed, int) else listed))
