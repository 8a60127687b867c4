"""Pages say which request failed and what was done to it, what is special in a layer, and which entries differ."""

from dataclasses import replace

import numpy as np
import pytest

from specverify.properties.invariants import ALL
from specverify.properties.shrinking.cases import size
from specverify.properties.shrinking.sessions import fewer_mates, plainer_mates
from specverify.properties.tally import Failure, Tally
from specverify.properties.tolerance.mask_column import EXTRA, MISSING
from specverify.properties.verdict.finding import TWO_RUNS, WHOLE_RUNS, Finding, Verdict, width_of
from specverify.reference.architecture import Architecture, Seeded
from specverify.reference.case import Case
from specverify.reference.draft import Scripted
from specverify.reference.sampling import Sampling, Stops
from specverify.reference.session import Action, Mate, Session
from specverify.reference.trace import Stage
from specverify.reference.tree import Tree
from specverify.reports.case_diff import action_words, case_summary
from specverify.reports.format import expected_and_observed
from specverify.reports.layer_words import hiding_words, special_words
from specverify.reports.pages.summary import opening
from specverify.reports.pages.terminal import failure_page
from specverify.reports.tree_scene import Scene
from specverify.reports.vocabulary import account
from tests.models import LLAMA

MATES = (
    Mate((3, 1, 4), sampling=Sampling(2.5, top_k=3, seed=9), stops=Stops(4, (2,))),
    Mate((5,), stops=Stops(2)),
)
ACTIONS = (Action("add", (0,)), Action("add", (1,)), Action("add", (2,)), Action("step", (0, 1)), Action("evict", (2,)))
CASE = Case(LLAMA, (7,), session=Session(MATES, ACTIONS))
WINDOWED = Seeded(Architecture("llama", 16, 8, 8, 2, 1, 4, (0, 4), max_positions=64, chunks=(8, 0), score_cap=30.0), 1)


def make_finding(
    invariant: str, stage: Stage, where: dict[str, int | str], due: object = 1, observed: object = 2
) -> Finding:
    return Finding(invariant, stage, 0, where, due, observed)


def page(case: Case, finding: Finding) -> str:
    verdict = Verdict(case, "engine", {finding.invariant: "failed"}, (finding,))
    return " ".join(failure_page(Failure(verdict, finding, case.id)).split())


def test_the_request_that_failed_is_described_and_the_actions_are_listed() -> None:
    finding = make_finding("lossless.greedy-match", Stage.EMITTED, {"request": 1, "position": 0})
    text = page(CASE, finding)
    assert "prompt of 3 tokens" in text
    assert "temperature 2.5" in text
    assert "request 1, 2 requests beside it, 5 actions" in text
    assert "actions add 0, add 1, add 2, step 0+1, evict 2" in text
    assert "prompt of 1 token" in case_summary(CASE)
    assert action_words(CASE.alone()) == ""


def test_settings_of_mates_shrink_one_by_one() -> None:
    case = replace(CASE, session=Session(MATES[:1], ACTIONS[:2]))
    mates = [smaller.session.mates[0] for attempt in plainer_mates(case) if (smaller := attempt()).session is not None]
    samplings = [mate.sampling for mate in mates]
    assert Sampling(2.5, seed=9) in samplings, "without its top-k"
    assert Sampling(2.5, top_k=3) in samplings, "without its seed"
    assert replace(MATES[0], stops=Stops(4)) in mates
    assert size(replace(case, session=Session((replace(MATES[0], sampling=Sampling(2.5)),), ACTIONS[:2]))) < size(case)


def test_a_lone_mate_becomes_the_case() -> None:
    attempts = [attempt() for attempt in fewer_mates(replace(CASE, session=Session(MATES[:1], ACTIONS[:2])))]
    lone = next(case for case in attempts if case.prompt == (3, 1, 4))
    assert lone.session == Session((), (Action("add", (0,)),))
    assert lone.sampling == MATES[0].sampling
    both = [attempt() for attempt in fewer_mates(CASE)]
    promoted = next(case for case in both if case.prompt == (5,))
    assert promoted.session is not None
    assert promoted.session.mates == MATES[:1]
    assert action_words(promoted) == "add 1, add 0, step 1, evict 0"


def test_what_is_special_in_a_layer_stands_in_the_case_line() -> None:
    case = Case(WINDOWED, (1, 2, 3))
    assert special_words(WINDOWED, 1) == ["window of 4 in layer 1", "scores capped at 30"]
    assert special_words(WINDOWED, 0) == ["chunks of 8 in layer 0", "scores capped at 30"]
    assert special_words(WINDOWED) == ["window of 4 in layer 1", "chunks of 8 in layer 0", "scores capped at 30"]
    assert special_words(LLAMA) == []
    finding = make_finding("attention.context-exact", Stage.ATTENDED, {"layer": 1, "head": 0, "node": 0})
    assert "window of 4 in layer 1" in case_summary(case, finding)
    assert "chunks" not in case_summary(case, finding)


