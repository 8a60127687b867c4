"""Recurrent states in slots of a pool: the bits of states in tensors of their own, and slots that are owned once."""

from dataclasses import replace

import numpy as np
import pytest
import torch

from specverify.backends.compositions import open_cpu, open_engine
from specverify.backends.engine.kv.recurrent import RecurrentStates
from specverify.backends.engine.kv.state_slots import Checkpoints, RecurrentPool, StateSlots
from specverify.backends.faults.cache import recurrent_slots
from specverify.backends.faults.fault import Fault, faults_in
from specverify.properties.invariants import ALL
from specverify.properties.strategies.models import GALLERY, RECURRENT
from specverify.properties.verdict.judge import judge
from specverify.reference.abilities import Abilities
from specverify.reference.architecture import Seeded
from specverify.reference.case import Case
from specverify.reference.draft import LanguageModel
from specverify.reference.layout import KINDS, KvLayout
from specverify.reference.malformed import Malformed
from specverify.reference.oracle.decoder import Oracle
from specverify.reference.sampling import Stops
from specverify.reference.session import Action, Mate, Session
from specverify.reference.tree import RankTree
from specverify.reports import bundle
from specverify.setup.subjects import open_planted, subject_of
from tests.cases import CORPUS

TREE = RankTree((0, 0, 0, 1, 1, 2), (0, 0, 1, 0, 1, 0))
ACTIONS = (
    Action("add", (0,)),
    Action("add", (1,)),
    Action("step", (0, 1)),
    Action("fork", (0, 2)),
    Action("step", (2, 0, 1)),
    Action("evict", (0,)),
    Action("step", (1, 2)),
    Action("restore", (0,)),
    Action("preempt", (0,)),
    Action("step", (0, 1, 2)),
    Action("cancel", (1,)),
    Action("step", (2, 0)),
    Action("hand-over", (0,)),
    Action("step", (0,)),
)
ORACLE = Oracle()
HYBRIDS = pytest.mark.parametrize("index", RECURRENT[::2], ids=lambda index: GALLERY[index].family)


def session_on(index: int, layout: KvLayout) -> Case:
    """Three requests of a hybrid with a hybrid draft model: a fork, an eviction, a restoration and a hand-over."""
    target = Seeded(GALLERY[index], 3)
    draft = LanguageModel(target, TREE)
    mates = (Mate((3, 1, 2), draft, stops=Stops(9)), Mate((2,), draft, stops=Stops(9)))
    return Case(target, (1, 2, 3, 4, 1), draft, layout, stops=Stops(9), session=Session(mates, ACTIONS))


def layout_of(kind: str, slots: int) -> KvLayout:
    return KvLayout(kind=kind, page_size=2 if KINDS[kind].pages else 0, prefill_chunk=3, state_slots=slots)


@HYBRIDS
@pytest.mark.parametrize("kind", ["branch", "prefix"])
def test_slots_change_no_bit(kind: str, index: int) -> None:
    engine = open_engine("cpu-eager")
    case = session_on(index, layout_of(kind, 4))
    trace, own_trace = engine.run(case).shared, engine.run(session_on(index, layout_of(kind, 0))).shared
    assert trace is not None
    assert own_trace is not None
    num_steps = 0
    for request, twin in zip(trace.requests, own_trace.requests, strict=True):
        assert request is not None
        assert twin is not None
        assert request.output == twin.output
        for step, twin_step in zip(request.steps, twin.steps, strict=True):
            assert step.scored is not None
            assert twin_step.scored is not None
            assert np.array_equal(step.scored.logits, twin_step.scored.logits)
            num_steps += 1
    assert num_steps >= 8
    assert {slot for account in trace.accounts for slot in account.slots.values()} == {0, 1, 2}
    assert not any(account.slots or account.free_slots for account in own_trace.accounts)


def test_the_prefix_cache_keeps_copies_of_states_whose_slot_another_request_takes() -> None:
    """The last two states of the first request lie in cells that the second fills before the third asks for them."""
    target = Seeded(GALLERY[RECURRENT[0]], 3)
    prompt = (1, 2, 3, 4, 1, 2, 3, 5, 6)
    mates = (Mate((3, 1, 2, 7), stops=Stops(2)), Mate((*prompt, 1), stops=Stops(2)))
    entries = [Action(kind, (number,)) for number in range(3) for kind in ("add", "step", "step")]
    layout = KvLayout(kind="prefix", page_size=2, state_slots=1, poison="nan")
    case = Case(target, prompt, layout=layout, stops=Stops(2), session=Session(mates, tuple(entries)))
    verdict = judge(case, ALL, ORACLE, subject_of(open_cpu()))
    assert not verdict.findings
    assert "cache.prefix-reuse" in verdict.compared


@pytest.mark.parametrize("slots", [1, 2, 3])
def test_few_slots_let_requests_wait_and_every_invariant_agrees(slots: int) -> None:
    case = session_on(RECURRENT[0], replace(layout_of("paged", slots), poison="nan"))
    verdict = judge(case, ALL, ORACLE, subject_of(open_cpu()))
    assert not verdict.findings
    assert {"cache.allocator-conserves", "cache.recurrent-equivalence", "lossless.takes-part"} <= set(verdict.compared)
    assert verdict.trace is not None
    assert verdict.trace.shared is not None
    accounts = verdict.trace.shared.accounts
    assert max(len(account.slots) for account in accounts) == slots
    # A request that does not fit does not enter, and nothing of it is left behind.
    assert all(sorted((*account.slots.values(), *account.free_slots)) == list(range(slots)) for account in accounts)


