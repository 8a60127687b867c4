"""Heads and working types of 16 bits on targets with a recurrent state: every invariant agrees."""

from itertools import product

import pytest
from hypothesis import find, settings

from specverify.backends.engine.backend import EngineBackend
from specverify.properties.invariants import ALL
from specverify.properties.strategies.acceptance import continuation
from specverify.properties.strategies.draft.head import LAYERS
from specverify.properties.strategies.models import GALLERY, RECURRENT
from specverify.properties.strategies.serving.shared_pages import PREFIX, takes_next_turn, with_next_turn
from specverify.properties.strategies.sessions import with_session
from specverify.properties.verdict.judge import judge
from specverify.reference.architecture import Seeded
from specverify.reference.case import Case
from specverify.reference.draft import Draft, LanguageModel
from specverify.reference.draft.eagle1 import Eagle1
from specverify.reference.draft.eagle3 import Eagle3
from specverify.reference.draft.hidden import HiddenStates
from specverify.reference.draft.medusa import Medusa
from specverify.reference.draft.mtp import Mtp
from specverify.reference.oracle.decoder import Oracle
from specverify.reference.sampling import Stops
from specverify.reference.session import Action
from specverify.reference.tree import RankTree
from specverify.setup.subjects import subject_of
from tests.tiers import each, first

TREE = RankTree((0, 0, 0, 1, 1, 2), (0, 0, 1, 0, 1, 0))
LAST = HiddenStates(place="normed", shift=1)
HEADS: dict[str, Draft] = {
    "eagle1": Eagle1(TREE, LAST, LAYERS[0], seed=1),
    "eagle3": Eagle3(TREE, HiddenStates((-1, 0), shift=1), LAYERS[1], (2, 3, 4)),
    "medusa": Medusa(TREE, HiddenStates(place="normed"), 3),
    "mtp": Mtp(TREE, LAST, LAYERS[0], 2),
}
ORACLE = Oracle()
SUBJECT = subject_of(EngineBackend("cpu-eager", "cpu"))
HYBRID_PLACES = RECURRENT[::2]
HYBRIDS = pytest.mark.parametrize("index", HYBRID_PLACES, ids=lambda index: GALLERY[index].family)


def agree(case: Case) -> None:
    """The states behind every step were compared, and nothing else differs."""
    verdict = judge(case, ALL, ORACLE, SUBJECT)
    assert not verdict.findings
    assert "cache.recurrent-equivalence" in verdict.compared


@pytest.mark.parametrize(
    ("head", "index"),
    each(product(HEADS, HYBRID_PLACES), 2),
    ids=[f"{head}-{GALLERY[index].family}" for head, index in product(HEADS, HYBRID_PLACES)],
)
def test_a_head_reads_the_states_of_a_hybrid(head: str, index: int) -> None:
    agree(Case(Seeded(GALLERY[index], 3), (1, 2, 3, 4, 1), HEADS[head], stops=Stops(8)))


@HYBRIDS
@pytest.mark.parametrize("dtype", first(["bfloat16", "float16"], 1))
def test_a_hybrid_in_sixteen_bits(dtype: str, index: int) -> None:
    target = Seeded(GALLERY[index], 3)
    agree(Case(target, (1, 2, 3, 4, 1), LanguageModel(target, TREE), stops=Stops(8), dtype=dtype))


@pytest.mark.slow
def test_the_next_turn_finds_the_pages_of_the_turn_before() -> None:
    """A hybrid's session with a next turn is drawn; its prompt goes on behind the first request's text."""
    case = Case(Seeded(GALLERY[RECURRENT[0]], 3), (1, 2, 3, 4, 1), stops=Stops(8))
    assert isinstance(case.model, Seeded)
    expected_prompt = (*case.prompt, *continuation(case.model, case.prompt), case.prompt[0])
    sessions = with_session(case, case, PREFIX).filter(lambda drawn_case: takes_next_turn(drawn_case, None))
    example = find(
        sessions.flatmap(with_next_turn),
        lambda drawn_case: drawn_case.session is not None and drawn_case.session.mates[0].prompt == expected_prompt,
        settings=settings(derandomize=True, database=None),
    )
    assert example.session is not None
    position = example.session.actions.index(Action("cancel", (0,)))
    assert example.session.actions[position + 1 : position + 3] == (Action("add", (1,)), Action("step", (1,)))
    agree(example)