def test_the_sentence_gives_the_reason_of_a_window_and_of_a_chunk() -> None:
    case = Case(WINDOWED, tuple(range(9)), Scripted((Tree((0, 0), (8, 1)),)))
    scene = Scene(Tree((0, 0), (8, 1)), None, 1, None, 8, case)
    where: dict[str, int | str] = {"layer": 1, "head": 0, "node": 1, "column": 2, "cause": "extra column"}
    sentence = account(make_finding("attention.context-exact", Stage.ATTENDED, {**where, "cause": EXTRA}), scene)
    assert "outside the window of 4 of layer 1" in sentence
    sentence = account(
        make_finding("attention.context-exact", Stage.ATTENDED, {**where, "layer": 0, "cause": EXTRA}), scene
    )
    assert "in another chunk of 8 of layer 0" in sentence
    missing = {**where, "column": 7, "cause": MISSING}
    assert "inside the window of 4 tokens" in account(
        make_finding("attention.context-exact", Stage.ATTENDED, missing), scene
    )
    plain: dict[str, int | str] = {"layer": 1, "head": 0, "node": 1}
    assert "Its layer 1 has window of 4" in account(
        make_finding("attention.context-exact", Stage.ATTENDED, plain), scene
    )
    unlimited = replace(scene, case=replace(case, model=LLAMA))
    assert "window" not in account(
        make_finding("attention.context-exact", Stage.ATTENDED, {**where, "cause": EXTRA}), unlimited
    )
    cell: dict[str, int | str] = {"layer": 1, "row": 1, "column": 2}
    mask = make_finding("structure.mask-is-ancestry", Stage.LOWERED, cell, False, True)
    assert "outside the window of 4 of layer 1" in account(mask, scene)
    assert hiding_words(WINDOWED, 1, 9, 6) == ""
    assert hiding_words(WINDOWED, 1, 9, 5) != ""


def test_entries_that_differ_are_told_with_their_indices() -> None:
    def texts_of(due: object, observed: object) -> tuple[str, str]:
        return expected_and_observed(make_finding("x.y", Stage.COMMITTED, {}, due, observed))

    assert texts_of([0.5] * 8, [0.5] * 6 + [0.25, 0.5]) == ("[6] 0.5", "[6] 0.25")
    assert texts_of(np.zeros((2, 3)), np.array([[0.0, 0, 0], [0, 1, 0]])) == ("[1, 1] 0", "[1, 1] 1")
    assert texts_of((1.00001, 2.0), (1.00002, 2.0)) == ("[0] 1.00001", "[0] 1.00002")
    assert texts_of([1, 2], [1, 3]) == ("[1, 2]", "[1, 3]"), "values that are printed otherwise stay as they are"
    due, observed = texts_of(list(range(20)), [*range(6), *range(7, 21)])
    assert due.startswith("[6] 6, [7] 7")
    assert due.endswith("… 14 entries differ")
    assert observed.startswith("[6] 7, [7] 8")
    nan = float("nan")
    assert texts_of([nan] * 7 + [1], [nan] * 7 + [2]) == ("[7] 1", "[7] 2")


def test_the_narrower_statement_speaks_first() -> None:
    names = {invariant.name: invariant for invariant in ALL}
    assert {*names} >= TWO_RUNS
    single_run_names = [name for name in TWO_RUNS if names[name].looks_at_run and name != "lossless.draft-independent"]
    assert single_run_names == [], "these read one run"
    wide = make_finding("attention.batch-mate-independent", Stage.SCORED, {"node": 0})
    narrow = make_finding("cache.prefix-reuse", Stage.SCORED, {"node": 0})
    exact = make_finding("attention.context-exact", Stage.SCORED, {"node": 0})
    assert [width_of(finding) for finding in (exact, narrow, wide)] == [0, 1, 2]
    assert Verdict(CASE, "x", {}, (wide, narrow, exact)).first == exact
    assert Verdict(CASE, "x", {}, (wide, narrow)).first == narrow
    earlier = replace(wide, stage=Stage.ATTENDED)
    assert Verdict(CASE, "x", {}, (earlier, exact)).first == earlier, "the stage decides before the width"
    assert WHOLE_RUNS < TWO_RUNS


@pytest.mark.parametrize(
    ("finding", "words"),
    [
        (make_finding("lossless.accounting", Stage.COMMITTED, {"side": "accepted"}), "counted its own work wrongly"),
        (make_finding("cache.commit-equivalence", Stage.COMMITTED, {}), "left a wrong KV cache behind a step"),
        (make_finding("cache.recurrent-equivalence", Stage.COMMITTED, {}), "left a wrong recurrent state"),
    ],
)
def test_the_first_sentence_speaks_of_what_was_compared(finding: Finding, words: str) -> None:
    verdict = Verdict(CASE, "engine", {finding.invariant: "failed"}, (finding,))
    tally = Tally("engine", failures=[Failure(verdict, finding, CASE.id)])
    tally.add(verdict)
    assert words in " ".join(opening(tally).split())


def test_a_wrong_formula_of_a_draft_is_no_drift() -> None:
    first = make_finding("draft.fidelity", Stage.DRAFTED, {"side": "logits", "node": 0, "token": 3})
    assert "wrong from its first step" in account(first)
    assert "drifted" in account(replace(first, step=2))
