"""Engines that batch by themselves: requests in one call are what they are alone; mix-ups are found and shrunk."""

from collections.abc import Callable
from dataclasses import replace
from typing import Any

import pytest

from specverify.adapt import Request, blackbox
from specverify.backends.adapt.batches import batch_of
from specverify.backends.base import Backend
from specverify.campaign.search import Search
from specverify.plan import Plan
from specverify.properties.invariants import ALL
from specverify.properties.tally import Failure
from specverify.properties.verdict.finding import Verdict
from specverify.properties.verdict.invariant import Invariant
from specverify.properties.verdict.judge import judge
from specverify.reference.abilities import Abilities
from specverify.reference.case import Case
from specverify.reference.case_json import case_from_json, case_to_json
from specverify.reference.draft import Ngram, Scripted
from specverify.reference.malformed import Malformed
from specverify.reference.oracle.decoder import Oracle
from specverify.reference.sampling import Sampling, Stops
from specverify.reference.session import Action, Mate, Session
from specverify.reference.tree import RankTree
from specverify.setup.subjects import subject_of
from tests.models import LLAMA
from tests.strangers.batching_engine import MIX_UPS, batching

ADD = tuple(Action("add", (number,)) for number in range(4))
STEP, CANCEL = Action("step", (0,)), Action("cancel", (0,))


def session_of(case: Case, mates: tuple[Mate, ...], actions: tuple[Action, ...]) -> Case:
    return replace(case, session=Session(mates, actions, continuous=True))


ALONE = Case(LLAMA, (3, 1, 4), Scripted(()), sampling=Sampling(1.0, seed=5), stops=Stops(6))
LONG, SHORT = Mate((3, 2, 7, 1), stops=Stops(8)), Mate((5,), stops=Stops(2))
DRAWN = Mate((3, 1, 4), sampling=Sampling(4.0, seed=9), stops=Stops(6, stop_tokens=(4,)))
TOGETHER = session_of(
    ALONE, (LONG, SHORT, DRAWN), (ADD[0], STEP, ADD[1], STEP, STEP, CANCEL, ADD[2], ADD[3])
)  # fmt: skip
"""A request that is cancelled after three steps, and three more that enter meanwhile."""

UNCANCELLED = session_of(ALONE, (LONG, SHORT, DRAWN), ADD)


def verdict_of(case: Case, backend: Callable[[], Backend], invariants: tuple[Invariant, ...] = ALL) -> Verdict:
    return judge(case, invariants, Oracle(), subject_of(backend()))


def failure_of(backend: Callable[[], Backend], cases: int = 60) -> tuple[Failure | None, list[Verdict]]:
    """The first failure of a search on its smallest case, and all verdicts."""
    verdicts: list[Verdict] = []
    plan = Plan("batching", cases=cases, dtypes=("float32",), shrink_s=60.0)
    search = Search(plan, ALL, Oracle(), subject_of(backend()), verdicts.append, lambda: False)
    search.run()
    return search.failure(search_nearest=False), verdicts


def test_a_batch_holds_the_requests_that_enter_in_their_order() -> None:
    actions = (ADD[2], STEP, STEP, Action("step", (1,)), CANCEL, ADD[0], ADD[0], Action("cancel", (2,)), STEP)
    batch = batch_of(session_of(ALONE, (LONG, SHORT, DRAWN), actions))
    assert batch.numbers == (2, 0)
    assert batch.actions == (("add", 0), ("step", 3), ("add", 1), ("cancel", 0), ("step", 1))
    assert batch.cancelled == {0}
    assert batch.requests == [Request([5], 2), Request([3, 1, 4], 6, 1.0, seed=5)]


@pytest.mark.parametrize("case", [TOGETHER, UNCANCELLED])
def test_each_request_is_judged_as_it_is_alone(case: Case) -> None:
    verdict = verdict_of(case, batching())
    assert verdict.agreed
    assert verdict.unsupported is None
    for name in ("greedy-match", "own-seed", "takes-part", "completes", "stops", "distribution"):
        assert verdict.outcomes[f"lossless.{name}"] == "checked"
    assert case_from_json(case_to_json(case)) == case


WHERE_IT_SHOWS = {
    "coins-in-turn": session_of(ALONE, (DRAWN,), (ADD[0], STEP, ADD[1])),
    "stops-of-another": session_of(replace(ALONE, stops=Stops(6, stop_tokens=tuple(range(17)))), (LONG,), ADD[:2]),
    "cancels-another": session_of(ALONE, (LONG, SHORT), (ADD[0], ADD[1], STEP, Action("cancel", (1,)))),
}
"""Cases for mix-ups that TOGETHER does not show."""