def test_a_slot_keeps_two_committed_states_and_a_checkpoint_for_each_row() -> None:
    pool = RecurrentPool(2, 3)
    slot = Checkpoints(pool, 1)
    states = RecurrentStates()
    states.lie_in(slot)
    assert list(slot.cells) == [5, 6, 7, 8, 9]
    states.open([-1, 0, 0])
    assert slot.rows == [6, 7, 8]
    for row in range(3):
        states.put(0, row, (torch.full((1, 2), row + 1.0), torch.zeros(1, 1, 1)))
    with pytest.raises(ValueError, match="2 rows need checkpoints, and the slot of recurrent states has 1"):
        slot.open(2)
    states.commit([0, 2])
    assert slot.committed == {1: 6, 2: 8}
    assert states.committed[0][0].tolist() == [[3.0, 3.0]]
    assert slot.free_cells() == [9, 5, 7]
    states.crop(1)
    assert states.committed[0][0].tolist() == [[1.0, 1.0]]
    assert slot.free_cells() == [9, 5, 7, 8]


def test_a_run_takes_cells_by_turns_and_the_prefix_cache_keeps_its_borders() -> None:
    states = RecurrentStates(border=2)
    states.lie_in(Checkpoints(RecurrentPool(1, 1), 0))
    states.open_run(9)
    for row in range(9):
        above = states.above(0, row)
        window = torch.zeros(1, 1) if above is None else above[0]
        states.put(0, row, (window + 1, torch.zeros(1, 1, 1)))
    states.commit(list(range(9)))
    kept = {length: int(layers[0][0]) for length, layers in states.states_by_length.items() if layers}
    assert kept == {2: 2, 4: 4, 6: 6, 8: 8, 9: 9}


def test_a_hybrid_draft_model_alone_has_slots_too() -> None:
    target = Seeded(next(arch for arch in GALLERY if not arch.recurrent and arch.vocab_size > 16), 1)
    hybrid = next(GALLERY[index] for index in RECURRENT)
    draft = LanguageModel(Seeded(replace(hybrid, vocab_size=target.vocab_size), 2), TREE)
    case = Case(target, (1, 2, 3), draft, KvLayout(state_slots=1, poison="nan"), stops=Stops(8))
    engine = open_engine("cpu-eager")
    own = engine.run(replace(case, layout=KvLayout()))
    assert engine.run(case).output == own.output
    assert [step.drafted.tree for step in engine.run(case).steps if step.drafted] == [
        step.drafted.tree for step in own.steps if step.drafted
    ]


def test_a_slot_that_is_taken_again_begins_with_zeros() -> None:
    slots = StateSlots(2)
    first = slots.take()
    assert first == 0
    pool = RecurrentPool(2, 1)
    earlier = RecurrentStates()
    earlier.lie_in(Checkpoints(pool, first))
    earlier.begin(4, {0: (torch.ones(1, 2), torch.ones(1, 1, 1))})
    slots.give_back(first)
    assert slots.free == (0, 1)
    later = RecurrentStates()
    later.lie_in(Checkpoints(pool, 0))
    assert later.committed[0][0].tolist() == [[0.0, 0.0]]


def test_a_negative_number_and_a_pool_of_spread_requests_are_refused_and_an_engine_without_slots_declines() -> None:
    with pytest.raises(Malformed, match="state_slots: -1 is negative"):
        KvLayout(state_slots=-1)
    with pytest.raises(Malformed, match="state_slots: 1025 slots; at most 1024"):
        KvLayout(state_slots=1025)
    case = session_on(RECURRENT[0], layout_of("branch", 3))
    with pytest.raises(Malformed, match="spread over ranks share no pool"):
        replace(case, ranks=2, spread=True)
    able = Abilities(dtypes=("float32",), drafts=("model",), sessions=True, actions=("add", "step"))
    alone = case.alone()
    assert able.outside(alone) is None
    assert replace(able, layout_settings=()).outside(alone) == "KV layout with prefill_chunk"
    plain = replace(alone, layout=KvLayout(state_slots=1))
    assert replace(able, layout_settings=("prefill_chunk",)).outside(plain) == "KV layout with state_slots"


@pytest.mark.parametrize("fault", faults_in(recurrent_slots), ids=lambda fault: fault.name)
def test_without_slots_the_smallest_case_of_a_fault_of_slots_is_right(fault: Fault) -> None:
    """Each of these faults strikes in slots alone."""
    case = bundle.load(CORPUS / f"{fault.name}.json").case
    assert case.layout.state_slots
    own = replace(case, layout=replace(case.layout, state_slots=0))
    subject = subject_of(open_planted("cpu-eager", fault.name))
    assert judge(case, ALL, ORACLE, subject).findings
    assert not judge(own, ALL, ORACLE, subject).findings


def test_rows_are_ordered_by_generation_wherever_their_parents_stand() -> None:
    states = RecurrentStates()
    states.open((-1, 3, 1, 0, -1, 4, 2))
    assert states.order(0) == [0, 4, 3, 5, 1, 2, 6]
    assert states.order(4) == [4, 6, 5], "rows of an earlier forward have run"
    states.open((8, 7))
    with pytest.raises(ValueError, match=r"rows \[7, 8\] follow no committed token"):
        states.order(0)
