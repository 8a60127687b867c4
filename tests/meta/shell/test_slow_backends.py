"""Slow backends: they draw fewer cases by default, and their control run is shorter."""

from dataclasses import replace

import pytest

from specverify.plan import DEFAULT_CASES, default_cases
from specverify.properties.tolerance.closeness import noise
from specverify.properties.verdict.subject import Subject
from specverify.reference.case import Case
from specverify.reference.draft import Scripted
from specverify.reference.oracle.decoder import Oracle
from specverify.reference.sampling import Stops
from specverify.reference.trace import Trace
from specverify.setup.subjects import open_planted, subject_of
from tests.models import LARGE_LLAMA


def test_an_interpreted_kernel_draws_fewer_cases_than_others_and_a_stranger_as_many_as_any() -> None:
    assert default_cases("triton-interpreted") < DEFAULT_CASES
    assert default_cases("cpu-eager") == default_cases("a.stranger:engine") == DEFAULT_CASES


@pytest.mark.parametrize(("variant_interval", "tokens"), [(1, 12), (2, 6), (4, 4), (100, 4)])
def test_the_control_is_as_much_shorter_as_variants_are_rarer_but_never_a_token_or_two(
    variant_interval: int, tokens: int
) -> None:
    inner_subject = subject_of(open_planted("cpu-eager", None))
    lengths: list[int] = []

    def run(case: Case) -> Trace:
        lengths.append(case.stops.max_new_tokens)
        return inner_subject(case)

    subject = Subject("counted", run, inner_subject.reveals)
    subject.variant_interval = variant_interval
    case = Case(LARGE_LLAMA, (5, 6, 7), Scripted(), stops=Stops(30), dtype="float32")
    assert noise(case, Oracle(), subject).measured > 0
    assert lengths == [tokens]
    assert noise(replace(case, stops=Stops(2)), Oracle(), subject).measured > 0
    assert lengths[1:] == [2]
