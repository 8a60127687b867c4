"""Coverage by pairs: labels are read off cases and traces as the tables say, and a gap is a pair that may be met."""

from collections import Counter
from collections.abc import Callable
from dataclasses import replace
from itertools import combinations, islice

import pytest

from specverify.adapt import blackbox
from specverify.backends.registry import open_backend
from specverify.campaign.case_stream import Stream
from specverify.properties.strategies.models import GALLERY
from specverify.properties.tally import Tally
from specverify.properties.target_traits import TRAITS
from specverify.properties.verdict.coverage.axes import AXES
from specverify.properties.verdict.coverage.events import EVENTS
from specverify.properties.verdict.coverage.impossible import BLOCKS_APART, EXCLUSIONS, is_impossible
from specverify.properties.verdict.coverage.pair_coverage import PairCoverage, declared_labels, possible_pairs
from specverify.properties.verdict.coverage.pairs import (
    LABELS,
    Label,
    Pair,
    bits_of,
    candidate_pairs,
    labels_of_requests,
)
from specverify.properties.verdict.coverage.request import JudgedRequest
from specverify.reference.abilities import Abilities
from specverify.reference.adapters import ADAPTED
from specverify.reference.architecture import Architecture
from specverify.reference.case import Case
from specverify.reference.draft import Scripted
from specverify.reference.layout import KvLayout
from specverify.reference.parallel import sharding_refusal
from specverify.reference.sampling import Sampling, Stops
from specverify.reference.session import Action, Mate, Session
from specverify.reference.trace import Trace
from specverify.reference.tree import Tree
from specverify.reports.coverage_words import coverage_fact, coverage_rows
from tests.models import LLAMA

DRAWN = 20


@pytest.fixture(scope="module")
def judged_runs() -> list[tuple[Case, Trace]]:
    """Drawn cases of the eager backend with its traces."""
    backend = open_backend("cpu-eager")
    stream = Stream(9, ("float64",), within=backend.declaration)
    return [(case, backend.run(case)) for case in islice(stream, DRAWN)]


def names(case: Case, trace: Trace, request: int = 0) -> set[str]:
    return {str(LABELS[place]) for place in labels_of_requests(case, trace)[request]}


def test_no_two_labels_have_a_name() -> None:
    assert max(Counter(map(str, LABELS)).values()) == 1
    assert len({axis.name for axis in AXES} | {"event"}) == len(AXES) + 1
    assert len({event.name for event in EVENTS}) == len(EVENTS)


def test_requests_have_values_of_the_tables_alone(judged_runs: list[tuple[Case, Trace]]) -> None:
    for case, trace in judged_runs:
        request = JudgedRequest(case, 0, trace)
        for axis in AXES:
            values = [*axis.of(request)]
            assert set(values) <= set(axis.values), axis.name
            assert axis.several or len(values) <= 1, axis.name


def test_drawn_requests_have_declared_labels_and_no_impossible_pair(judged_runs: list[tuple[Case, Trace]]) -> None:
    declared = set(declared_labels(open_backend("cpu-eager").declaration))
    for case, trace in judged_runs:
        for places in labels_of_requests(case, trace):
            assert set(places) <= declared, [str(LABELS[place]) for place in set(places) - declared]
            pairs = [Pair(LABELS[first], LABELS[second]) for first, second in combinations(sorted(places), 2)]
            assert not [str(pair) for pair in pairs if is_impossible(pair)]


def test_what_a_request_has_and_reaches_is_read_as_by_hand() -> None:
    backend = open_backend("cpu-eager")
    text = backend.run(Case(LLAMA, (3, 1, 4), dtype="float64", stops=Stops(6))).output
    tree = Tree((0, 0, 1, 2, 0), (4, *text[:3], (text[0] + 1) % LLAMA.vocab_size))
    layout = KvLayout(kind="paged", page_size=2)
    case = Case(LLAMA, (3, 1, 4), Scripted((tree,)), layout, Sampling(), Stops(6), "float64")
    labels = names(case, backend.run(case))
    assert {
        "target full attention",
        "draft scripted",
        "tree up to 16 nodes",
        "tree branches",
        "sampling greedy",
        "layout paged",
        "dtype float64",
        "prompt up to 16 prompt tokens",
        "company up to 1 requests",
        "event accepts one",
        "event accepts two",
        "event rejects behind an accepted node",
        "event goes on after a rejection",
        "event accepted path crosses a page",
        "event ends by length",
    } <= labels
    assert not labels & {"event accepts four", "event in a batch", "event prefix hit", "sampling sampled", "rule chain"}


def test_a_session_counts_each_request_by_itself() -> None:
    backend = open_backend("cpu-eager")
    mate = Mate((3, 1, 5), sampling=Sampling(2.0, seed=1), stops=Stops(4))
    actions = (("add", (0,)), ("add", (1,)), ("step", (0, 1)), ("evict", (0,)), ("restore", (0,)), ("step", (0,)))
    session = Session((mate,), tuple(Action(kind, requests) for kind, requests in actions))
    layout = KvLayout(kind="paged", page_size=2)
    case = Case(LLAMA, (3, 1, 4), layout=layout, stops=Stops(4), dtype="float64", session=session)
    trace = backend.run(case)
    first, second = names(case, trace, 0), names(case, trace, 1)
    assert {"sampling greedy", "event in a batch", "event evicted and restored, then steps"} <= first
    assert {"sampling sampled", "sampling temperature above 1.5", "event in a batch"} <= second
    assert "event evicted and restored, then steps" not in second
    # No request has both: the pair of a sampled request and an eviction is not met.
    places = {str(label): place for place, label in enumerate(LABELS)}
    pair = Pair(LABELS[places["sampling sampled"]], LABELS[places["event evicted and restored, then steps"]])
    coverage = PairCoverage(possible_pairs(range(len(LABELS)))).with_case(labels_of_requests(case, trace))
    assert pair.bit & coverage.possible
    assert not pair.bit & coverage.met


