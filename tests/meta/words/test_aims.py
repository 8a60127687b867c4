"""A round that is made for a pair of labels keeps what both need, switches off what competes, and meets it."""

from dataclasses import replace

import pytest

from specverify.backends.registry import open_backend
from specverify.campaign.aim import AIMED, FURTHER_KINDS, LIKELY, _missing_pair, aim, never_meet, swarm_of_round
from specverify.campaign.novelty import Novelty
from specverify.campaign.search import ROUND
from specverify.properties.strategies import cases
from specverify.properties.strategies.settings import explore
from specverify.properties.strategies.swarm import (
    EVERYTHING,
    FAVOURED,
    GRAMMARS,
    IMAGES,
    LARGE_TREES,
    MANY_REQUESTS,
    SESSIONS,
    TIGHT_POOLS,
    Dice,
    Swarm,
    draw_swarm,
)
from specverify.properties.target_traits import has_recurrent_state
from specverify.properties.verdict.coverage.declared import is_declared
from specverify.properties.verdict.coverage.events import EVENTS
from specverify.properties.verdict.coverage.pairs import (
    LABELS,
    Label,
    Pair,
    bits_of,
    candidate_pairs,
    values_of_requests,
)
from specverify.reference.case import Case
from specverify.reference.session import ACTIONS, OVERLAPPED
from tests.meta.words.test_within import BARE, WIDER
from tests.tiers import first

EVERY_PAIR = sum(pair.bit for pair in candidate_pairs())
PLACES = {str(label): place for place, label in enumerate(LABELS)}


def pair_of(first_name: str, second_name: str) -> Pair:
    places = sorted((PLACES[first_name], PLACES[second_name]))
    return Pair(LABELS[places[0]], LABELS[places[1]])


def aimed(first_name: str, second_name: str) -> Swarm:
    return aim(pair_of(first_name, second_name), None, Swarm(), Dice(0))


def drawn(swarm: Swarm, rounds: int = 6) -> list[Case]:
    cases_of_swarm: list[Case] = []
    for number in range(rounds):
        explore(number, ROUND, cases(("float64",), swarm=swarm), lambda case: cases_of_swarm.append(case))
    return cases_of_swarm


def meetings(pair: Pair, swarm: Swarm) -> int:
    """The number of drawn cases that have a request with the pair."""
    return sum(any(bits_of(places) & pair.bit for places in values_of_requests(case)) for case in drawn(swarm))


def with_requests(number: int, met: int = 0) -> Novelty:
    """The record behind cases of which so many requests had each value; `met` are their pairs."""
    novelty = Novelty()
    novelty.met = met
    novelty.requests.update({place: number for place in PLACES.values()})
    return novelty


def test_a_round_with_every_pair_met_has_its_swarm() -> None:
    novelty = with_requests(1_000, EVERY_PAIR)
    for number in range(60):
        assert swarm_of_round(number, None, False, novelty) == draw_swarm(number, None)


def test_pairs_with_an_event_are_missing_while_few_requests_had_the_value() -> None:
    novelty = with_requests(100, EVERY_PAIR)
    kinds = set()
    for number in range(60):
        pair = _missing_pair(Dice(number), EVERYTHING, novelty)
        if pair is not None:
            kinds.add(pair.second.value)
    assert "drafts again behind accepted and bare steps" in kinds
    assert "accepts one" not in kinds
    assert all(event.interval > 100 / LIKELY for event in EVENTS if event.name in kinds)


def test_a_slow_engine_gets_no_aims() -> None:
    for number in range(60):
        assert swarm_of_round(number, None, True, Novelty()) == draw_swarm(number, None, slow=True)


def test_one_round_of_so_many_is_aimed_and_the_number_decides() -> None:
    within = open_backend("cpu-eager").declaration
    swarms = [swarm_of_round(number, within, False, Novelty()) for number in range(200)]
    changed = sum(swarm != draw_swarm(number, within) for number, swarm in enumerate(swarms))
    assert 200 / AIMED / 2 < changed < 200 / AIMED * 3 / 2
    assert swarms == [swarm_of_round(number, within, False, Novelty()) for number in range(200)]


