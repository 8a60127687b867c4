"""Rows of logits that amplify roundings are granted what the oracle says of them, and no more."""

from dataclasses import replace
from math import nan
from pathlib import Path

import numpy as np
import pytest

from backends.compositions import open_cpu
from properties.tolerance.amplification import MOST
from properties.tolerance.closeness import beyond, noise
from properties.verdict.judge import judge
from reports import bundle
from specverify.setup.subjects import subject_of
from tests.corruption import BY_NAME, ORACLE, entry, in_stage, where, wrong

CASE = bundle.load(Path(__file__).resolve().parents[2] / "corpus/clean/row-that-amplifies-roundings.json").case
"""EXAONE 4 in float32: node 3 of step 1 shows 9.8 times as much of the roundings as the rows of plain decode."""

SUBJECT = subject_of(open_cpu())

NAME = "attention.context-exact"


def test_a_right_run_is_right_at_an_ill_conditioned_row() -> None:
    error = noise(CASE, ORACLE, SUBJECT)
    step, true = SUBJECT(CASE).steps[1], ORACLE(CASE).steps[1]
    assert step.scored is not None
    assert true.scored is not None
    rows = dict(beyond(step.scored.logits, true.scored.logits, error.of_logits()))
    # The case asks for the rule only on machines whose kernels round as the one that drew it.
    assert all(node == (3,) and measure < 4 for node, measure in rows.items())
    verdict = judge(CASE, (BY_NAME[NAME],), ORACLE, SUBJECT)
    assert verdict.outcomes[NAME] == "checked"
    assert not verdict.findings


def test_only_the_row_that_amplifies_is_excused_and_only_so_far() -> None:
    error = noise(CASE, ORACLE, SUBJECT)
    step = ORACLE(CASE).steps[1]
    assert [error.amplification.excuses(step, node, 1.5) for node in range(5)] == [False, False, False, True, False]
    assert error.amplification.excuses(step, 3, 9)
    assert not error.amplification.excuses(step, 3, 11)
    for measure in (2 * MOST, nan, np.inf):
        assert not error.amplification.excuses(step, 3, measure)


@pytest.mark.parametrize(("node", "limits", "found"), [(3, 5.0, False), (3, 15.0, True), (2, 2.5, True)])
def test_a_larger_error_is_found(node: int, limits: float, found: bool) -> None:
    limit = limits * noise(CASE, ORACLE, SUBJECT).of_logits()
    moved = in_stage("scored", lambda one: replace(one, logits=entry(one.logits, node, one.logits[node] + limit)), 1)
    verdict = judge(CASE, (BY_NAME[NAME],), ORACLE, wrong(where(lambda case: case == CASE, moved)))
    assert [one.where["node"] for one in verdict.findings] == ([node] if found else [])


def test_an_oracle_without_weights_excuses_nothing() -> None:
    error, steps = noise(CASE, ORACLE, SUBJECT), ORACLE(CASE).steps
    # Plain transformers in the oracle's place is a function to the judge.
    peer = replace(error.amplification, oracle=lambda case: ORACLE(case))
    assert error.amplification.excuses(steps[1], 3, 1.5)
    assert not peer.excuses(steps[1], 3, 1.5)