@pytest.mark.parametrize(
    ("layout", "waits"),
    [
        pytest.param(KvLayout(kind="paged", page_size=2, pages=tuple(range(5))), True, id="pages-for-one"),
        pytest.param(KvLayout(kind="paged", page_size=2, pages=tuple(range(20))), False, id="pages-for-both"),
    ],
)
def test_a_request_waits_for_room_if_it_finds_none_and_comes_in_later(layout: KvLayout, waits: bool) -> None:
    kinds = (("add", (0,)), ("add", (1,)), ("step", (0, 1)), ("cancel", (0,)), ("add", (1,)), ("step", (1,)))
    session = Session((Mate((2, 7, 1, 8, 2), stops=Stops(2)),), tuple(Action(*kind) for kind in kinds))
    case = Case(LLAMA, (3, 1, 4, 1, 5), layout=layout, stops=Stops(3), dtype="float64", session=session)
    trace = open_backend("cpu-eager").run(case)
    event = "event waits for room, then steps"
    assert event not in names(case, trace, 0)
    assert (event in names(case, trace, 1)) is waits


def test_coverage_counts_pairs_and_names_what_is_missing() -> None:
    by_name = {str(label): place for place, label in enumerate(LABELS)}
    declared = [
        by_name[name] for name in ("draft ngram", "draft model", "layout paged", "layout static", "dtype float32")
    ]
    coverage = PairCoverage(possible_pairs(declared))
    # Two drafts, two layouts and a dtype: 2 x 2 + 2 + 2 pairs, since a request has one of each.
    assert (coverage.num_possible, coverage.num_met) == (8, 0)
    coverage = coverage.with_case([[by_name["draft ngram"], by_name["layout paged"], by_name["dtype float32"]]])
    assert (coverage.num_met, coverage.share) == (3, 3 / 8)
    assert coverage.absent == (Label("draft", "model"), Label("layout", "static"))
    assert coverage.missing_of_present == ()
    coverage = coverage.with_case([[by_name["draft model"], by_name["layout static"]]])
    assert [str(pair) for pair in coverage.missing_of_present] == [
        "draft model × layout paged",
        "draft model × dtype float32",
        "draft ngram × layout static",
        "layout static × dtype float32",
    ]
    rows = dict(coverage_rows(coverage))
    assert rows["pairs"].startswith("4 of 8 pairs")
    assert "never" not in rows
    assert rows["apart"].startswith("draft model × layout paged; ")
    fact = coverage_fact(coverage)
    assert fact is not None
    assert (fact["possible"], fact["met"], len(fact["missing"]), fact["more_missing"]) == (8, 4, 4, 0)


def test_what_an_engine_does_not_declare_is_no_gap() -> None:
    def generate(prompt_ids: list[int], max_new_tokens: int, model: object) -> list[int]:
        raise AssertionError("not called")

    alone: Abilities = blackbox(generate)().declaration
    declared = {str(LABELS[place]) for place in declared_labels(alone, shows_steps=False)}
    assert "layout branch" in declared
    assert not declared & {
        "layout paged",
        "sampling sampled",
        "event accepts one",
        "event launched step",
        "ranks 2 ranks",
    }
    everything = {str(LABELS[place]) for place in declared_labels(open_backend("cpu-eager").declaration)}
    assert declared < everything


def test_bits_and_pairs_are_the_same_thing() -> None:
    every = bits_of(range(len(LABELS)))
    assert all(pair.bit & every for pair in candidate_pairs())
    assert len({pair.bit for pair in candidate_pairs()}) == len(candidate_pairs())


@pytest.mark.parametrize("exclusion", EXCLUSIONS, ids=lambda exclusion: exclusion.reason[:40])
def test_every_exclusion_is_about_some_pair(exclusion: object) -> None:
    assert any(exclusion.holds(pair) for pair in candidate_pairs())  # type: ignore[attr-defined]


def test_a_run_without_drawn_cases_says_nothing_of_pairs() -> None:
    assert coverage_rows(Tally("cpu-eager").pairs) == []
    assert coverage_fact(None) is None
    assert replace(PairCoverage(0)).share == 1.0


def test_blocks_that_no_family_has_together_are_those_of_the_models_that_are_drawn() -> None:
    # A swarm ties the head of a model of any family to its embedding where the vocabulary is large.
    has_block: dict[str, Callable[[Architecture], bool]] = {
        **{name: has_trait for name, has_trait in TRAITS.items() if name != "tied"},
        "adapter": lambda arch: arch.family in ADAPTED,
        "2 ranks": lambda arch: sharding_refusal(arch, 2) is None,
        "4 ranks": lambda arch: sharding_refusal(arch, 4) is None,
    }
    apart = {
        (first, second)
        for first, second in combinations(has_block, 2)
        if not any(has_block[first](arch) and has_block[second](arch) for arch in GALLERY)
    }
    pairs_apart = {
        (first, second)
        for first, other_blocks in BLOCKS_APART.items()
        for other_block in other_blocks
        for second in (("2 ranks", "4 ranks") if other_block == "ranks" else (other_block,))
    }
    assert pairs_apart == apart
