"""The invariants of recurrent state fail on planted faults and wrong states, and pass none that is not shown."""

from collections.abc import Callable
from dataclasses import replace
from typing import Any

import numpy as np
import pytest

from specverify.backends import faults
from specverify.backends.compositions import open_cpu
from specverify.properties.invariants import ALL
from specverify.properties.invariants.cache.recurrent import PREFILL, ROOT
from specverify.properties.strategies.models import GALLERY
from specverify.properties.tolerance.bounds import UNIT
from specverify.properties.tolerance.closeness import kv_case
from specverify.properties.verdict.judge import judge
from specverify.properties.verdict.subject import Subject
from specverify.reference.architecture import Seeded
from specverify.reference.case import Case
from specverify.reference.draft import LanguageModel
from specverify.reference.family.recurrent import RecurrentState
from specverify.reference.oracle.amplification import PERTURBED
from specverify.reference.oracle.decoder import Oracle
from specverify.reference.sampling import Stops
from specverify.reference.trace import Array, Committed, Stage, Trace
from specverify.reference.tree import RankTree
from specverify.reports import bundle
from specverify.reports.pages.trace import field_of
from specverify.reports.vocabulary import account
from specverify.setup.subjects import open_planted, subject_of
from tests.cases import CORPUS
from tests.models import TINY_LLAMA

NAME = "cache.recurrent-equivalence"
ORACLE = Oracle()
(INVARIANT,) = (invariant for invariant in ALL if invariant.name == NAME)
(OF_ROWS,) = (invariant for invariant in ALL if invariant.name == "cache.recurrent-rows")
MODEL = Seeded(next(arch for arch in GALLERY if arch.recurrent), 0)
TREE = RankTree((0, 0, 0), (0, 0, 1))
CASE = Case(MODEL, (1, 2), LanguageModel(MODEL, TREE), stops=Stops(3), dtype="float64")
PLANTED = (
    "recurrent-state-by-depth",
    "recurrent-state-not-rolled-back",
    "recurrent-window-of-last-row",
    "recurrent-state-of-last-row",
    "recurrent-state-lost-by-eviction",
    "recurrent-state-shared-by-fork",
)
IN_ROWS = {
    "recurrent-suffix-from-blank-state": PREFILL,
    "recurrent-state-of-chunk-dropped": PREFILL,
    "recurrent-state-of-prefix-advanced": PREFILL,
    "recurrent-slots-overlap": PREFILL,
    "recurrent-slot-zero-without-drafts": ROOT,
    "recurrent-slot-not-cleared": ROOT,
    "recurrent-window-not-continued": ROOT,
    "recurrent-window-of-new-cell": ROOT,
}
"""Faults of prefills and of the root's row, each with the side that shows it."""


@pytest.mark.parametrize("fault", IN_ROWS)
def test_a_fault_of_a_prefill_or_of_a_row_has_its_own_name(fault: str) -> None:
    """And not that of the attention above, or of two runs that differ."""
    case = bundle.load(CORPUS / f"{fault}.json").case
    invariants = [invariant for invariant in ALL if invariant.every == 1]
    verdict = judge(case, invariants, Oracle(), subject_of(open_planted("cpu-eager", fault)))
    assert verdict.first is not None
    assert (verdict.first.invariant, verdict.first.where["side"]) == (OF_ROWS.name, IN_ROWS[fault])
    assert verdict.first.stage is faults.fault_named(fault).stage is Stage.ATTENDED
    assert account(verdict.first)
    assert field_of(verdict.first) == f"committed.recurrent_{'before' if IN_ROWS[fault] == PREFILL else 'root'}"
    assert judge(case, (OF_ROWS,), Oracle(), subject_of(open_cpu())).outcomes == {OF_ROWS.name: "checked"}


@pytest.mark.parametrize("fault", PLANTED)
def test_a_planted_fault_fails_the_invariant(fault: str) -> None:
    case = bundle.load(CORPUS / f"{fault}.json").case
    verdict = judge(case, (INVARIANT,), Oracle(), subject_of(open_planted("cpu-eager", fault)))
    assert verdict.first is not None
    assert verdict.first.stage is faults.fault_named(fault).stage
    assert account(verdict.first)
    assert not judge(case, (INVARIANT,), Oracle(), subject_of(open_cpu())).findings


def subject_with(change: Callable[[RecurrentState], RecurrentState | None], field: str = "recurrent") -> Subject:
    """The engine, the state after its first step changed, or another field of its commit."""

    def run(case: Case) -> Trace:
        trace = open_cpu().run(case)
        first = trace.steps[0]
        assert first.committed is not None
        changed: dict[str, Any] = {field: change(getattr(first.committed, field))}
        committed = replace(first.committed, **changed)
        return replace(trace, steps=(replace(first, committed=committed), *trace.steps[1:]))

    return Subject("changed", run, frozenset(Stage))


