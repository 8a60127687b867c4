"""The invariants of guided decoding fail on planted faults and wrong traces, and pass what is not shown."""

from collections.abc import Callable
from dataclasses import replace

import numpy as np
import pytest

from specverify.backends import faults
from specverify.properties.invariants import ALL
from specverify.properties.verdict.judge import judge
from specverify.properties.verdict.subject import Subject
from specverify.reference.case import Case
from specverify.reference.oracle.decoder import Oracle
from specverify.reference.trace import Stage, Step, Trace, frozen
from specverify.reports import bundle
from specverify.reports.vocabulary import account
from specverify.setup.subjects import open_planted, subject_of
from tests.cases import CORPUS

NAMES = ("lossless.grammar-per-node", "serving.matcher-in-step")
INVARIANTS = [invariant for invariant in ALL if invariant.name in NAMES]
CASE = bundle.load(CORPUS / "grammar-mask-of-parent.json").case
PLANTED = {
    "lossless.grammar-per-node": (
        "grammar-mask-of-parent",
        "grammar-mask-of-flat-chain",
        "matcher-kept-behind-rejected-branch",
        "end-of-text-legal-everywhere",
        "matcher-reset-by-eviction",
    ),
    "serving.matcher-in-step": ("matcher-advanced-twice",),
}


@pytest.mark.parametrize(
    ("name", "fault"),
    [(name, planted_fault) for name, planted_faults in PLANTED.items() for planted_fault in planted_faults],
)
def test_a_planted_fault_fails_the_invariant(name: str, fault: str) -> None:
    case = bundle.load(CORPUS / f"{fault}.json").case
    named_invariants = [invariant for invariant in INVARIANTS if invariant.name == name]
    verdict = judge(case, named_invariants, Oracle(), subject_of(open_planted("cpu-eager", fault)))
    assert verdict.first is not None
    assert verdict.first.stage is faults.fault_named(fault).stage
    assert not judge(case, named_invariants, Oracle(), subject_of(open_planted("cpu-eager", None))).findings


def subject_with(change: Callable[[Step], Step]) -> Subject:
    """The oracle as a backend, its first step changed."""

    def run(case: Case) -> Trace:
        trace = Oracle()(case)
        return replace(trace, steps=(change(trace.steps[0]), *trace.steps[1:]))

    return Subject("changed", run, frozenset(Stage))


def scored(**fields: object) -> Callable[[Step], Step]:
    def change(step: Step) -> Step:
        assert step.scored is not None
        return replace(step, scored=replace(step.scored, **fields))  # type: ignore[arg-type]

    return change


def matched(count: int | None) -> Callable[[Step], Step]:
    def change(step: Step) -> Step:
        assert step.committed is not None
        return replace(step, committed=replace(step.committed, matched=count))

    return change


SHAPE = (2, CASE.model.vocab_size)


@pytest.mark.parametrize(
    ("change", "name", "side"),
    [
        (scored(legal=frozen(np.ones(SHAPE, dtype=bool))), NAMES[0], "mask"),
        (scored(refused=frozen([True, False])), NAMES[0], "path"),
        (scored(law=frozen(np.full(SHAPE, 1 / SHAPE[1]))), NAMES[0], "law"),
        (matched(0), NAMES[1], "matcher"),
        (matched(9), NAMES[1], "matcher"),
    ],
)
def test_a_wrong_trace_fails_the_invariant(change: Callable[[Step], Step], name: str, side: str) -> None:
    verdict = judge(CASE, INVARIANTS, Oracle(), subject_with(change))
    assert [(finding.invariant, finding.where["side"]) for finding in verdict.findings] == [(name, side)]
    assert account(verdict.findings[0])


def test_an_output_outside_the_language_fails_where_no_mask_is_shown() -> None:
    def run(case: Case) -> Trace:
        trace = Oracle()(replace(case, sampling=replace(case.sampling, grammar=None)))
        steps = [replace(step, scored=None, drafted=None, committed=None) for step in trace.steps]
        return replace(trace, steps=tuple(steps))

    case = bundle.load(CORPUS / "residual-without-grammar.json").case
    verdict = judge(case, INVARIANTS, Oracle(), Subject("free", run, frozenset({Stage.EMITTED})))
    assert [(finding.invariant, finding.where["side"]) for finding in verdict.findings] == [(NAMES[0], "output")]
    assert verdict.outcomes[NAMES[1]] == "unobserved"


def test_what_is_not_shown_is_not_checked() -> None:
    verdict = judge(CASE, INVARIANTS, Oracle(), subject_with(matched(None)))
    assert verdict.outcomes[NAMES[1]] == "unobserved"
    plain = replace(CASE, sampling=replace(CASE.sampling, grammar=None))
    verdict = judge(plain, INVARIANTS, Oracle(), subject_with(lambda step: step))
    assert {verdict.outcomes[name] for name in NAMES} == {"not_applicable"}
