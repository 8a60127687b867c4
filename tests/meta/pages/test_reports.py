"""The pages: golden text read as a reader would, 80 columns, a sentence for every invariant, trees of any size."""

import math
import os
import re
from collections import Counter
from dataclasses import replace
from pathlib import Path

import numpy as np
import pytest
from hypothesis import given, settings
from hypothesis import strategies as st
from rich.cells import cell_len

from specverify.properties.invariants import EVERY_INVARIANT
from specverify.properties.tally import Counts, Failure, Tally
from specverify.properties.verdict.finding import Finding, Positions, Tie, Verdict
from specverify.reference.architecture import Architecture, Checkpoint, Seeded
from specverify.reference.case import Case
from specverify.reference.draft import Scripted
from specverify.reference.layout import KvLayout
from specverify.reference.sampling import Stops
from specverify.reference.trace import Accepted, Committed, Drafted, Emitted, Lowered, Scored, Stage, Step, Trace
from specverify.reference.tree import Tree
from specverify.reports.case_diff import differences
from specverify.reports.format import expected_and_observed, number, show
from specverify.reports.pages.summary import WRONG, opening, summary_page
from specverify.reports.pages.terminal import failure_page
from specverify.reports.tree_scene import scene_of
from specverify.reports.vocabulary import SENTENCES, SIDES, account

GOLDEN = Path(__file__).parent / "golden"

NAMES = """
structure.parent-range structure.depth-consistent structure.validity-closed structure.ancestor-table
structure.mask-is-ancestry structure.positions-are-depth structure.links-walk-the-tree attention.context-exact
attention.visibility-exact attention.no-leakage attention.order-equivariant attention.subtree-removal
attention.padding-inert attention.prefix-split acceptance.greedy-walk acceptance.support
acceptance.superset-accepts-no-less acceptance.chain-degenerate acceptance.vocabulary-permutation cache.isolation
cache.commit-equivalence cache.untouched-slots cache.fast-equals-full draft.fidelity draft.rollback
draft.vocabulary-map lossless.greedy-match lossless.draft-independent lossless.stops lossless.state-isolated
lossless.accounting lossless.deterministic lossless.completes
"""
INVARIANTS = NAMES.split()

MODEL = Seeded(Architecture("llama", 16, 8, 8, 2, 1, 4, (0, 0)), 1)
CASE = Case(MODEL, (3, 5), Scripted((Tree((0, 0, 0), (5, 7, 8)),)), KvLayout("fast"), stops=Stops(3))
FINDING = Finding(
    "cache.commit-equivalence",
    Stage.COMMITTED,
    0,
    {"layer": 1, "slot": 3, "kind": "key", "cache": "target"},
    "key of the accepted path at position 3",
    "key of node 2 (bit-equal)",
)


def trace(tree: Tree, accepted: tuple[int, ...]) -> Trace:
    rows = len(tree)
    zero, order = np.zeros(rows, int), np.arange(rows)
    lowered = Lowered(zero, zero, zero, zero, zero, zero[:, None], (), order + 1, zero, zero, order)
    emitted = (*(tree.token[node] for node in accepted[1:]), 9)
    step = Step(
        (3,),
        Drafted(tree),
        lowered,
        None,
        Scored(np.zeros((rows, 16))),
        Accepted(accepted, 9),
        Emitted(emitted),
        Committed(3),
    )
    return Trace((step,), emitted, None)


def verdict(*findings: Finding, case: Case = CASE, accepted: tuple[int, ...] = (0, 1)) -> Verdict:
    assert isinstance(case.draft, Scripted)
    outcomes = dict.fromkeys((finding.invariant for finding in findings), "failed")
    return Verdict(case, "cuda-fused", outcomes, findings, trace=trace(case.draft.trees[0], accepted), forward_s=1.5)


