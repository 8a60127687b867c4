"""Choices of columns: shown by engines, judged by index scores, and followed by the oracle in all other numbers."""

import json
from collections.abc import Callable
from dataclasses import replace
from typing import Any

import numpy as np
import pytest
import torch

from specverify.backends import faults
from specverify.backends.compositions import open_cpu
from specverify.backends.engine.kv.choices import RowChoice, WrittenChoices, renumber
from specverify.properties.invariants import ALL
from specverify.properties.run_statistics import excess_choices
from specverify.properties.strategies.models import GALLERY, small_draft
from specverify.properties.tally import Tally
from specverify.properties.verdict.finding import Finding, IndexingCounts, Verdict
from specverify.properties.verdict.invariant import Invariant
from specverify.properties.verdict.judge import judge
from specverify.properties.verdict.subject import Subject
from specverify.reference.architecture import Architecture, Seeded
from specverify.reference.case import Case
from specverify.reference.draft import LanguageModel, Scripted
from specverify.reference.files.json_types import build, encode
from specverify.reference.layout import KvLayout
from specverify.reference.oracle.choices import COLUMNS, Choices, RowChoices
from specverify.reference.oracle.decoder import Oracle
from specverify.reference.oracle.formulas.column_scores import ColumnScores
from specverify.reference.oracle.formulas.routers import UNKNOWN
from specverify.reference.oracle.scored_choices import ScoredChoices, scored_choices
from specverify.reference.sampling import Stops
from specverify.reference.session import Action, Mate, Session
from specverify.reference.trace import Array, Stage, Step, Trace
from specverify.reference.tree import RankTree, Tree
from specverify.setup.subjects import subject_of

INDEXED = tuple(arch for arch in GALLERY if arch.words.indexed)
NAMES = [f"{arch.family}-{number}" for number, arch in enumerate(INDEXED)]
GLM = next(arch for arch in INDEXED if arch.family == "glm_moe_dsa")
TREE = RankTree((0, 0, 0, 1, 2, 1), (0, 0, 1, 0, 0, 1))
PROMPT = (1, 2, 3, 4, 9, 8, 7, 1)


def invariants(*names: str) -> tuple[Invariant, ...]:
    return tuple(invariant for invariant in ALL if invariant.name in names)


CHOICE = invariants("attention.columns-best")
NUMBERS = invariants("attention.context-exact", "cache.commit-equivalence")


def case_on(arch: Architecture, dtype: str = "float64", **changes: object) -> Case:
    draft = LanguageModel(small_draft(arch.vocab_size, 0), TREE)
    case = Case(Seeded(arch, 1), PROMPT, draft, stops=Stops(5), dtype=dtype)
    return replace(case, **changes)  # type: ignore[arg-type]


def columns_of(step: Step) -> Array:
    assert step.scored is not None
    assert step.scored.indexed is not None
    return step.scored.indexed


def expected_columns(oracle: Oracle, case: Case, step: Step) -> Array:
    """The oracle's own columns of the rows of `step`, in as many places as the step shows."""
    assert step.drafted is not None
    scored = oracle.scored_choices(COLUMNS, case, step.context, step.drafted.tree)
    assert scored is not None
    width = columns_of(step).shape[2]
    assert (scored.chosen[..., width:] == UNKNOWN).all()
    own_columns: Array = scored.chosen[..., :width]
    return own_columns


def with_other_columns(trace: Trace, change: Callable[[Array], Array | None]) -> Trace:
    """`trace` with other columns in each step."""
    steps = [
        replace(step, scored=replace(step.scored, indexed=change(columns_of(step))))  # type: ignore[type-var]
        for step in trace.steps
    ]
    return replace(trace, steps=tuple(steps))


def recorded(run: Callable[[Case], Trace]) -> Subject:
    return Subject("recorded", run, frozenset(Stage))


LAYOUTS = {
    "branch": KvLayout(),
    "branches": KvLayout(branches=3),
    "left padded": KvLayout(left_pad=3),
    "static": KvLayout(kind="static", prefill_chunk=3),
    "latent": KvLayout(latent=True),
}


