"""Near an edge of top-k, top-p or min-p, the laws are right that rounding may leave there, and no others."""

from dataclasses import replace
from itertools import combinations

import numpy as np
import pytest
from hypothesis import given
from hypothesis import strategies as st

from specverify.backends.compositions import open_cpu
from specverify.properties.invariants.own_laws import EDGE, is_law_near_edge
from specverify.properties.strategies.models import GALLERY
from specverify.properties.verdict.judge import judge
from specverify.properties.verdict.subject import Subject
from specverify.reference.architecture import Seeded
from specverify.reference.case import Case
from specverify.reference.draft import Scripted
from specverify.reference.oracle import processing
from specverify.reference.rules import Rule
from specverify.reference.sampling import Sampling, Stops
from specverify.reference.trace import Array, Stage, Trace
from specverify.reference.tree import Tree
from tests.corruption import BY_NAME, ORACLE, entry

CASE = Case(
    Seeded(next(arch for arch in GALLERY if arch.vocab_size < 64), 0),
    (1, 2, 3),
    Scripted((Tree((0, 0), (3, 4)),)),
    sampling=Sampling(temperature=1.0, top_p=0.5, rule=Rule("target-only")),
    stops=Stops(2),
    dtype="float32",
)


def law_of(logits: Array, kept: tuple[int, ...]) -> Array:
    """The probabilities of `logits` among the tokens `kept`."""
    law = np.zeros(len(logits))
    law[[*kept]] = np.exp(logits[[*kept]])
    shares: Array = law / law.sum()
    return shares


def right_sets(logits: Array, sampling: Sampling, most: int = 4) -> set[tuple[int, ...]]:
    """The sets of at most `most` tokens whose laws are right near an edge of `logits`."""
    case = replace(CASE, sampling=sampling)
    sizes = range(1, most + 1)
    return {
        kept
        for size in sizes
        for kept in combinations(range(len(logits)), size)
        if is_law_near_edge(case, logits, (), (), law_of(logits, kept))
    }


TIED = np.log(np.array([0.4, 0.2, 0.2, 0.15, 0.05]))


@pytest.mark.parametrize(
    ("sampling", "kept"),
    [
        (Sampling(temperature=1.0, top_p=0.5), {(0, 1), (0, 2)}),
        (Sampling(temperature=1.0, top_p=0.6), {(0, 1), (0, 2), (0, 1, 2)}),
        (Sampling(temperature=1.0, top_k=2), {(0, 1), (0, 2), (0, 1, 2)}),
        (Sampling(temperature=1.0, min_p=0.5), {(0,), (0, 1), (0, 2), (0, 1, 2)}),
        (Sampling(temperature=1.0, top_k=2, top_p=0.5), {(0,), (0, 1), (0, 2)}),
        (Sampling(temperature=1.0, top_p=0.9), set()),
    ],
    ids=["a tie at top-p", "a tie, and its mass at top-p", "a tie at top-k", "a tie at min-p", "both", "no edge"],
)
def test_equal_tokens_at_an_edge_are_kept_as_its_definition_allows(
    sampling: Sampling, kept: set[tuple[int, ...]]
) -> None:
    assert right_sets(TIED, sampling) == kept


@st.composite
def settings(draw: st.DrawFn) -> Sampling:
    """Settings that leave tokens out."""
    return Sampling(
        temperature=draw(st.sampled_from((0.5, 1.0, 2.0))),
        top_k=draw(st.integers(0, 5)),
        top_p=draw(st.sampled_from((0.25, 0.5, 0.75, 1.0))),
        min_p=draw(st.sampled_from((0.0, 0.25, 0.5))),
    )


@given(st.lists(st.integers(0, 4), min_size=6, max_size=6), settings(), st.integers(0, 2**16))
def test_what_rounding_leaves_is_right_and_other_numbers_of_tokens_are_not(
    twos: list[int], sampling: Sampling, seed: int
) -> None:
    logits, case = np.array(twos) * np.log(2.0), replace(CASE, sampling=sampling)
    error = EDGE[case.dtype]
    noise = np.random.default_rng(seed).uniform(-error / 50, error / 50, len(logits))
    law = processing.law(logits + noise, sampling, case.stops, (), ())
    kept = tuple(np.flatnonzero(law).tolist())
    if not is_law_near_edge(case, logits, (), (), law_of(logits / sampling.temperature, kept)):
        assert np.allclose(law, processing.law(logits, sampling, case.stops, (), ()), atol=1e-5)
    sizes = processing.kept_sizes(logits, sampling, case.stops, (), (), error)
    order = np.argsort(-logits, kind="stable")
    for size in range(1, len(logits) + 1):
        is_right = is_law_near_edge(
            case, logits, (), (), law_of(logits / sampling.temperature, tuple(order[:size].tolist()))
        )
        assert not is_right or sizes.fewest <= size <= sizes.most
    assert sizes.fewest <= len(kept) <= sizes.most


def test_a_law_near_an_edge_has_the_shares_of_its_tokens_and_finite_numbers() -> None:
    case = replace(CASE, sampling=Sampling(temperature=1.0, top_p=0.5))
    right = law_of(TIED, (0, 1))
    assert is_law_near_edge(case, TIED, (), (), right)
    assert not is_law_near_edge(case, TIED, (), (), right + 1e-3 * np.array([1, -1, 0, 0, 0]))
    assert not is_law_near_edge(case, TIED, (), (), np.where(right > 0, right, np.nan))
    assert not is_law_near_edge(case, TIED, (), (), np.zeros(5))
    assert not is_law_near_edge(case, TIED, (), (), law_of(TIED, (0, 3)))


@pytest.mark.parametrize(("kept", "is_found"), [((0, 1), False), ((0, 2), False), ((0, 1, 2), True), ((0,), True)])
def test_both_of_two_equal_tokens_at_the_edge_of_top_p_are_a_finding(kept: tuple[int, ...], is_found: bool) -> None:
    name = "lossless.processors-per-node"
    logits = np.full(CASE.model.vocab_size, -30.0)
    logits[: len(TIED)] = TIED
    law = law_of(logits, kept)

    def run(case: Case) -> Trace:
        trace = open_cpu().run(case)
        step = trace.steps[0]
        assert step.scored is not None
        assert step.scored.law is not None
        scored = replace(step.scored, logits=entry(step.scored.logits, 0, logits), law=entry(step.scored.law, 0, law))
        return replace(trace, steps=(replace(step, scored=scored), *trace.steps[1:]))

    verdict = judge(CASE, (BY_NAME[name],), ORACLE, Subject("changed", run, frozenset(Stage)))
    assert [finding.invariant for finding in verdict.findings] == ([name] if is_found else [])
    assert verdict.compared[name] > 0