def test_an_aim_leaves_both_labels_possible() -> None:
    dice = Dice(3)
    pairs = [dice.member(candidate_pairs()) for _ in range(400)]
    possible = [pair for pair in pairs if not never_meet(pair.first, pair.second)]
    assert len(possible) > 100
    for number, pair in enumerate(possible):
        swarm = aim(pair, None, draw_swarm(number, None), dice)
        assert swarm.within is not None
        assert is_declared(pair.first, swarm.within), str(pair)
        assert is_declared(pair.second, swarm.within), str(pair)
        assert swarm.within.greedy or swarm.within.max_temperature, str(pair)


def test_a_swarm_keeps_the_traits_of_targets_that_both_labels_can_meet() -> None:
    """A target with experts runs on no ranks: an engine on several alone would have no case in such a round."""
    pair = pair_of("tree dispatched tree", "draft's ranks draft shared out among ranks")
    swarms = [aim(pair, None, Swarm(traits=traits), Dice(0)) for traits in (("experts",), ("experts", "window"))]
    assert [swarm.traits for swarm in swarms] == [(), ("window",)]
    within = open_backend("cpu-ranks-by-requests").declaration
    shared_out: list[Case] = []
    swarm = aim(pair, within, Swarm(traits=("experts",)), Dice(0))
    for number in range(4):
        explore(number, ROUND, cases(("float64",), within=within, swarm=swarm), lambda case: shared_out.append(case))
    assert any(case.draft_ranks > 1 for case in shared_out)


def test_what_stands_in_the_place_of_a_label_is_off() -> None:
    swarm = aimed("layout paged", "draft's traits learns from other requests")
    assert swarm.within is not None
    assert swarm.within.layouts == ("paged",)
    assert not swarm.within.max_temperature
    assert set(swarm.within.drafts) == {"trie"}
    assert swarm.favours == (SESSIONS,)


def test_an_action_brings_those_that_it_needs() -> None:
    swarm = aimed("layout prefix", "event evicted and restored, then steps")
    assert swarm.within is not None
    assert swarm.within.layouts == ("prefix",)
    assert set(swarm.within.actions) >= {"add", "step", "evict", "restore", *OVERLAPPED}


def test_an_aim_keeps_few_further_actions_and_each_in_some_round() -> None:
    """A leftover of one event shows at the next event of another kind."""
    pair = pair_of("layout prefix", "event handed over, then steps")
    needed = {"add", "step", "hand-over", *OVERLAPPED}
    further_actions = []
    for number in range(60):
        within = aim(pair, None, Swarm(), Dice(number)).within
        assert within is not None
        further_actions.append(set(within.actions) - needed)
    assert set().union(*further_actions) == set(ACTIONS) - needed
    assert max(map(len, further_actions)) <= 2 * FURTHER_KINDS
    assert not min(further_actions, key=len)


def test_steps_are_launched_beside_the_action_of_an_aim_where_they_can_be() -> None:
    """A step that is served ahead stands in the place of no other action."""
    shared_out = aimed("ranks requests shared out among ranks", "event evicted and restored, then steps")
    assert shared_out.within is not None
    assert set(shared_out.within.actions) >= {"add", "step", "evict", "restore"}
    assert not set(shared_out.within.actions) & set(OVERLAPPED)


@pytest.mark.parametrize(
    ("label", "event"),
    [("draft's traits draft with a recurrent state", name) for name in ("handed over, then steps", "twin of a fork")],
)
def test_an_aim_at_recurrent_drafts_has_them_on_targets_of_any_kind(label: str, event: str) -> None:
    pair = pair_of(label, f"event {event}")
    swarms = [aim(pair, None, Swarm(), Dice(number)) for number in range(8)]
    assert {swarm.draft_traits for swarm in swarms} == {("recurrent state",)}
    assert {swarm.traits for swarm in swarms} == {(), ("recurrent state",)}
    assert all(swarm.within is not None and swarm.within.drafts == ("model",) for swarm in swarms)
    on_any = next(swarm for swarm in swarms if not swarm.traits)
    dense = [case for case in drawn(on_any) if not has_recurrent_state(case.model)]
    assert any(has_recurrent_state(case.draft.model) for case in dense)


