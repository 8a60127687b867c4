"""Prefill in one process and decode in another: the same bits, a named error for what does not fit, no hang."""

import json
import os
import random
import signal
import threading
import time
from collections.abc import Callable, Iterator
from dataclasses import replace
from typing import Any

import numpy as np
import pytest
import torch

from specverify.backends import devices
from specverify.backends.base import ProgramFailure, StageFailure, Unavailable, WrongFlag
from specverify.backends.compositions import open_cpu, open_engine
from specverify.backends.engine.collectives import take_device
from specverify.backends.engine.composition import SEAMS
from specverify.backends.engine.disaggregated.pair import Pair, SideLost
from specverify.backends.engine.handover.items import PAGE, items_of, letter_of
from specverify.backends.engine.handover.mailbox import HandOver, PeerLost
from specverify.backends.engine.handover.packet import BadHandOver, pack
from specverify.backends.engine.seams import Seams
from specverify.backends.flags import hand_over_by
from specverify.backends.handed_over import TRIES, HandedOverBackend
from specverify.properties.invariants import ALL
from specverify.properties.verdict.judge import judge
from specverify.reference.case import Case
from specverify.reference.draft import LanguageModel
from specverify.reference.oracle.decoder import Oracle
from specverify.reference.sampling import Sampling, Stops
from specverify.reference.session import Action, Mate, Session
from specverify.reference.trace import Trace
from specverify.reference.tree import RankTree
from specverify.setup.subjects import subject_of
from tests.meta.engine.test_hand_over import REQUEST_CASE, STATE
from tests.models import LLAMA

RUN, ROOM, HOP = 7, 3, 1
OVER = HandOver()
PACKET = pack(STATE, REQUEST_CASE, ROOM, HOP)
LETTERS = [letter_of(item) for item in items_of(PACKET, RUN)]
PROMPT = (6, 3, 11, 4, 9, 2, 14, 5, 1)
BRANCHES = RankTree((0, 0, 0, 1), (0, 1, 0, 0))
DRAFTED = LanguageModel(LLAMA, BRANCHES)
GOES = tuple(
    Action(kind, tuple(requests))
    for kind, *requests in (
        ("add", 0), ("add", 1), ("step", 0, 1), ("hand-over", 1), ("step", 1, 0), ("hand-over", 0), ("step", 0, 1),
        ("evict", 0), ("restore", 0), ("hand-over", 0), ("step", 0, 1),
    )
)  # fmt: skip


def lone_case(seed: int = 3, tokens: int = 12, **changed: Any) -> Case:
    sampling = Sampling(temperature=float(seed % 2), seed=seed)
    return replace(Case(LLAMA, PROMPT, DRAFTED, sampling=sampling, stops=Stops(tokens)), **changed)


def in_session() -> Case:
    return lone_case(session=Session((Mate(PROMPT[:6], DRAFTED, stops=Stops(9)),), GOES))


class Letters:
    """A mailbox whose letters are there already."""

    def __init__(self, letters: list[bytes]) -> None:
        self._letters = iter(letters)

    def post(self, letter: bytes) -> None:
        raise AssertionError(letter)

    def take(self, seconds: float) -> bytes:
        letter = next(self._letters, None)
        if letter is None:
            raise PeerLost("no letter came")
        return letter


def read_letters(letters: list[bytes], num_letters: int | None = None, over: HandOver = OVER) -> bytes:
    count = len(letters) if num_letters is None else num_letters
    return over.receive_packet(Letters(letters), (RUN, ROOM, HOP), count, 1.0, lambda: None)


def test_a_packet_in_items_is_the_packet_whatever_their_order() -> None:
    assert len([item for item in items_of(PACKET, RUN) if ".page." in item.name]) > 2 * (len(STATE.tokens) - 2) // PAGE
    for seed in range(20):
        letters = random.Random(seed).sample(LETTERS, len(LETTERS))
        assert items_facts(read_letters(letters)) == items_facts(PACKET)


def items_facts(packet: bytes) -> dict[str, Any]:
    """The facts of a packet, and its tensors as lists."""
    return {
        item.name: (item.facts, {name: tensor.tolist() for name, tensor in item.tensors.items()})
        for item in items_of(packet, RUN)
    }


