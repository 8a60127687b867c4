"""Ranks as processes that talk by gloo: in step over thousands of steps, and named when one dies, lags or differs."""

import os
import signal
import time
from collections.abc import Iterator
from dataclasses import replace

import numpy as np
import pytest

from specverify.backends import faults
from specverify.backends.base import Unavailable
from specverify.backends.compositions import open_engine
from specverify.backends.engine.composition import SEAMS
from specverify.backends.engine.ranks.crew import Crew
from specverify.backends.engine.ranks.member import Facts
from specverify.backends.ranked import RankedBackend
from specverify.properties.invariants import ALL
from specverify.properties.strategies.models import GALLERY, small_draft
from specverify.properties.verdict.judge import judge
from specverify.reference.architecture import Seeded
from specverify.reference.case import Case
from specverify.reference.draft import LanguageModel, Scripted
from specverify.reference.oracle.decoder import Oracle
from specverify.reference.sampling import Sampling, Stops
from specverify.reference.tree import RankTree
from specverify.setup.subjects import subject_of
from tests.meta.engine.test_ranks import spread_over

MODELS = [arch for arch in GALLERY if arch.family in ("llama", "pangu", "qwen3") and arch.heads % 4 == 0]
STEPS = 2000
LAWS = [
    invariant
    for invariant in ALL
    if invariant.name in ("acceptance.law-exact", "acceptance.law-joint", "lossless.ranks-agree")
]


@pytest.fixture
def ranked() -> Iterator[RankedBackend]:
    backend = open_engine("cpu-ranks")
    assert isinstance(backend, RankedBackend)
    yield backend
    backend.close()


def draw_case(number: int, ranks: int) -> Case:
    """A case of some forty steps: greedy for even numbers, sampled for odd ones."""
    rng = np.random.default_rng(number)
    model = Seeded(MODELS[number % len(MODELS)], number % 2)
    shape = RankTree((0, 0, 0, 1), (0, 0, 1, 0))
    draft = LanguageModel(small_draft(model.vocab_size, 0), shape) if number % 3 else Scripted()
    prompt = tuple(int(token) for token in rng.integers(0, model.vocab_size, 4))
    sampling = Sampling(float(number % 2), seed=number)
    return Case(model, prompt, draft, sampling=sampling, stops=Stops(60), ranks=ranks)


@pytest.mark.slow
@pytest.mark.parametrize("ranks", [2, 4])
def test_processes_stay_in_step(ranked: RankedBackend, ranks: int) -> None:
    steps, number = 0, 0
    while steps < STEPS:
        trace = ranked.run(draw_case(number, ranks))
        assert trace.ranks is not None
        assert len(trace.ranks) == ranks
        assert all(rank == trace.ranks[0] for rank in trace.ranks)
        steps, number = steps + len(trace.steps), number + 1


@pytest.mark.slow
@pytest.mark.parametrize("ranks", [2, 4])
@pytest.mark.parametrize("number", [1, 5, 7])
def test_the_law_of_processes_is_exact_by_coins(ranked: RankedBackend, ranks: int, number: int) -> None:
    case = replace(draw_case(number, ranks), stops=Stops(4), dtype="float64")
    verdict = judge(case, LAWS, Oracle(), subject_of(ranked))
    assert not verdict.findings
    assert {verdict.outcomes[law.name] for law in LAWS} == {"checked"}


@pytest.mark.slow
@pytest.mark.parametrize("ranks", [2, 4])
def test_processes_and_threads_make_the_same_run(ranked: RankedBackend, ranks: int) -> None:
    case = replace(draw_case(1, ranks), stops=Stops(8), dtype="float64")
    process_trace, thread_trace = ranked.run(case), open_engine("cpu-eager").run(case)
    assert process_trace.output == thread_trace.output
    assert process_trace.ranks == thread_trace.ranks


@pytest.mark.slow
@pytest.mark.parametrize("ranks", [2, 4])
@pytest.mark.parametrize("temperature", [0.0, 1.0])
def test_requests_spread_over_processes_make_the_run_of_threads(
    ranked: RankedBackend, ranks: int, temperature: float
) -> None:
    """Idle ranks step along until the last request is over."""
    for case in (spread_over(ranks, temperature), replace(draw_case(1, ranks), spread=True)):
        process_trace, thread_trace = ranked.run(case), open_engine("cpu-eager").run(case)
        assert process_trace.ranks is not None
        assert len({run.calls for run in process_trace.ranks}) == 1
        assert process_trace.ranks == thread_trace.ranks
        assert process_trace.output == thread_trace.output
        if process_trace.shared is not None:
            assert thread_trace.shared is not None
            assert [request and request.output for request in process_trace.shared.requests] == [
                request and request.output for request in thread_trace.shared.requests
            ]


@pytest.mark.slow
@pytest.mark.parametrize("ranks", [2, 4])
def test_an_idle_process_that_skips_a_step_is_told(ranked: RankedBackend, ranks: int) -> None:
    faults.plant(ranked, faults.fault_named("rank-idle-skips-step"))
    agree = [invariant for invariant in ALL if invariant.name == "lossless.ranks-agree"]
    verdict = judge(spread_over(ranks), agree, Oracle(), subject_of(ranked))
    assert verdict.findings or verdict.outcomes["lossless.completes"] == "failed"


def crew_of(size: int, patience: float = 60.0) -> Crew:
    return Crew(size, SEAMS, "cpu-ranks", patience)


@pytest.mark.slow
def test_a_rank_that_dies_is_named() -> None:
    crew = crew_of(2)
    os.kill(crew.processes[1], signal.SIGKILL)
    with pytest.raises(Unavailable, match=r"^cpu-ranks: rank 1 died: its process was killed by signal 9$"):
        crew.ask("run", draw_case(0, 2))


@pytest.mark.slow
def test_a_rank_that_lags_is_named() -> None:
    crew = crew_of(2, 3.0)
    crew.ask("run", draw_case(0, 2))
    os.kill(crew.processes[1], signal.SIGSTOP)
    began = time.monotonic()
    with pytest.raises(Unavailable, match=r"^cpu-ranks: rank 1 lags: .* nothing has moved for 3 seconds$"):
        crew.ask("run", draw_case(0, 2))
    assert time.monotonic() - began < 30


@pytest.mark.slow
def test_ranks_of_different_versions_or_flags_are_refused() -> None:
    def facts(rank: int) -> Facts:
        return {"torch": f"2.{13 - rank}", "PANGU_FORCE_EAGER_ATTN": "1"}

    with pytest.raises(Unavailable, match=r"^cpu-ranks: rank 1 has torch 2\.12, and rank 0 has 2\.13$"):
        Crew(2, SEAMS, "cpu-ranks", facts=facts)
