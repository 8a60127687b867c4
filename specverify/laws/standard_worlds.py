"""The standard set of `law --table`: every built-in rule, every kind of draft.

The worlds are a designed pair of laws, on which rules differ clearly, and three random ones.
"""

import itertools
import random
from collections.abc import Callable
from dataclasses import replace
from fractions import Fraction
from typing import cast

from specverify.laws.enumeration import LawQuery, enumerate_law
from specverify.laws.world_options import Tables
from specverify.properties.laws.worlds import HEAVY
from specverify.reference.oracle.acceptance import Row
from specverify.reference.oracle.tree_growth import Path
from specverify.reference.rules import DRAWS, RULES, Rule
from specverify.reference.tree import Shape
from specverify.reports.pages.law import LawFacts

HEAVY_EXACT: tuple[Row, Row] = (
    [Fraction(repr(float(value))) for value in HEAVY[0]],
    [Fraction(repr(float(value))) for value in HEAVY[1]],
)
"""The designed laws of target and draft, as fractions equal to their written decimals."""

LOOSE = "target-only"
"""A rule whose promise depends on thresholds, and on siblings that differ."""

LOSSY = (("threshold_acc", Fraction(9, 10)), ("threshold_single", Fraction(1, 5)))
"""Thresholds with which it does not promise to be lossless."""


def standard_laws() -> list[LawFacts]:
    """One row for each rule and kind of draft: the facts of its worst world, with cells and runs of all worlds."""
    rows = [
        _row({world: LawQuery(Rule(name), tables, draws) for world, tables in worlds(name).items()})
        for name, draws in itertools.product(RULES, DRAWS)
    ]
    loose = worlds(LOOSE)
    for name, value in LOSSY:
        rule = Rule(LOOSE, **{name: cast(float, value)})  # only compared and divided: a fraction stays exact
        rows.append(
            _row({world: LawQuery(rule, tables, "top-k", f"{name} {value}") for world, tables in loose.items()})
        )
    # Siblings with one token: target-only promises nothing for them.
    twins = {
        world: replace(tables, tokens=(0, *(1 + up for up in tables.shape.parent[1:])))
        for world, tables in loose.items()
    }
    rows.append(
        _row({world: LawQuery(Rule(LOOSE), tables, "top-k", "repeated siblings") for world, tables in twins.items()})
    )
    return rows


def _row(queries: dict[str, LawQuery]) -> LawFacts:
    facts_of_worlds = [replace(enumerate_law(query), world=world) for world, query in queries.items()]
    worst = max(facts_of_worlds, key=lambda facts: facts.total_variation)
    cells, evaluations = (
        sum(facts.cells for facts in facts_of_worlds),
        sum(facts.evaluations for facts in facts_of_worlds),
    )
    return replace(worst, cells=cells, evaluations=evaluations)


def worlds(rule: str) -> dict[str, Tables]:
    """The standard worlds by name, with chains for rules that verify chains alone; every context has its own row."""
    if RULES[rule].chains_only:
        deep, wide = Shape((0, 0, 1)), Shape((0, 0, 1, 2))
    else:
        deep, wide = Shape((0, 0, 0, 1, 1)), Shape((0, 0, 0, 0))
    tables_by_name = {"heavy": _tables(deep, 6, lambda name, path: _rotate(HEAVY_EXACT[name == "q"], sum(path)))}
    for seed, (shape, vocab) in enumerate(((deep, 3), (deep, 3), (wide, 4))):
        tables_by_name[f"random {seed}"] = _tables(shape, vocab, _draw_rows(seed, vocab))
    return tables_by_name


def _tables(shape: Shape, vocab: int, row: Callable[[str, Path], Row]) -> Tables:
    paths = [path for depth in range(shape.height + 1) for path in itertools.product(range(vocab), repeat=depth)]
    return Tables(shape, {path: row("p", path) for path in paths}, ({path: row("q", path) for path in paths},))


def _rotate(row: Row, by: int) -> Row:
    """`row` rotated along the vocabulary, so that contexts differ while p and q keep their relation."""
    return [row[(token + by) % len(row)] for token in range(len(row))]


def _draw_rows(seed: int, vocab: int) -> Callable[[str, Path], Row]:
    """A function that gives each row small rational probabilities, from a seed of the row's own."""

    def row(name: str, path: Path) -> Row:
        # Seeded by a text, so that each row is the same whatever other rows are made.
        rng = random.Random(f"{seed} {name} {path}")
        weights = [rng.randint(1, 9) for _ in range(vocab)]
        return [Fraction(weight, sum(weights)) for weight in weights]

    return row