def letter_with(**changed: Any) -> bytes:
    """The last item with other words in its head."""
    return letter_of(replace(items_of(PACKET, RUN)[-1], **changed))


def letter_with_head(**changed: Any) -> bytes:
    """The last letter with its head rewritten behind the sender's back."""
    head, _, body = LETTERS[-1].partition(b"\n")
    fields = {name: value for name, value in (json.loads(head) | changed).items() if value is not None}
    return json.dumps(fields).encode() + b"\n" + body


FIRST_LETTERS, LAST = LETTERS[:-1], LETTERS[-1]
BAD: dict[str, tuple[list[bytes], str]] = {
    "no letter's form": ([*FIRST_LETTERS, b"\x80\x04"], "a letter of 2 bytes holds no item"),
    "an empty letter": ([*FIRST_LETTERS, b""], "a letter of 0 bytes holds no item"),
    "another format": ([*FIRST_LETTERS, letter_with_head(format="nixl 2")], "an item's format is 'nixl 2'"),
    "a head without its room": ([*FIRST_LETTERS, letter_with_head(room=None)],
     "item 'target.page.1' does not tell its room"),
    "cut off": ([*FIRST_LETTERS, LAST[:-3]], "item target.page.1 of request 3 was changed or cut on its way"),
    "a bit turned": ([*FIRST_LETTERS, LAST[:-1] + bytes([LAST[-1] ^ 1])],
     "item target.page.1 of request 3 was changed"),
    "another head": ([*FIRST_LETTERS, letter_with_head(name="hidden")], "item hidden of request 3 was changed"),
    "another request": ([*FIRST_LETTERS, letter_with(room=2)],
     "item target.page.1 of request 2 of case 7 came; request 3 of case 7"),
    "a later case": ([*FIRST_LETTERS, letter_with(run=8)],
     "item target.page.1 of request 3 of case 8 came; request 3 of case 7"),
    "late": ([*FIRST_LETTERS, letter_with(hop=0)],
     "item target.page.1 of request 3 is late: it is of hand-over 0, and 1 is expected"),
    "early": ([*FIRST_LETTERS, letter_with(hop=2)], "item target.page.1 of request 3 is early: it is of hand-over 2"),
    "of other items": ([*FIRST_LETTERS, letter_with(names=("hidden",))],
     "item target.page.1 of request 3 tells of other items"),
    "a strange name": ([*FIRST_LETTERS, letter_with(name="image")], "item image of request 3 is none of the items"),
    "twice": ([*FIRST_LETTERS, LETTERS[0], LAST], "item coins of request 3 came twice"),
    "twice behind the last": ([*LETTERS, LETTERS[0]], "item coins of request 3 came twice"),
    "one less": (FIRST_LETTERS, "item target.page.1 of request 3 is missing: 8 of 9 came"),
    "many less": (FIRST_LETTERS[:4], "item grammar and 4 more of request 3 is missing: 4 of 9 came"),
    "none": ([], "no item of request 3 came for its hand-over 1"),
}  # fmt: skip


@pytest.mark.parametrize("name", list(BAD))
def test_an_item_that_does_not_fit_is_told_by_its_name(name: str) -> None:
    letters, why = BAD[name]
    with pytest.raises(BadHandOver) as error:
        read_letters(letters)
    assert why in str(error.value)
    assert "\n" not in str(error.value)


@pytest.mark.parametrize("lacking", range(len(LETTERS)))
def test_an_item_that_never_comes_is_told_by_its_name(lacking: int) -> None:
    letters = [letter for index, letter in enumerate(LETTERS) if index != lacking]
    with pytest.raises(PeerLost, match=f"^item {items_of(PACKET, RUN)[lacking].name} of request 3 is missing: "):
        read_letters(letters, num_letters=len(LETTERS))


def test_items_of_a_case_that_failed_before_are_passed_over() -> None:
    assert read_letters([letter_with(run=RUN - 1), *LETTERS]) == OVER.join(items_of(PACKET, RUN))


@pytest.fixture
def two() -> Iterator[HandedOverBackend]:
    backend = open_engine("cpu-handed-over")
    assert isinstance(backend, HandedOverBackend)
    yield backend
    backend.close()


def bits(trace: Trace) -> list[Any]:
    """Logits and keys of every step, and the text."""
    values: list[Any] = [trace.output, trace.finish]
    for step in trace.steps:
        assert step.scored is not None
        assert step.committed is not None
        assert step.committed.after is not None
        values += [step.scored.logits.tolist(), step.committed.after.keys.tolist()]
    return values