def failure(finding: Finding = FINDING, *further_findings: Finding) -> Failure:
    later = replace(finding, invariant="lossless.greedy-match", stage=Stage.EMITTED, step=1)
    return Failure(
        verdict(finding, later, *further_findings),
        finding,
        "aaaaaaaaaaaa",
        12,
        replace(CASE, layout=KvLayout("path")),
        f".specverify/{CASE.id}.json",
        None,
        "cuda-fused",
    )


def big_failure() -> Failure:
    """A 64-node tree in shuffled rows, under a finding of numbers."""
    parent = (0, *(max(0, node // 2 - 1) for node in range(1, 64)))
    order = (0, *np.random.default_rng(7).permutation(np.arange(1, 64)).tolist())
    tree = Tree(parent, (5, *(node % 16 for node in range(1, 64)))).renumber(order)
    case = replace(CASE, draft=Scripted((tree,)), stops=Stops(9))
    deep = max(range(64), key=lambda node: tree.depth[node])
    finding = Finding(
        "attention.context-exact", Stage.SCORED, 0, {"node": deep, "token": 7}, 1.23456, 4.56789e-8, 312.123
    )
    judged = verdict(finding, case=case, accepted=tree.path(tree.leaves[0])[:2])
    return Failure(judged, finding, case.id, fault="mask-one-too-many", file=f".specverify/{case.id}.json")


def crash_failure() -> Failure:
    finding = Finding(
        "lossless.completes",
        Stage.DRAFTED,
        0,
        {"side": "stage unknown"},
        "a finished run",
        "RuntimeError: CUDA error:\n\x1b[31man illegal\x1b[0m memory access",
    )
    judged = replace(verdict(finding), trace=None)
    return Failure(judged, finding, CASE.id, backend="pkg.module:factory")


def tally(*failures: Failure) -> Tally:
    run = Tally("cuda-fused", seconds=34.21, shrink_seconds=3.5, failures=list(failures))
    for saved_failure in failures:
        run.add(saved_failure.verdict)
    run_outcomes = {"cache.commit-equivalence": "checked", "lossless.stops": "checked"}
    run.add(replace(verdict(), outcomes=run_outcomes))
    silent = {"attention.no-leakage": "unobserved", "draft.rollback": "not_applicable", "lossless.stops": "unobserved"}
    run.add(replace(verdict(), outcomes=silent, unsupported="takes no tape"))
    run.invariants["acme.fits"] = Counts()
    run.positions, run.ties = Positions(40, 3, 0.2, 1), [Tie("lossless.greedy-match", 3, 1.2)]
    run.accept_lengths = {0: 2, 1: 3}
    run.environment = {"python": "3.11", "torch": "2.7", "seed": "0"}
    return run


def broken() -> Tally:
    errors = ["worker 3 died: " + "no more memory " * 12]
    return Tally("ascend-fused-emulated", emulated=True, errors=errors, stopped="time budget of 30 s")


REVEALED = frozenset(Stage) - {Stage.ATTENDED}

PAGES = {
    "small_failure": lambda: failure_page(failure(), REVEALED),
    "big_failure": lambda: failure_page(big_failure(), None),
    "crash": lambda: failure_page(crash_failure(), frozenset()),
    "differ": lambda: summary_page(tally(failure())),
    "agree": lambda: summary_page(tally()),
    "agree_verbose": lambda: summary_page(tally(), verbose=True),
    "opening": lambda: opening(tally(failure())),
    "unjudged": lambda: summary_page(broken()),
}


@pytest.mark.parametrize("name", PAGES)
def test_page_reads_as_it_did(name: str) -> None:
    page = PAGES[name]()
    file = GOLDEN / f"{name}.txt"
    if os.environ.get("SPECVERIFY_UPDATE_GOLDEN") == "1":
        file.write_text(page, encoding="utf-8")
    assert page == file.read_text(encoding="utf-8")


def fits(page: str, width: int = 80) -> bool:
    lines = page.removesuffix("\n").split("\n")
    return all(line.isprintable() and cell_len(line) <= width for line in lines)


@pytest.mark.parametrize("name", PAGES)
def test_pages_fit_80_columns_whatever_the_terminal(name: str, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setenv("COLUMNS", "200")
    monkeypatch.setenv("FORCE_COLOR", "1")
    assert fits(PAGES[name]())


@pytest.mark.parametrize("width", [80, 120, 160])
def test_a_wider_page_says_the_same_on_fewer_lines(width: int) -> None:
    big, small = big_failure(), failure()
    for page in (
        failure_page(big, width=width),
        failure_page(small, REVEALED, width),
        summary_page(tally(small), width),
    ):
        assert fits(page, width)
    wide, narrow = (summary_page(tally(small), columns, verbose=True) for columns in (width, 80))
    assert wide.split() == narrow.split()
    assert (wide.count("\n") < narrow.count("\n")) == (width > 80)


def test_the_failure_and_its_command_stand_last() -> None:
    page = summary_page(tally(failure()), verbose=True).rstrip().split("\n")
    assert page[-1].split()[:3] == ["next", "specverify", "replay"]
    assert any(line.startswith("  failure ") for line in page[-3:])
    assert "failure" not in summary_page(tally())


def lines(page: str) -> list[str]:
    return [line for line in page.splitlines() if line.strip()]


def plain_run() -> Tally:
    """A run of an engine that shows every stage, without anything to remark."""
    run = Tally("cpu-eager", seconds=34.21)
    run.opened, run.declared, run.wanted = True, frozenset(Stage), 1
    run.add(replace(verdict(), outcomes={"cache.commit-equivalence": "checked", "draft.rollback": "not_applicable"}))
    return run


def test_an_agreement_is_six_lines_and_a_difference_three_after_its_page() -> None:
    run = plain_run()
    run.positions, run.environment = Positions(40, 3, 0.2, 1), {"torch": "2.7"}
    page = summary_page(run)
    assert len(lines(page)) <= 6
    assert lines(page)[0] == "AGREE  cpu-eager"
    for word in ("evidence", "predicted", "exactness", "torch"):
        assert word not in page, "the whole of it is for --verbose"
    assert "torch" in summary_page(run, verbose=True)
    run.failures = [failure()]
    assert len(lines(summary_page(run))) == 3
    assert "cache.commit-equivalence" not in summary_page(run), "its page stands above"
    run.failures *= 2
    assert summary_page(run).count("failure  ") == 2


def test_an_agreement_without_speculation_says_so_in_its_headline() -> None:
    run = plain_run()
    run.declared, run.accept_lengths = frozenset({Stage.EMITTED}), Counter()
    run.invariants["attention.context-exact"] = Counts(unobserved=1)
    assert lines(summary_page(run))[0] == "AGREE on text alone: no speculation was seen  cpu-eager"
    assert "on text alone" in summary_page(run, verbose=True)
    assert len(lines(summary_page(run))) <= 6
    run.speculation.told, run.speculation.proposed, run.speculation.accepted = 1, 4, 3
    assert lines(summary_page(run))[0] == "AGREE  cpu-eager"
    run = plain_run()
    run.accept_lengths = Counter({0: 3})
    assert lines(summary_page(run))[0] == "AGREE  cpu-eager", "an engine that shows its steps is judged by them"


def test_counts_are_for_the_verbose_page() -> None:
    run = tally()
    run.invariants |= {f"acme.often{count}": Counts(checked=20, compared=40) for count in range(30)}
    assert "acme.often7" in summary_page(run, verbose=True)
    assert "acme.often" not in summary_page(run)
    assert "by 32 of 35 invariants" in summary_page(run)


def test_the_first_sentence_needs_no_word_of_ours() -> None:
    assert set(WRONG) == set(Stage)
    sentence = " ".join(opening(tally(failure())).split())
    assert sentence.startswith("2 of 3 cases were judged, then cuda-fused left a wrong KV cache behind a step.")
    assert "then cuda-fused did not finish a case." in " ".join(opening(tally(crash_failure())).split())
    two = opening(tally(failure(), big_failure()))
    assert "cuda-fused went wrong in 2 ways" in " ".join(two.split())
    assert opening(tally()) == ""


words = st.text(max_size=300) | st.integers() | st.floats() | st.lists(st.integers() | st.text(), max_size=30)
names = st.sampled_from([*INVARIANTS, "acme.fits"]) | st.text(min_size=1, max_size=120)
coordinates = st.dictionaries(
    st.sampled_from(["layer", "node", "row", "column", "slot", "position", "cache", "side", "odd"]),
    st.integers(-2, 99) | st.text(max_size=90),
)


@settings(max_examples=80, deadline=None)
@given(names, st.sampled_from(list(Stage)), coordinates, words, words, st.none() | st.floats(), st.text(max_size=200))
def test_no_fact_breaks_the_page(
    name: str,
    stage: Stage,
    where: dict[str, int | str],
    expected: object,
    observed: object,
    measure: float | None,
    file: str,
) -> None:
    finding = Finding(name, stage, 0, where, expected, observed, measure)
    odd_failure = replace(failure(finding), file=f"/tmp/{file}", model=f"漢{file}")
    assert fits(failure_page(odd_failure, REVEALED))
    assert fits(summary_page(tally(odd_failure)))


@pytest.mark.parametrize("name", INVARIANTS)
def test_every_invariant_has_its_own_sentence(name: str) -> None:
    finding = Finding(name, Stage.SCORED, 4, {"node": 2, "layer": 1, "head": 3, "variant": "fourth"}, 77, 88, 2.5)
    sentence = account(finding)
    assert name in SENTENCES
    assert name not in sentence
    assert all(place in sentence.lower() for place in ("node 2", "layer 1", "head 3", "fourth"))
    other_sentences = [
        account(replace(finding, invariant=other_name)) for other_name in INVARIANTS if other_name != name
    ]
    assert sentence not in other_sentences
    assert not re.search(r"[{}]", sentence + account(replace(finding, where={}, measure=None)))


def test_sentences_are_for_known_invariants_only() -> None:
    assert set(SENTENCES) == {invariant.name for invariant in EVERY_INVARIANT}


def test_a_strangers_invariant_is_told_with_every_fact() -> None:
    sentence = account(Finding("acme.fits", Stage.SCORED, 4, {"node": 2, "layer": 1}, 77, 88.123456, 2.5))
    assert sentence == (
        "acme.fits does not hold: it asks for 77, and the backend gave 88.1 (2.5 times what is allowed) "
        "(stage scored, step 4, layer 1, node 2)."
    )


def test_a_broken_variant_is_not_told_as_a_changed_result() -> None:
    finding = Finding("attention.subtree-removal", Stage.LOWERED, 0, {}, "a finished run", "IndexError: 5")
    assert account(finding) == (
        "A run that attention.subtree-removal asks for did not finish: IndexError: 5 (stage lowered, step 0)."
    )


@pytest.mark.parametrize(
    ("expected", "observed", "word"),
    [
        (False, True, "lets row 1 see column 2"),
        (np.True_, np.False_, "hides column 2"),
        ("hidden", "visible", "lets row 1 see column 2"),
        ("visible", "hidden", "hides column 2"),
    ],
)
def test_a_mask_cell_is_told_by_its_direction(expected: object, observed: object, word: str) -> None:
    where: dict[str, int | str] = {"row": 1, "column": 2}
    assert word in account(Finding("structure.mask-is-ancestry", Stage.LOWERED, 0, where, expected, observed))


def test_every_side_of_an_invariant_is_told_apart() -> None:
    for invariant, side in SIDES:
        finding = Finding(invariant, Stage.COMMITTED, 0, {"side": side, "node": 2, "layer": 1}, 77, 88, 2.5)
        sentence = account(finding)
        assert sentence != account(replace(finding, where={"node": 2, "layer": 1}))
        assert "88" in sentence
        assert "layer 1" in sentence
        assert not re.search(r"[{}]", sentence)
    shape = Finding("attention.context-exact", Stage.ATTENDED, 0, {"side": "shape"}, "(2, 3)", "(2, 4)")
    assert account(shape).startswith("What the backend shows for attention.context-exact has (2, 4);")


@pytest.mark.parametrize(
    ("name", "stage", "word"),
    [
        ("attention.context-exact", Stage.ATTENDED, "What attention returned for node 2"),
        ("attention.context-exact", Stage.SCORED, "What the forward computed for node 2"),
        ("cache.fast-equals-full", Stage.EMITTED, "the output is 4 instead of 3"),
        ("cache.fast-equals-full", Stage.COMMITTED, "left another key"),
    ],
)
def test_a_sentence_speaks_of_the_stage_that_differs(name: str, stage: Stage, word: str) -> None:
    assert word in account(Finding(name, stage, 0, {"node": 2}, 3, 4))


def test_numbers_that_differ_late_are_told_apart() -> None:
    def texts_of(expected: object, observed: object) -> tuple[str, str]:
        return expected_and_observed(Finding("lossless.logprobs", Stage.EMITTED, 0, {}, expected, observed))

    assert texts_of(-1.1297660337135873, -1.1297411918640137) == ("-1.1298", "-1.1297")
    assert texts_of(-1.0, -2.0) == ("-1", "-2")
    assert texts_of(0.5, 0.5) == ("0.5", "0.5")
    assert texts_of(math.nan, math.nan) == ("not a number", "not a number")


def test_values_are_short() -> None:
    assert show("x" * 999) == "x" * 239 + "…"
    assert show(tuple(range(50))) == "[0, 1, 2, 3, 4, 5, … 50 in all]"
    assert show(np.zeros((3, 4), np.float32)) == "float32 array of 3 × 4"
    assert show([np.float64(1 / 3), np.int64(3), None, True]) == "[0.333, 3, none, true]"
    odd = (1234.5, 1e9, float("nan"), float("-inf"))
    assert [number(x) for x in odd] == ["1234", "1e+09", "not a number", "-infinite"]
    assert show("a\x1b[0m\nb\ud800") == r"a\x1b[0m b\ud800"


def test_scene_finds_the_writer_of_a_slot_and_the_node_of_a_row() -> None:
    judged = verdict(FINDING)
    assert scene_of(judged, FINDING).writer == 2
    assert scene_of(judged, FINDING).writer_rejected
    assert scene_of(judged, replace(FINDING, where={"slot": 2})).writer_rejected is False
    row = replace(FINDING, stage=Stage.LOWERED, where={"row": 1, "column": 3})
    assert scene_of(judged, row).node == 1
    assert scene_of(judged, replace(FINDING, where={"node": 99})).node is None
    assert scene_of(judged, replace(FINDING, where={"cache": "draft", "slot": 3})).writer is None


def test_differences_name_each_field() -> None:
    tree = Tree((0, 0), (5, 7))
    other_case = replace(CASE, draft=Scripted((tree,)), prompt=(5,), layout=KvLayout("path"), dtype="bfloat16")
    assert differences(other_case, CASE) == [
        "a tree with 2 nodes (not 3)",
        "prompt of 1 (not 2)",
        "commit by path (not fast)",
        "dtype bfloat16 (not float32)",
    ]
    renamed = replace(CASE, draft=Scripted((Tree((0, 0, 1), (5, 7, 9)),)))
    assert differences(renamed, CASE) == [
        "a tree with node 2 below node 1 (not 0)",
        "a tree with token 9 at node 2 (not 8)",
    ]
    assert differences(CASE, CASE) == []
    elsewhere = replace(CASE, model=Checkpoint("/m", "sha256:" + "0" * 64, 16, 99))
    assert any("/m" in phrase for phrase in differences(elsewhere, CASE))
