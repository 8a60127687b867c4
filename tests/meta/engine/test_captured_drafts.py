"""Draft levels of a batch share a forward, over buffers padded to captured sizes."""

import random
from dataclasses import replace
from typing import Any, ClassVar

import numpy as np
import pytest
import torch

from specverify.backends import faults
from specverify.backends.compositions import open_engine
from specverify.backends.engine.captured.lanes import LaneRows, PaddingCache
from specverify.backends.engine.captured.runner import POISON, SIZES, Buffers, CapturedDrafts, capture_size
from specverify.backends.faults.drafting import captured_levels
from specverify.backends.faults.fault import faults_in
from specverify.properties.invariants import ALL
from specverify.properties.strategies.acceptance import ORACLE
from specverify.properties.strategies.draft.head import LAYERS
from specverify.properties.verdict.judge import judge
from specverify.reference.architecture import Seeded
from specverify.reference.case import Case
from specverify.reference.draft import Draft, LanguageModel
from specverify.reference.draft.eagle1 import Eagle1
from specverify.reference.draft.hidden import HiddenStates
from specverify.reference.draft.mtp import Mtp
from specverify.reference.draft_trees import Expansion, named_tree
from specverify.reference.sampling import Sampling, Stops
from specverify.reference.session import Action, Mate, Session
from specverify.reference.trace import Trace
from specverify.setup.subjects import subject_of
from tests.models import OTHER_LLAMA
from tests.tiers import each

NORMED = HiddenStates(place="normed", shift=1)
SMALL = Seeded(OTHER_LLAMA.architecture, 7)
DRAFTS: tuple[Draft, ...] = (
    LanguageModel(SMALL, named_tree("D3-BF2")),
    LanguageModel(SMALL, Expansion(3, 2, 9)),
    Eagle1(named_tree("D3"), NORMED, LAYERS[0], seed=1),
    Eagle1(Expansion(3, 2, 9), NORMED, LAYERS[0], seed=1),
    Mtp(named_tree("D3"), NORMED, LAYERS[0], 2),
)
CASE = Case(OTHER_LLAMA, (3, 1, 4, 1, 5), DRAFTS[0], stops=Stops(8), dtype="float64")


class Watched(Buffers):
    """Buffers that note their addresses, and the lanes that each forward has."""

    addresses: ClassVar[list[tuple[int, ...]]] = []
    forwards: ClassVar[list[tuple[int, int]]] = []

    def fill(self, lanes: list[LaneRows], numbers: list[int], size: int) -> None:
        super().fill(lanes, numbers, size)
        buffers = [
            buffer
            for buffer in (self.tokens, self.positions, self.lengths, self.slots, self.hidden_states)
            if buffer is not None
        ]
        self.addresses.append((id(self), *(buffer.data_ptr() for buffer in buffers)))
        self.forwards.append((len(lanes), size))
        assert not self.slots[len(lanes) : size].any(), "padded lanes have the slot that no request has"
        assert (self.slots[size:] == POISON).all()
        assert (self.tokens[size:] == POISON).all()
        assert (self.positions[size:] == POISON).all()


@pytest.fixture(autouse=True)
def _fresh() -> None:
    Watched.addresses, Watched.forwards = [], []


def run(case: Case, **parts: Any) -> Trace:
    """The trace of the captured engine on `case`, with other parts."""
    backend = open_engine("cpu-captured-drafts")
    backend.seams = replace(backend.seams, captured_drafts=CapturedDrafts(**parts))
    return backend.run(case)


def batches(draft: Draft, mates: int, seed: int, steps: int = 8) -> Case:
    """A session whose batches of up to all requests are drawn: they grow, shrink, and change their order."""
    rng = random.Random(seed)
    drawn_mates = [
        Mate(tuple(rng.randrange(1, 9) for _ in range(rng.randint(1, 5))), draft, Sampling(), Stops(rng.randint(2, 9)))
        for _ in range(mates)
    ]
    every = list(range(1 + mates))
    actions = [Action("add", (number,)) for number in every]
    for _ in range(steps):
        rng.shuffle(every)
        actions.append(Action("step", tuple(every[: rng.randint(1, len(every))])))
    actions.append(Action("step", tuple(range(1 + mates))))
    return replace(CASE, draft=draft, stops=Stops(30), session=Session(tuple(drawn_mates), tuple(actions)))


def assert_same_output(trace: Trace, twin_trace: Trace) -> None:
    """Both traces have one text and the same trees for each request, and draft logits within float64's rounding."""
    assert trace.shared is not None
    assert twin_trace.shared is not None
    for request, alone in zip(trace.shared.requests, twin_trace.shared.requests, strict=True):
        assert (request is None) == (alone is None)
        if request is None or alone is None:
            continue
        assert request.output == alone.output
        assert request.finish == alone.finish
        assert request.accounting == alone.accounting
        for step, twin in zip(request.steps, alone.steps, strict=True):
            assert step.drafted is not None
            assert twin.drafted is not None
            assert step.drafted.tree == twin.drafted.tree
            if twin.drafted.logits is not None and step.drafted.logits is not None:
                np.testing.assert_allclose(step.drafted.logits, twin.drafted.logits, rtol=0, atol=1e-9)