@pytest.mark.parametrize("arch", INDEXED, ids=NAMES)
@pytest.mark.parametrize("layout", LAYOUTS.values(), ids=LAYOUTS)
def test_an_engine_shows_the_columns_that_the_oracle_takes(layout: KvLayout, arch: Architecture) -> None:
    """In float64 they are the oracle's, in every row of context and tree."""
    # A parent may stand behind its child.
    tree = Tree((0, 3, 0, 2, 1, 0), (PROMPT[-1], 5, 7, 3, 2, 6))
    oracle = Oracle()
    for draft in (LanguageModel(small_draft(arch.vocab_size, 0), TREE), Scripted((tree, tree))):
        case = case_on(arch, layout=layout, draft=draft)
        for step in open_cpu().run(case).steps:
            np.testing.assert_array_equal(columns_of(step), expected_columns(oracle, case, step))


def test_rows_that_were_judged_before_are_not_scored_again(monkeypatch: pytest.MonkeyPatch) -> None:
    scored_rows: list[list[int]] = []

    def note_rows(oracle: Oracle, kind: str, case: Case, context: Any, tree: Tree, rows: Any) -> ScoredChoices | None:
        scored_rows.append(rows)
        return scored_choices(kind, oracle.target_of(case), context, tree, rows=rows)

    monkeypatch.setattr(Oracle, "scored_choices", note_rows)
    case = case_on(GLM)
    trace = open_cpu().run(case)
    assert judge(case, CHOICE, Oracle(), recorded(lambda _: trace)).agreed
    assert len(scored_rows) == len(trace.steps) > 2
    assert scored_rows[0] == list(range(len(trace.steps[0].context) + len(trees_of(trace)[0])))
    for step, rows in zip(trace.steps[1:], scored_rows[1:], strict=True):
        assert min(rows) >= len(step.context), "rows of the context were nodes before"


def trees_of(trace: Trace) -> list[Tree]:
    return [step.drafted.tree for step in trace.steps if step.drafted is not None]


def test_a_layer_that_follows_shows_the_columns_of_the_one_before() -> None:
    for step in open_cpu().run(case_on(GLM)).steps:
        first, following, last = columns_of(step)
        assert np.array_equal(first, following)
        assert not np.array_equal(first, last)


def test_a_model_without_an_indexer_shows_no_columns() -> None:
    (step, *_) = open_cpu().run(case_on(GALLERY[1])).steps
    assert step.scored is not None
    assert step.scored.indexed is None


@pytest.mark.parametrize("kind", ["branch", "paged", "prefix"])
def test_committed_rows_have_the_columns_of_the_forward_that_wrote_them(kind: str) -> None:
    """After prefills in pieces, evictions, forks and pages that other requests wrote, every row is known."""
    layout = KvLayout(kind=kind, page_size=2 if kind != "branch" else 0, prefill_chunk=3)
    actions = (
        Action("add", (0,)), Action("step", (0,)), Action("fork", (0, 1)), Action("step", (0, 1)),
        Action("evict", (0,)), Action("step", (1,)), Action("restore", (0,)), Action("step", (0, 1)),
        Action("add", (2,)), Action("step", (2,)),
    )  # fmt: skip
    mates = (Mate(prompt=(4,)), Mate(prompt=PROMPT))
    case = case_on(GLM, layout=layout, stops=Stops(12), session=Session(mates, actions))
    oracle, shared = Oracle(), open_cpu().run(case).shared
    assert shared is not None
    steps = [step for request in shared.requests if request is not None for step in request.steps]
    assert len(steps) >= 6
    for step in steps:
        np.testing.assert_array_equal(columns_of(step), expected_columns(oracle, case, step))


def test_the_columns_of_a_trace_are_in_its_record() -> None:
    trace = open_cpu().run(case_on(GLM))
    content = json.loads(json.dumps(encode(trace.steps[0])))
    assert content["scored"]["indexed"] == columns_of(trace.steps[0]).tolist()
    assert build(Step, content).scored.indexed == columns_of(trace.steps[0]).tolist()


def test_columns_on_other_paths_have_no_position() -> None:
    """Open rows are numbered along the path of the row that sees them; what it should not see has no number."""
    columns = torch.tensor([[0, 2, 5, 7], [1, 6, 7, UNKNOWN]])
    assert renumber(columns, 4, [5, 7]).tolist() == [[0, 2, 4, 5], [1, 5, UNKNOWN, UNKNOWN]]