@pytest.mark.parametrize("by", ["shared-memory", "gloo"])
def test_two_processes_make_the_bits_of_one(by: str, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setenv("SPECVERIFY_HAND_OVER", by)
    two = open_engine("cpu-handed-over")
    assert isinstance(two, HandedOverBackend)
    try:
        for case in (lone_case(2), lone_case(3), in_session()):
            there, here = two.run(case), open_cpu().run(case)
            assert bits(there) == bits(here)
            if there.shared is not None:
                assert here.shared is not None
                for request, other_request in zip(there.shared.requests, here.shared.requests, strict=True):
                    assert request is not None
                    assert other_request is not None
                    assert bits(request) == bits(other_request)
    finally:
        two.close()


@pytest.mark.slow
def test_what_two_processes_do_holds_every_invariant(two: HandedOverBackend) -> None:
    for case in (lone_case(3, 4), in_session()):
        verdict = judge(case, ALL, Oracle(), subject_of(two))
        assert verdict.unsupported is None
        assert not verdict.findings


def test_a_packet_that_does_not_fit_ends_the_case_alone(two: HandedOverBackend) -> None:
    """The error names the item; the two processes stay, and the next case is right."""

    class Doubled(HandOver):
        def shuffle(self, items: Any) -> Any:
            shuffled_items = super().shuffle(items)
            return [*shuffled_items, shuffled_items[0]] if shuffled_items[0].hop == 1 else shuffled_items

    two.seams = replace(two.seams, hand_over=Doubled())
    with pytest.raises(StageFailure, match=r"BadHandOver: item .* of request 1 came twice"):
        two.run(in_session())
    processes = two.processes
    assert two.run(lone_case(3)).output == open_cpu().run(lone_case(3)).output
    assert two.processes == processes


def kill_later(pair: Pair, side: str, after: float) -> threading.Thread:
    """A thread that kills a side after so many seconds."""

    def kill() -> None:
        time.sleep(after)
        os.kill(pair.processes[side], signal.SIGKILL)

    thread = threading.Thread(target=kill)
    thread.start()
    return thread


KILLS = 200


def kills(count: int, begin: int) -> None:
    """Kill a side at random, so many times: the text is the right one, or the error names the side."""
    cases = {seed: lone_case(seed, 40) for seed in (2, 3)} | {4: in_session()}
    right = {seed: bits(open_cpu().run(case)) for seed, case in cases.items()}
    lengths = dict.fromkeys(cases, 0.3)
    pair, ended, num_lost = Pair(SEAMS, "cpu-handed-over"), 0, 0
    for number in range(begin, begin + count):
        rng = random.Random(number)
        seed, side = rng.choice(sorted(cases)), rng.choice(["prefill", "decode"])
        pair.ask(lone_case(1, 2))  # both sides have come up
        began = time.monotonic()
        thread = kill_later(pair, side, rng.random() * lengths[seed])
        message = ""
        try:
            word, trace = pair.ask(cases[seed])
        except SideLost as why:
            message, num_lost = str(why), num_lost + 1
        else:
            assert (word, bits(trace)) == ("told", right[seed])
            ended, lengths[seed] = ended + 1, max(0.02, time.monotonic() - began)
        assert message in ("", f"the {side} side died: its process was killed by signal 9")
        assert time.monotonic() - began < 60
        thread.join()
        pair.close()
        pair = Pair(SEAMS, "cpu-handed-over")
    pair.close()
    assert ended + num_lost == count
    assert num_lost > count // 5


@pytest.mark.slow
@pytest.mark.parametrize("part", range(4))
def test_a_side_that_is_killed_at_random_ends_the_case_by_name(part: int) -> None:
    kills(KILLS // 4, part * KILLS)


@pytest.mark.slow
def test_some_kills_at_random_end_the_case_by_name() -> None:
    kills(5, 10_000)


@pytest.mark.parametrize("side", ["prefill", "decode"])
def test_a_case_whose_side_dies_is_done_again(two: HandedOverBackend, side: str) -> None:
    case = lone_case(3, 40)
    right = bits(two.run(case))
    thread = kill_later(two.pair, side, 0.05)
    assert bits(two.run(case)) == right
    thread.join()
    assert bits(two.run(case)) == right


def test_a_case_whose_side_dies_every_time_ends_in_an_error(two: HandedOverBackend) -> None:
    class Dying(HandOver):
        def shuffle(self, items: Any) -> Any:
            os.kill(os.getpid(), signal.SIGKILL)

    two.seams = replace(two.seams, hand_over=Dying())
    line = "cpu-handed-over: the prefill side died: its process was killed by signal 9; the case was begun"
    with pytest.raises(ProgramFailure, match=f"^{line} {TRIES} times$"):
        two.run(lone_case())


def _lost_side_message(act: Callable[[Pair], None], seams: Seams = SEAMS) -> str:
    pair = Pair(seams, "cpu-handed-over", patience=2.0)
    pair.ask(lone_case(1, 2))
    act(pair)
    began = time.monotonic()
    with pytest.raises(SideLost) as error:
        pair.ask(lone_case())
    assert time.monotonic() - began < 30
    return str(error.value)


@pytest.mark.slow
@pytest.mark.parametrize("side", ["prefill", "decode"])
def test_a_side_that_lags_is_named(side: str) -> None:
    message = _lost_side_message(lambda pair: os.kill(pair.processes[side], signal.SIGSTOP))
    assert message == f"the {side} side lags: it gave no sign for 2 seconds"


def test_a_carrier_that_is_not_there_is_refused_in_one_line(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setenv("SPECVERIFY_HAND_OVER", "hccl")
    two = open_engine("cpu-handed-over")
    with pytest.raises(
        Unavailable, match=r"^cpu-handed-over: SPECVERIFY_HAND_OVER=hccl needs .*gloo or shared-memory$"
    ):
        two.run(lone_case())
    with pytest.raises(WrongFlag, match=r"^SPECVERIFY_HAND_OVER='mpi': set it to shared-memory, gloo, nccl or hccl"):
        hand_over_by({"SPECVERIFY_HAND_OVER": "mpi"})


@pytest.mark.parametrize(("visible", "why"), [(0, "no CUDA device is visible"), (1, "1 of 2 cuda devices are visible")])
def test_each_side_needs_a_device_of_its_own(monkeypatch: pytest.MonkeyPatch, visible: int, why: str) -> None:
    """nccl refuses two ranks on one device; and they are counted in another process, since the sides are forks."""
    monkeypatch.setattr(devices, "torch_build", lambda: {"__version__": "2.9.0", "cuda": "13.0"})
    monkeypatch.setattr(torch.cuda, "is_available", lambda: visible > 0)
    monkeypatch.setattr(torch.cuda, "device_count", lambda: visible)
    asked_here: list[str] = []
    here = os.getpid()
    monkeypatch.setattr(devices, "why_no_device", _noting(devices.why_no_device, asked_here, here))
    monkeypatch.setenv("SPECVERIFY_HAND_OVER", "nccl")
    two = open_engine("cpu-handed-over")
    with pytest.raises(Unavailable, match=rf"nccl needs a device for each side: {why}; take gloo or shared-memory$"):
        two.run(lone_case())
    assert asked_here == []


def _noting(ask: Callable[[str], str | None], asked_here: list[str], here: int) -> Callable[[str], str | None]:
    def noting(device: str) -> str | None:
        if os.getpid() == here:
            asked_here.append(device)
        return ask(device)

    return noting


@pytest.mark.parametrize(("device", "rank", "name"), [("cpu", 1, "cpu"), ("cuda", 0, "cuda:0"), ("cuda", 1, "cuda:1")])
def test_each_rank_takes_the_device_of_its_number(
    monkeypatch: pytest.MonkeyPatch, device: str, rank: int, name: str
) -> None:
    current: list[int] = []
    monkeypatch.setattr(torch.cuda, "set_device", current.append)
    assert take_device(device, rank) == name
    assert current == [rank] * (device != "cpu")


def test_the_first_token_crosses_with_its_log_probability(two: HandedOverBackend) -> None:
    trace = two.run(lone_case(2, 1))
    (step,) = trace.steps
    assert step.emitted is not None
    assert step.emitted.logprobs is not None
    assert np.isfinite(step.emitted.logprobs).all()
    assert bits(trace) == bits(open_cpu().run(lone_case(2, 1)))