def test_a_target_that_cannot_be_shared_out_is_no_part_of_an_aim_at_ranks() -> None:
    pair = pair_of("draft's traits draft with a recurrent state", "ranks 2 ranks")
    assert {aim(pair, None, Swarm(), Dice(number)).traits for number in range(8)} == {()}


def test_the_settings_of_both_tiers_are_drawn_together() -> None:
    swarm = aimed("draft trie", "event brought back from the second tier")
    assert swarm.within is not None
    assert swarm.within.layout_settings == ("first_tier", "second_tier")
    assert set(swarm.within.actions) >= {"add", "step", "cancel", "evict", "restore", *OVERLAPPED}
    assert SESSIONS in swarm.favours


def test_requests_that_wait_for_room_have_a_tight_pool_and_much_company() -> None:
    swarm = aimed("target experts", "event waits for room, then steps")
    assert swarm.within is not None
    assert set(swarm.within.actions) >= {"add", "step", "cancel", "evict", "restore", *OVERLAPPED}
    assert {SESSIONS, TIGHT_POOLS} <= {*swarm.favours}
    assert swarm.sizes == (MANY_REQUESTS,)
    roomy, tight = (
        [room for room in map(room_of, drawn(Swarm(favours=favours), 12)) if room]
        for favours in ((SESSIONS,), (SESSIONS, TIGHT_POOLS))
    )
    assert sum(tight) / len(tight) < sum(roomy) / len(roomy)


def room_of(case: Case) -> float:
    """The share of what all requests of a session need together that its pool has; 0 for a case without such a pool."""
    session, layout = case.session, case.layout
    if session is None or not layout.pages:
        return 0.0
    requests = [case.alone(number) for number in range(1 + len(session.mates))]
    return len(layout.pages) / sum(layout.pages_for(request.longest) for request in requests)


def test_sizes_and_features_come_with_their_labels() -> None:
    assert aimed("target images", "tree over 64 nodes").sizes == (LARGE_TREES,)
    assert aimed("target images", "tree over 64 nodes").favours == (IMAGES,)
    assert SESSIONS in aimed("draft ngram", "layout's traits recurrent states in slots").favours
    assert aimed("grammar regex", "event closes its grammar").favours == (GRAMMARS,)
    short = replace(EVERYTHING, longest=64)
    assert not aim(pair_of("tree over 64 nodes", "draft model"), short, Swarm(), Dice(0)).sizes


def test_a_favoured_feature_is_never_rarer_than_elsewhere() -> None:
    swarm = Swarm(favours=(IMAGES,))
    assert swarm.interval(IMAGES, 20) == FAVOURED
    assert swarm.interval(IMAGES, 1) == 1
    assert swarm.interval(GRAMMARS, 20) == 20


RARE = (
    "draft medusa × rule block",
    "draft ngram × tree over 64 nodes",
    "layout paged × ranks requests shared out among ranks",
    "target adapter × layout scratch",
    "target indexed columns × rule typical",
    "target three axes × head size up to 64 per head",
    "draft's traits sees the images × head size up to 16 per head",
    "target chunk × prompt over 512 prompt tokens",
    "layout's traits second tier × draft medusa",
    "layout's traits first tier × target experts",
)


@pytest.mark.parametrize("name", first(RARE, 2))
def test_a_rare_pair_is_met_in_a_round_that_is_made_for_it(name: str) -> None:
    first_name, second_name = name.split(" × ")
    pair = pair_of(first_name, second_name)
    assert meetings(pair, aimed(first_name, second_name)) > meetings(pair, Swarm())


@pytest.mark.parametrize("name", first(WIDER, 6))
def test_an_aim_stays_within_a_narrow_engine(name: str) -> None:
    within = replace(BARE, **WIDER[name][0])
    drawn_cases: list[Case] = []
    for number in range(24):
        swarm = swarm_of_round(number, within, False, Novelty())
        explore(number, 2, cases(("float32",), within=within, swarm=swarm), lambda case: drawn_cases.append(case))
    assert len(drawn_cases) > 24
    assert all(within.outside(case) is None for case in drawn_cases)


def test_a_label_that_none_can_have_is_never_aimed_at() -> None:
    assert never_meet(Label("sampling", "greedy"), Label("rule", "block"))