@pytest.mark.parametrize(
    ("change", "where"),
    [
        (lambda state: replace(state, windows=(state.windows[0] + 1e-6, *state.windows[1:])), "window"),
        (lambda state: replace(state, memories=(state.memories[0] * np.nan, *state.memories[1:])), "memory"),
        (lambda state: replace(state, memories=(state.memories[0][:1], *state.memories[1:])), "shape"),
        (lambda state: RecurrentState((*state.windows, *state.windows), (*state.memories, *state.memories)), "shape"),
    ],
)
def test_a_wrong_state_is_told(change: Callable[[RecurrentState], RecurrentState], where: str) -> None:
    verdict = judge(CASE, (INVARIANT,), Oracle(), subject_with(change))
    assert verdict.first is not None
    assert where in verdict.first.where.values()


@pytest.mark.parametrize(("field", "side"), [("recurrent_before", PREFILL), ("recurrent_root", ROOT)])
def test_a_wrong_state_before_the_commit_is_told(field: str, side: str) -> None:
    subject = subject_with(lambda state: replace(state, windows=(state.windows[0] + 1e-6, *state.windows[1:])), field)
    verdict = judge(CASE, (OF_ROWS, INVARIANT), Oracle(), subject)
    assert [(finding.invariant, finding.where["side"]) for finding in verdict.findings] == [(OF_ROWS.name, side)]


def test_rows_that_are_not_shown_are_not_checked() -> None:
    hidden: dict[str, Any] = dict.fromkeys(("recurrent_before", "recurrent_root"))

    def run(case: Case) -> Trace:
        trace = open_cpu().run(case)
        return replace(trace, steps=tuple(replace(step, committed=hide(step.committed)) for step in trace.steps))

    def hide(committed: Committed | None) -> Committed | None:
        return None if committed is None else replace(committed, **hidden)

    less = Subject("less", run, frozenset(Stage))
    outcomes = judge(CASE, (OF_ROWS, INVARIANT), Oracle(), less).outcomes
    assert outcomes == {OF_ROWS.name: "unobserved", NAME: "checked"}


def test_what_is_not_shown_is_not_checked() -> None:
    assert judge(replace(CASE, stops=Stops(1)), (INVARIANT,), Oracle(), subject_with(lambda _: None)).outcomes == {
        NAME: "unobserved"
    }
    plain = replace(CASE, model=TINY_LLAMA, draft=LanguageModel(TINY_LLAMA, TREE))
    assert judge(plain, (INVARIANT,), Oracle(), subject_of(open_cpu())).outcomes == {NAME: "not_applicable"}


ILL = bundle.load(CORPUS / "clean/state-that-amplifies-roundings.json").case
"""Qwen3-Next in float32: the memory of the second recurrent layer moves farther than its bound allows."""


@pytest.mark.parametrize(("layer", "times", "is_found"), [(1, 3.0, False), (1, 8.0, True), (0, 300.0, True)])
def test_a_state_may_be_off_as_far_as_the_unit_roundoff_moves_it(layer: int, times: float, is_found: bool) -> None:
    """Six times as far in that layer; in the first layer, which moves little, the bound stands."""
    oracle, first = Oracle(), ORACLE(ILL).steps[0]
    assert first.emitted is not None
    tokens = (*ILL.prefix, *ILL.prompt[-1:], *first.emitted.tokens[:-1])

    def memory(any_oracle: Oracle) -> Array:
        commit = any_oracle(kv_case(ILL, tokens)).steps[0].committed
        assert commit is not None
        assert commit.recurrent_before is not None
        return commit.recurrent_before.memories[layer]

    away = [(memory(neighbour) - memory(oracle)) / PERTURBED for neighbour in oracle.neighbours()]
    moved = float(np.sqrt(np.mean(np.square(away))))

    def off(state: RecurrentState) -> RecurrentState:
        memories = list(state.memories)
        memories[layer] = memories[layer] + times * moved * UNIT[ILL.dtype]
        return replace(state, memories=tuple(memories))

    findings = judge(ILL, (INVARIANT,), oracle, subject_with(off)).findings
    assert [finding.where["kind"] for finding in findings][:1] == (["memory"] if is_found else [])


def test_a_switch_that_outgrows_the_pool_leaves_the_draft() -> None:
    """The twin of a fork has the tokens of its source too; it goes on with its own draft, which is judged so."""
    case = bundle.load(CORPUS / "clean/switch-that-outgrows-the-pool.json").case
    assert case.session is not None
    (position,) = (place for place, action in enumerate(case.session.actions) if action.kind == "switch")
    twin = case.session.actions[position].requests[0]
    trace = open_cpu().run(case)
    assert trace.shared is not None
    assert twin in trace.shared.accounts[position].committed
    assert not judge(case, ALL, ORACLE, subject_of(open_cpu())).findings