@pytest.mark.parametrize("mix_up", MIX_UPS)
def test_a_mix_up_differs(mix_up: str) -> None:
    names = ("greedy-match", "own-seed", "takes-part", "stops", "completes")
    invariants = tuple(invariant for invariant in ALL if invariant.name.removeprefix("lossless.") in names)
    case = WHERE_IT_SHOWS.get(mix_up, TOGETHER)
    assert verdict_of(case, batching(), invariants).agreed
    assert verdict_of(case, batching(mix_up), invariants).first is not None


@pytest.mark.parametrize("mix_up", [pytest.param(mix_up, marks=pytest.mark.slow) for mix_up in MIX_UPS])
def test_a_mix_up_is_found_and_shrunk_to_two_requests(mix_up: str) -> None:
    failure, _ = failure_of(batching(mix_up))
    assert failure is not None
    session = failure.verdict.case.session
    assert session is not None
    assert len(session.mates) == 1


@pytest.mark.slow
def test_a_shared_seed_is_found_without_a_promise_too() -> None:
    failure, _ = failure_of(batching("seed-shared", own_seed=False), cases=200)
    assert failure is not None
    assert failure.finding.invariant == "lossless.distribution"


@pytest.mark.slow
def test_nothing_is_found_where_nothing_is_mixed_up() -> None:
    failure, verdicts = failure_of(batching(), cases=300)
    assert failure is None
    assert len(verdicts) == 300
    sessions = [verdict.case.session for verdict in verdicts if verdict.case.session is not None]
    kinds = {action.kind for session in sessions for action in session.actions}
    assert len(sessions) > 60
    assert kinds == {"add", "step", "cancel"}


def test_a_request_that_breaks_its_batch_is_found_alone() -> None:
    breaking = batching(crash_at=5)
    verdict = verdict_of(TOGETHER, breaking)
    assert verdict.first is not None
    plan = Plan("batching", dtypes=("float32",), shrink_s=20.0)
    search = Search(plan, ALL, Oracle(), subject_of(breaking()), lambda _: None, lambda: False)
    search.run_given([(TOGETHER, ALL)])
    assert search.smallest is not None
    assert search.smallest.alone().prompt == (5,)
    assert search.smallest.session is None or not search.smallest.session.mates


def test_a_wrong_number_of_answers_is_told() -> None:
    def generate(prompt_ids: Any, max_new_tokens: Any) -> Any: ...

    few = verdict_of(UNCANCELLED, blackbox(generate, generate_many=lambda requests: [[1]], max_temperature=1.0))
    assert few.unsupported is not None, "a function without a temperature samples nothing"

    def sampled(prompt_ids: Any, max_new_tokens: Any, temperature: Any, stops: Any) -> Any: ...

    answers = blackbox(sampled, generate_many=lambda requests: [])
    first = verdict_of(UNCANCELLED, answers).first
    assert first is not None
    assert first.invariant == "lossless.completes"
    assert "generate_many returned 0 answers, expected a list of 4" in str(first.observed)


def test_what_a_signature_declares() -> None:
    def generate(prompt_ids: Any, max_new_tokens: Any) -> Any: ...

    plain = blackbox(generate)().declaration
    assert (plain.sessions, plain.continuous) == (False, False)
    assert plain.outside(session_of(replace(ALONE, sampling=Sampling()), (SHORT,), ADD[:2])) == (
        "generate declares no sessions"
    )
    together = blackbox(generate, generate_many=lambda requests: [])().declaration
    assert (together.sessions, together.continuous, together.actions) == (True, True, ("add",))
    staged = blackbox(generate, generate_many=lambda requests, actions: [], most_requests=3)().declaration
    assert (staged.actions, staged.most_requests) == (("add", "step", "cancel"), 3)
    greedy = replace(ALONE, sampling=Sampling())
    named = replace(greedy, session=Session((SHORT,), ADD[:2]))
    assert staged.outside(named) == "generate declares no session whose steps name their batch"
    abilities = Abilities(dtypes=("float32",), sessions=True)
    assert abilities.outside(session_of(greedy, (SHORT,), ADD[:2])) == "continuous batching"
    with pytest.raises(TypeError, match=r"generate_many=<lambda> needs prompts, which is none of requests, actions"):
        blackbox(generate, generate_many=lambda requests, prompts: [])
    with pytest.raises(TypeError, match="takes no requests"):
        blackbox(generate, generate_many=lambda actions: [])


def test_actions_and_drafts_of_such_a_session() -> None:
    with pytest.raises(Malformed, match="evict is no action of an engine that batches by itself"):
        Session((), (Action("evict", (0,)),), continuous=True)
    with pytest.raises(Malformed, match="share one"):
        session_of(ALONE, (replace(SHORT, draft=Ngram(RankTree((0, 0), (0, 0)), 2)),), ADD[:2])