@pytest.mark.parametrize("draft", DRAFTS, ids=lambda draft: draft.TAG)
def test_batches_that_grow_and_shrink_draft_as_each_request_alone(draft: Draft) -> None:
    case = batches(draft, 8, 1)
    assert_same_output(run(case, buffers=Watched), open_engine("cpu-eager").run(case))
    assert len({live for live, _ in Watched.forwards}) >= 3
    assert all(size == capture_size(live, SIZES) for live, size in Watched.forwards)
    assert any(size > live for live, size in Watched.forwards)


def test_one_request_alone_has_the_bits_of_the_plain_engine() -> None:
    for draft in DRAFTS:
        case = replace(CASE, draft=draft)
        trace, plain = run(case, buffers=Watched), open_engine("cpu-eager").run(case)
        for step, twin in zip(trace.steps, plain.steps, strict=True):
            assert step.drafted is not None
            assert twin.drafted is not None
            assert step.drafted.logits is not None
            assert twin.drafted.logits is not None
            assert step.drafted.logits.tobytes() == twin.drafted.logits.tobytes()
    assert {*Watched.forwards} == {(1, 1)}


def test_buffers_keep_their_addresses_over_all_steps() -> None:
    run(batches(DRAFTS[2], 4, 3), buffers=Watched)
    assert len(Watched.addresses) > 8
    assert len({*Watched.addresses}) == 1


def test_a_batch_beyond_the_greatest_capture_is_run_without_one_and_counted() -> None:
    everyone = Action("step", tuple(range(9)))
    case = batches(DRAFTS[0], 8, 1, 0)
    assert case.session is not None
    case = replace(case, session=replace(case.session, actions=(*case.session.actions, everyone)))
    trace = run(case, buffers=Watched)
    (why,) = trace.fallbacks
    assert why == "not captured: a draft level of 9 requests; captures end at 8"
    assert trace.fallbacks[why] % OTHER_LLAMA.architecture.layers == 0
    assert all(live < 9 for live, _ in Watched.forwards)
    assert_same_output(trace, open_engine("cpu-eager").run(case))
    fewer = run(batches(DRAFTS[0], 3, 1), sizes=(1, 2))
    assert fewer.fallbacks
    assert all(why.endswith("; captures end at 2") for why in fewer.fallbacks)


def test_sizes_are_rounded_up_to_the_next_capture() -> None:
    assert [capture_size(live, SIZES) for live in range(1, 10)] == [1, 2, 4, 4, 8, 8, 8, 8, None]


def test_a_mate_that_ends_leaves_the_batch_and_its_lane_is_poisoned() -> None:
    case = batches(DRAFTS[0], 2, 5, 0)
    assert case.session is not None
    ends = replace(case.session.mates[0], stops=Stops(1))
    steps = (Action("step", (1, 0, 2)),) * 3
    mates, actions = (ends, case.session.mates[1]), (*case.session.actions[:3], *steps)
    case = replace(case, session=Session(mates, actions))
    trace = run(case, buffers=Watched)
    assert (3, 4) in Watched.forwards
    assert (2, 2) in Watched.forwards
    assert_same_output(trace, open_engine("cpu-eager").run(case))


def test_lanes_read_no_poison_and_padded_lanes_keep_nothing() -> None:
    like = LaneRows(torch.tensor([1, 2]), torch.tensor([0, 1]), [torch.eye(2, dtype=torch.bool)], PaddingCache(list))
    buffers = Buffers(4, 3, like)
    buffers.fill([like], [1], 2)
    for lane in range(2):
        buffers.refuse_poison(lane, 2)
    for lane, name in ((2, "token"), (3, "token")):
        with pytest.raises(ValueError, match=f"lane {lane} of a draft's graph reads a stale {name}"):
            buffers.refuse_poison(lane, 2)
    buffers.fill([like] * 3, [1, 2, 3], 4)
    buffers.fill([like], [1], 1)
    with pytest.raises(ValueError, match="lane 1 of a draft's graph reads a stale token"):
        buffers.refuse_poison(1, 2)
    with pytest.raises(ValueError, match="committed"):
        PaddingCache(list).commit([0])


@pytest.mark.parametrize("fault", each(faults_in(captured_levels), 2), ids=lambda fault: fault.name)
def test_each_fault_is_found_on_a_batch(fault: faults.fault.Fault) -> None:
    backend = open_engine("cpu-captured-drafts")
    faults.plant(backend, fault)
    subject = subject_of(backend)
    # Batches of two requests after one of three, and a batch that is padded.
    cases = (batches(draft, 2, seed, 4) for seed in (4, 3) for draft in (DRAFTS[0], DRAFTS[2]))
    assert any(judge(case, ALL, ORACLE, subject).findings for case in cases)
