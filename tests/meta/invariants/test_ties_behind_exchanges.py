"""Ties between experts that an exchange in a layer above leaves: they grant what the oracle moves, and no more."""

from collections.abc import Iterator
from functools import cache

import numpy as np
import pytest

from specverify.properties.verdict.finding import Finding, Reads
from specverify.properties.verdict.followed import Follows, tie_limits, tie_units
from specverify.properties.verdict.invariant import Oracle as Answers
from specverify.properties.verdict.routing import Exchanges
from specverify.reference.architecture import Seeded
from specverify.reference.case import Case
from specverify.reference.draft import Scripted
from specverify.reference.oracle.choices import EXPERTS, Choices, RowChoices
from specverify.reference.oracle.decoder import Oracle
from specverify.reference.oracle.formulas.routers import UNKNOWN
from specverify.reference.sampling import Stops
from specverify.reference.trace import Array, Stage
from specverify.reference.tree import Tree
from tests.drawn_families import listed_architectures

ORACLE = Oracle()
TREE = Tree((0,), (5,))
LIMIT = 1e-3

Moves = dict[tuple[int, int], float]


def logits(oracle: Answers, case: Case) -> Array:
    scored = oracle(case).steps[0].scored
    assert scored is not None
    return np.asarray(scored.logits[0])


def exchanges(oracle: Answers, case: Case, chosen: Array, above: int) -> Iterator[tuple[int, int, Array, float]]:
    """Each exchange of a tie below layer `above`, with the experts of all rows behind it and how far the root moves."""
    assert isinstance(oracle, Follows)
    routing = oracle.scored_choices(EXPERTS, case, case.prefix, TREE)
    units = tie_units(EXPERTS, case, oracle, case.prefix, TREE)
    assert routing is not None
    assert units is not None
    limits, base = tie_limits(case.dtype, units), logits(oracle, case)
    for layer, row in np.argwhere(routing.margins() <= limits):
        router = routing.scorers[layer]
        assert router is not None
        for _, experts in router.exchanges(row, float(limits[layer, row])) if layer > above else ():
            further = chosen.copy()
            further[layer, row] = experts
            moved = logits(taking(further, case), case)
            yield int(layer), int(row), further, float(np.sqrt(np.mean(np.square(moved - base))))


def taking(chosen: Array, case: Case) -> Answers:
    choices = Choices(len(chosen))
    choices.add(case.prefix, TREE, RowChoices(chosen))
    return ORACLE.following(case, choices)


@cache
def with_ties_behind() -> tuple[Case, float, float]:
    """A case, what its ties move alone, and what they move together with those behind their exchanges."""
    for seed in range(60):
        case = Case(
            Seeded(listed_architectures("gpt_oss")[0], seed),
            (1, 2, 3, 4, 5),
            Scripted((TREE,)),
            stops=Stops(4),
            dtype="bfloat16",
            steps=1,
        )
        routing = ORACLE.scored_choices(EXPERTS, case, case.prefix, TREE)
        assert routing is not None
        alone: Moves = {}
        together: Moves = {}
        for layer, row, chosen, move in exchanges(ORACLE, case, np.full(routing.chosen.shape, UNKNOWN), -1):
            place = layer, row
            alone[place] = max(move, alone.get(place, 0.0))
            together[place] = max(move, together.get(place, 0.0))
            for lower, upper, _, further in exchanges(taking(chosen, case), case, chosen, layer):
                together[lower, upper] = max(further, together.get((lower, upper), 0.0))
        if sum(together.values()) > 1.05 * sum(alone.values()):
            return case, sum(alone.values()), sum(together.values())
    raise AssertionError("no drawn model has a tie behind an exchange")


def difference(case: Case, needed: float) -> Finding:
    """A difference of the root's logits that lies `needed` beyond its limit."""
    reads = Reads(case, case.prefix, TREE, 0, None, LIMIT, lambda oracle: logits(oracle, case))
    return Finding("attention.context-exact", Stage.SCORED, 0, {}, 0.0, 0.0, 1 + needed / LIMIT, reads=reads)


@pytest.mark.parametrize("share", [0.01, 0.5, 0.99])
def test_ties_behind_an_exchange_explain_what_they_move(share: float) -> None:
    case, alone, together = with_ties_behind()
    needed = alone + share * (together - alone)
    tie = Exchanges(ORACLE).explain(difference(case, needed))
    assert tie is not None
    assert needed <= tie.granted <= together * (1 + 1e-9)


@pytest.mark.parametrize("factor", [1.01, 3.0, 1e3])
def test_they_explain_no_more(factor: float) -> None:
    case, _, together = with_ties_behind()
    assert Exchanges(ORACLE).explain(difference(case, factor * together)) is None