def test_a_commit_keeps_the_choices_of_its_path_by_position() -> None:
    choices = WrittenChoices()
    rows = [RowChoice(columns=torch.tensor([[0, 2 + place]])) for place in range(3)]
    choices.write(0, [RowChoice(columns=torch.tensor([[column]])) for column in range(2)])
    choices.write(2, rows)
    choices.commit(2, [0, 2])
    columns = choices.columns_of(4, [])
    assert columns is not None
    assert columns.tolist() == [[[0, -1], [1, -1], [0, 2], [0, 3]]]
    assert choices.columns_of(5, []).tolist()[0][4] == [UNKNOWN, UNKNOWN]  # type: ignore[union-attr]


def worst_columns(oracle: Oracle, case: Case, step: Step) -> RowChoices:
    """The choices of the oracle, but for the root's in layer 0: its worst columns."""
    assert step.drafted is not None
    scored = oracle.scored_choices(COLUMNS, case, step.context, step.drafted.tree)
    assert scored is not None
    scorer, root = scored.scorers[0], len(step.context)
    assert isinstance(scorer, ColumnScores)
    chosen = scored.chosen.copy()
    worst = np.argsort(scorer.scores[root, : root + 1], kind="stable")[: scorer.columns_per_row]
    chosen[0, root] = np.sort(worst)
    return RowChoices(columns=chosen)


def following(oracle: Oracle, case: Case, step: Step, rows: RowChoices) -> Trace:
    """The oracle's run of `case` with the choices `rows` of the context and tree of `step`, which it shows."""
    assert step.drafted is not None
    choices = Choices(rows.layers)
    choices.add(step.context, step.drafted.tree, rows)
    follower = oracle.following(case, choices)
    steps = []
    for followed in follower(case).steps:
        assert followed.drafted is not None
        assert followed.scored is not None
        chosen_fields = {}
        for field, kind in (("indexed", COLUMNS), ("routed", "experts")):
            scored = follower.scored_choices(kind, case, followed.context, followed.drafted.tree)
            assert scored is not None
            chosen_fields[field] = scored.chosen
        steps.append(replace(followed, scored=replace(followed.scored, **chosen_fields)))
    return replace(follower(case), steps=tuple(steps))


def test_a_choice_that_is_not_the_best_is_refused_though_all_numbers_follow_from_it() -> None:
    oracle, case = Oracle(), case_on(GLM, steps=1)

    def run(asked_case: Case) -> Trace:
        first = oracle(asked_case).steps[0]
        return following(oracle, asked_case, first, worst_columns(oracle, asked_case, first))

    verdict = judge(case, (*CHOICE, *NUMBERS), oracle, recorded(run))
    assert {finding.invariant for finding in verdict.findings} == {"attention.columns-best"}
    assert verdict.outcomes["attention.context-exact"] == "checked"
    first = verdict.first
    assert first is not None
    assert (first.stage, first.where, first.step) == (Stage.ATTENDED, {"layer": 0, "node": 0}, 0)


def without_last(columns: Array) -> Array:
    """Each row without its last column."""
    fewer: Array = columns.copy()
    for row in fewer.reshape(-1, fewer.shape[2]):
        row[max(0, int((row != UNKNOWN).sum()) - 1)] = UNKNOWN
    return fewer


@pytest.mark.parametrize(
    ("change", "side"),
    [
        (without_last, None),
        (lambda columns: np.where(columns == 0, columns.shape[1], columns), None),
        (lambda columns: columns[:, 1:], "shape"),
        (lambda columns: columns[:1], "shape"),
    ],
    ids=["too few", "behind the row", "rows", "layers"],
)
def test_columns_that_are_no_choice_are_refused(change: Callable[[Array], Array], side: str | None) -> None:
    backend, case = open_cpu(), case_on(GLM)
    verdict = judge(
        case, CHOICE, Oracle(), recorded(lambda asked_case: with_other_columns(backend.run(asked_case), change))
    )
    assert verdict.outcomes == {"attention.columns-best": "failed"}
    assert verdict.findings[0].where.get("side") == side


