"""The same seed draws the same cases, whatever modules a process has loaded and however it hashes strings."""

import importlib
import os
import subprocess
import sys
from collections.abc import Callable, Iterator
from dataclasses import replace
from itertools import islice
from pathlib import Path
from random import Random
from types import ModuleType

import numpy as np
import pytest
from hypothesis import given, seed, settings
from hypothesis import strategies as st

from specverify.bench.throughput import throughput
from specverify.campaign.case_stream import Stream
from specverify.campaign.search import Search
from specverify.plan import DEFAULT_DTYPES, Plan
from specverify.properties.invariants import ALL
from specverify.properties.live.play import play
from specverify.properties.live.watch import SessionStats
from specverify.properties.strategies import acceptance
from specverify.properties.strategies.settings import drawing_settings, explore, without_local_constants
from specverify.reference.case import Case
from specverify.reference.oracle.decoder import Oracle
from specverify.reference.trace import Trace
from specverify.setup.subjects import open_planted, subject_of
from tests.models import LLAMA

ROOT = Path(__file__).resolve().parents[3]
NUMBER, NUM_CASES = 5, 8
PROMPTS = ((1,), (2, 3), (4, 0, 1), (3, 3, 2, 1))
NOTHING_LOADED = f"""
from itertools import islice
from specverify.campaign.case_stream import Stream
print(*(case.id for case in islice(Stream({NUMBER}, {DEFAULT_DTYPES}), {NUM_CASES})))
"""


@pytest.fixture
def constants(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> Iterator[ModuleType]:
    """A loaded module of the user's, which is full of constants, beside torch and transformers."""
    import torch  # noqa: F401
    import transformers  # noqa: F401

    dice = Random(3)
    integers = [dice.randrange(100, 2 ** dice.randrange(8, 64)) for _ in range(400)]
    strings = [dice.randbytes(dice.randrange(1, 50)) for _ in range(300)]
    fractions = [dice.random() for _ in range(200)]
    (tmp_path / "odd_adapter.py").write_text(f"A, B, C = {integers}, {strings}, {fractions}\n")
    monkeypatch.syspath_prepend(tmp_path)
    yield importlib.import_module("odd_adapter")
    del sys.modules["odd_adapter"]


@pytest.fixture
def another_profile() -> Iterator[None]:
    """A Hypothesis profile of the user's that changes what is drawn, in force."""
    settings.register_profile("before", settings())
    settings.register_profile("another", derandomize=True, max_examples=3, phases=())
    settings.load_profile("another")
    yield
    settings.load_profile("before")


@pytest.mark.usefixtures("constants", "another_profile")
def test_two_processes_draw_the_same_cases_of_one_seed() -> None:
    bare = subprocess.run(
        [sys.executable, "-c", NOTHING_LOADED],
        cwd=ROOT,
        env={**os.environ, "PYTHONHASHSEED": "3"},
        capture_output=True,
        text=True,
        check=True,
        timeout=300,
    )
    here = [case.id for case in islice(Stream(NUMBER, DEFAULT_DTYPES), NUM_CASES)]
    assert len(set(here)) == NUM_CASES
    assert here == bare.stdout.split()


def searched_ids(cases: int = 8) -> list[str]:
    """The ids of the cases that a search of `diff` judges, in order."""
    case_ids: list[str] = []
    plan = Plan(cases=cases, seed=NUMBER)
    subject = subject_of(open_planted("cpu-eager", None))
    Search(plan, ALL[:1], Oracle(), subject, lambda verdict: case_ids.append(verdict.case.id), lambda: False).run()
    return case_ids


def test_a_search_judges_the_cases_of_the_stream_of_its_seed() -> None:
    assert searched_ids() == [case.id for case in islice(Stream(NUMBER, DEFAULT_DTYPES), 8)]


def machine_played() -> None:
    subject = subject_of(open_planted("cpu-eager", None))
    assert play(subject, Oracle(), SessionStats(), "paged", sessions=2, actions=6) is None


DRAWING: dict[str, Callable[[], object]] = {
    "diff": searched_ids,
    "bench": lambda: throughput("cpu-eager", 2, 0),
    "session machine": machine_played,
}


@pytest.mark.parametrize("drawing", DRAWING.values(), ids=list(DRAWING))
def test_nothing_of_ours_draws_from_the_constants_of_loaded_modules(
    drawing: Callable[[], object], monkeypatch: pytest.MonkeyPatch
) -> None:
    providers = pytest.importorskip("hypothesis.internal.conjecture.providers")
    events: list[str] = []
    collect = providers._get_local_constants

    def note_collection() -> object:
        events.append("constants")
        return collect()

    monkeypatch.setattr(providers, "_get_local_constants", note_collection)
    drawing()
    assert not events
    seed(0)(drawing_settings(100)(given(st.integers())(lambda _: None)))()
    assert events, "this version of Hypothesis collects constants elsewhere: mend properties/strategies/settings.py"


def test_the_constants_are_back_for_the_tests_of_others() -> None:
    providers = pytest.importorskip("hypothesis.internal.conjecture.providers")
    before = (providers._get_local_constants, providers.CONSTANTS_CACHE)

    def fails(_: int) -> None:
        assert providers._get_local_constants is not before[0]
        raise KeyError

    with pytest.raises(KeyError):
        explore(0, 3, st.integers(), fails)
    with without_local_constants(), without_local_constants():
        pass
    assert (providers._get_local_constants, providers.CONSTANTS_CACHE) == before


def test_thresholds_do_not_depend_on_the_last_bits_of_a_law(monkeypatch: pytest.MonkeyPatch) -> None:
    laws = [acceptance.first_law(LLAMA, prompt, temperature) for prompt in PROMPTS for temperature in (0.4, 1.0, 2.5)]

    def nudge(case: Case) -> Trace:
        trace = Oracle()(case)
        scored = trace.steps[0].scored
        assert scored is not None
        step = replace(trace.steps[0], scored=replace(scored, logits=np.nextafter(scored.logits, np.inf)))
        return replace(trace, steps=(step,))

    monkeypatch.setattr(acceptance, "ORACLE", nudge)
    assert laws == [acceptance.first_law(LLAMA, prompt, t) for prompt in PROMPTS for t in (0.4, 1.0, 2.5)]
