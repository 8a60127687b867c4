"""Hints: each mistake of an adapter is named, and no other fault is taken for one."""

import time
from dataclasses import replace
from inspect import signature
from typing import Any

import pytest
import torch

from specverify.adapt import blackbox
from specverify.properties.invariants import ALL
from specverify.properties.strategies.models import GALLERY
from specverify.properties.verdict.finding import FINISHED, Finding
from specverify.properties.verdict.judge import judge
from specverify.properties.witnesses import LEAST_WITNESSES, Witnesses, mistake_of
from specverify.reference.architecture import Seeded
from specverify.reference.case import Case
from specverify.reference.draft import LanguageModel, Scripted
from specverify.reference.oracle.decoder import Oracle
from specverify.reference.sampling import Sampling, Stops
from specverify.reference.trace import Stage
from specverify.reference.tree import RankTree
from specverify.setup.subjects import subject_of
from tests.mistaken_adapters import FAULTY, MISTAKEN, Generate, decode, greedy_though_drawn
from tests.models import LLAMA
from tests.tiers import first

OF_TEXT = tuple(invariant for invariant in ALL if invariant.name in ("lossless.greedy-match", "lossless.stops"))
CHAIN = LanguageModel(Seeded(GALLERY[1], 1), RankTree((0, 0, 1), (0, 0, 0)))


def named_mistake(generate: Generate, case: Case) -> str | None:
    """The mistake that is named for the case on which `generate` fails."""
    subject, oracle = subject_of(blackbox(generate)()), Oracle()
    finding = judge(case, OF_TEXT, oracle, subject).first
    assert finding is not None, f"{generate.__name__} does not fail on this case"
    return mistake_of(case, finding, oracle, subject, time.monotonic() + 60)


def failing_case(generate: Generate) -> Case:
    """A drawn-like case on which `generate` fails."""
    subject, oracle = subject_of(blackbox(generate)()), Oracle()
    draft = CHAIN if "draft_model" in signature(generate).parameters else Scripted()
    ended = Case(LLAMA, (3, 1, 4, 1, 5), draft, stops=Stops(8))
    text = oracle(ended.plain_decode()).output
    ends = (replace(ended, stops=Stops(8, (text[position],))) for position in (2, 3, 1))
    return next(case for case in (ended, *ends) if judge(case, OF_TEXT, oracle, subject).first is not None)


@pytest.mark.parametrize("name", first([*MISTAKEN], 6))
def test_a_mistake_of_an_adapter_is_named(name: str) -> None:
    expected, generate = MISTAKEN[name]
    assert named_mistake(generate, failing_case(generate)) == expected


@pytest.mark.parametrize("generate", first([*FAULTY], 4), ids=lambda generate: generate.__name__)
def test_another_fault_is_not_taken_for_a_mistake(generate: Generate) -> None:
    assert named_mistake(generate, failing_case(generate)) is None


def at_temperature(prompt_ids: list[int], max_new_tokens: int, model: Any, temperature: float) -> list[int]:
    def draw(scores: torch.Tensor, count: int) -> torch.Tensor:
        return torch.multinomial(torch.softmax(scores.float() / (2 * temperature), 0), 1)

    return decode(model, prompt_ids, max_new_tokens, pick=draw)


@pytest.mark.parametrize(
    ("generate", "expected"), [(greedy_though_drawn, "greedy-though-drawn"), (at_temperature, None)]
)
def test_a_temperature_that_is_not_passed_is_named(generate: Generate, expected: str | None) -> None:
    finding = Finding("lossless.distribution", Stage.EMITTED, 0, {}, "evidence below e^23", 29.6)
    case = Case(LLAMA, (3, 1), sampling=Sampling(1.5, seed=3), stops=Stops(4))
    subject = subject_of(blackbox(generate)())
    assert mistake_of(case, finding, Oracle(), subject, time.monotonic() + 60) == expected


def test_what_did_not_end_and_what_is_no_text_has_no_hint() -> None:
    subject, later = subject_of(blackbox(MISTAKEN["prompt-returned"][1])()), time.monotonic() + 60
    case = Case(LLAMA, (3, 1), stops=Stops(4))
    finding = Finding("lossless.greedy-match", Stage.EMITTED, 0, {"position": 0}, 1, 2)
    assert mistake_of(case, finding, Oracle(), subject, later) == "prompt-returned"
    assert mistake_of(case, replace(finding, stage=Stage.COMMITTED), Oracle(), subject, later) is None
    assert mistake_of(case, replace(finding, expected=FINISHED), Oracle(), subject, later) is None
    late = time.monotonic() - 1
    assert len(list(Witnesses(case, Oracle(), subject, late).samples())) == LEAST_WITNESSES
    assert mistake_of(case, finding, Oracle(), subject, late) == "prompt-returned", "a slow machine has hints too"