def test_a_backend_that_shows_no_columns_is_not_judged_on_them() -> None:
    backend, case = open_cpu(), case_on(GLM)
    for nothing, outcome in (
        (lambda _: None, "unobserved"),
        (lambda chosen_columns: np.full_like(chosen_columns, UNKNOWN), None),
    ):
        change: Callable[[Array], Array | None] = nothing
        subject = recorded(lambda asked_case, change=change: with_other_columns(backend.run(asked_case), change))  # type: ignore[misc]
        verdict = judge(case, CHOICE, Oracle(), subject)
        assert (verdict.findings, verdict.indexed.judged) == ((), 0)
        assert outcome is None or verdict.outcomes == {"attention.columns-best": outcome}


def test_in_sixteen_bits_ties_are_counted_and_explain_every_number() -> None:
    """In float64 no row lies near a border; in bfloat16 many do, and some take another column than the oracle."""
    oracle, subject = Oracle(), subject_of(open_cpu())
    for dtype in ("float64", "bfloat16"):
        verdict = judge(case_on(GLM, dtype, stops=Stops(8)), (*CHOICE, *NUMBERS), oracle, subject)
        assert (verdict.findings, verdict.routing_ties) == ((), ())
        assert set(verdict.outcomes.values()) == {"checked"}
        assert bool(verdict.indexed.ties) == (dtype == "bfloat16")
    assert verdict.indexed.ties < verdict.indexed.near < verdict.indexed.judged


FAULTS = {
    "indexed-columns-of-first-row": 1,
    "indexer-counts-hidden-columns": 1,
    "indexer-products-not-rectified": 1,
    "indexer-fed-queries-before-norm": 1,
    "indexer-turned-as-attention": 0,
    "indexer-takes-last-of-equals": 0,
}
"""Faults of the choice, each with the architecture on which it shows for one of two prompts.

Heads of one pair turn either way alike, and one head alone leaves equal scores.
"""

GROSS = ("indexed-columns-of-first-row", "indexer-counts-hidden-columns", "indexer-products-not-rectified")
"""Faults whose choice lies beyond the noise of 16 bits."""


def located(fault: str, dtype: str, prompts: int) -> set[tuple[str, Stage]]:
    """Where the first difference of each of so many prompts lies."""
    backend, arch = open_cpu(), INDEXED[FAULTS[fault]]
    faults.plant(backend, faults.fault_named(fault))
    oracle, subject = Oracle(), subject_of(backend)
    places = set()
    for seed in range(prompts):
        prompt = tuple(np.random.default_rng(seed).integers(0, arch.vocab_size, 9).tolist())
        first = judge(case_on(arch, dtype, prompt=prompt), (*CHOICE, *NUMBERS), oracle, subject).first
        places |= set() if first is None else {(first.invariant, first.stage)}
    return places


@pytest.mark.parametrize("fault", FAULTS)
def test_a_fault_of_the_choice_is_found_where_the_row_chooses(fault: str) -> None:
    """The oracle attends to the columns that the engine shows, and the choice is judged all the same."""
    assert located(fault, "float32", 2) == {("attention.columns-best", Stage.ATTENDED)}


@pytest.mark.slow
@pytest.mark.parametrize("dtype", ["bfloat16", "float16"])
@pytest.mark.parametrize("fault", GROSS)
def test_a_gross_fault_of_the_choice_is_found_in_sixteen_bits(fault: str, dtype: str) -> None:
    assert located(fault, dtype, 3) == {("attention.columns-best", Stage.ATTENDED)}


def test_attention_of_an_earlier_layer_comes_before_the_choice_that_follows_from_it() -> None:
    in_attention = Finding("attention.context-exact", Stage.ATTENDED, 0, {"layer": 0, "node": 2}, 0.0, 1.0, 9.0)
    choices = [
        Finding("attention.columns-best", Stage.ATTENDED, 0, {"layer": layer, "node": 1}, [0], [1]) for layer in (1, 0)
    ]
    for findings, invariant in (
        ((choices[0], in_attention), "attention.context-exact"),
        ((choices[1], in_attention), "attention.columns-best"),
    ):
        first = Verdict(case_on(GLM), "own", {}, findings).first
        assert first is not None
        assert first.invariant == invariant


def test_too_many_other_columns_are_no_chance() -> None:
    tally = Tally("own")
    tally.indexed = IndexingCounts(judged=1000, near=100, predicted=10.0, ties=30)
    assert excess_choices(tally) is None
    tally.indexed = IndexingCounts(judged=1000, near=100, predicted=10.0, ties=120)
    assert excess_choices(tally) == "120 rows took other columns, where the noise of their scores predicts 10"
