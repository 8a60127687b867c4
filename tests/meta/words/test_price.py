"""The price of a case follows from the case alone, and dear cases are judged more seldom: in draws and by variants."""

from dataclasses import replace

import pytest

from specverify.campaign.novelty import Novelty
from specverify.properties.invariants import ALL
from specverify.properties.price import USUAL_MS, price_ms, times_usual
from specverify.properties.verdict.invariant import taking_turns
from specverify.properties.verdict.subject import FULL, Pace, Refusal, Subject
from specverify.reference.case import Case
from specverify.reference.draft.language_model import LanguageModel
from specverify.reference.draft.ngram import Ngram
from specverify.reference.sampling import Stops
from specverify.reference.session import Action, Mate, Session
from specverify.reference.trace import Stage
from specverify.reference.tree import RankTree
from tests.models import LARGE_LLAMA, OTHER_LLAMA, TINY_LLAMA

USUAL = Case(LARGE_LLAMA, (1, 2, 3), stops=Stops(8))
DRAFTED = replace(USUAL, draft=LanguageModel(LARGE_LLAMA, RankTree((0, 0), (0, 0))))
LONG = replace(USUAL, prompt=(1, 2, 3) * 300)
TWO = Session((Mate((4, 5) * 50),), (Action("add", (0,)), Action("add", (1,)), *(Action("step", (0, 1)),) * 30))


@pytest.mark.parametrize(
    "dearer",
    [
        LONG,
        DRAFTED,
        replace(USUAL, stops=Stops(64)),
        replace(USUAL, session=TWO),
        replace(DRAFTED, ranks=2),
        replace(USUAL, model=LARGE_LLAMA, ranks=2),
    ],
    ids=["prompt", "draft", "new tokens", "session", "ranks of a draft", "ranks"],
)
def test_a_case_with_more_to_run_is_dearer(dearer: Case) -> None:
    assert price_ms(replace(USUAL, model=TINY_LLAMA)) <= price_ms(USUAL) < price_ms(dearer)


def test_a_limit_of_steps_counts_and_weights_do_not() -> None:
    assert price_ms(replace(USUAL, steps=2)) < price_ms(replace(USUAL, steps=8)) == price_ms(USUAL)
    assert price_ms(replace(USUAL, model=OTHER_LLAMA)) == price_ms(replace(USUAL, model=replace(OTHER_LLAMA, seed=9)))


def test_a_usual_case_has_its_turns_and_a_dear_one_has_them_as_seldom_as_it_is_dear() -> None:
    factor = times_usual(LONG)
    assert times_usual(USUAL) == 1
    assert factor >= 4
    assert factor == pytest.approx(price_ms(LONG) / USUAL_MS, abs=0.5)
    variants = [0, 0]
    for token in range(400):
        for place, case in enumerate((USUAL, LONG)):
            turns = taking_turns(replace(case, prompt=(token % 90, *case.prompt[1:-1], token // 90)), ALL)
            assert {invariant.name for invariant in ALL if invariant.every == 1} <= {turn.name for turn in turns}
            variants[place] += sum(turn.every > 1 for turn in turns)
    assert 0.8 * factor < variants[0] / variants[1] < 1.25 * factor


AGAIN = {invariant.name for invariant in ALL if invariant.every == 1 and invariant.every_again > 1}


def turns_of(cases: list[Case], pace: Pace) -> list[set[str]]:
    return [AGAIN & {turn.name for turn in taking_turns(case, ALL, pace)} for case in cases]


def test_cases_are_run_again_in_every_second_session_and_where_all_stages_are_shown() -> None:
    assert "draft.rollback" in AGAIN
    short = replace(TWO, mates=(Mate((4,)),), actions=TWO.actions[:3])
    sessions = [replace(USUAL, prompt=(token, 2, 3), session=short) for token in range(90)]
    single = [replace(case, session=None) for case in sessions]
    assert {times_usual(case) for case in (*sessions, *single)} == {1}
    for cases, pace, expected in (
        (single, FULL, 90),
        (single, Pace(4), 90),
        (sessions, FULL, 45),
        (single, Pace(shows_all=True), 45),
        (single, Pace(2, shows_all=True), 22),
        (sessions, Pace(2, shows_all=True), 22),
    ):
        turns = turns_of(cases, pace)
        assert {frozenset(names) for names in turns} <= {frozenset(), frozenset(AGAIN)}, "they share their runs"
        assert 0.6 * expected <= sum(map(bool, turns)) <= 1.4 * expected
    assert all({turn.name for turn in taking_turns(case, ALL, always=frozenset(AGAIN))} >= AGAIN for case in sessions)


def test_a_backend_that_shows_every_stage_is_asked_for_half_the_variants() -> None:
    subject = Subject("all", lambda case: Refusal("it is not there"), frozenset(Stage))
    assert subject.pace == Pace(2, shows_all=True)
    subject.variant_interval = 4
    assert subject.pace == Pace(4, shows_all=True)
    assert Subject("some", lambda case: Refusal("it is not there"), frozenset({Stage.EMITTED})).pace == FULL


@pytest.mark.parametrize(("new_tokens", "is_judged"), [(8, True), (64, False)])
def test_of_cases_that_add_as_many_pairs_the_dear_one_is_left_out(new_tokens: int, is_judged: bool) -> None:
    novelty = Novelty()
    assert novelty.takes(replace(DRAFTED, stops=Stops(100)))
    # No label tells how many tokens a request may make: both add the pairs of a draft without weights.
    assert novelty.takes(replace(USUAL, draft=Ngram(RankTree((0, 0), (0, 0))), stops=Stops(new_tokens))) is is_judged
