"""A request that is handed over goes on as if it had stayed, and a packet that does not fit is told in one line."""

import json
from collections.abc import Callable, Mapping
from dataclasses import replace
from typing import Any

import pytest
import torch
from safetensors.torch import load, save
from torch import Tensor

from specverify.backends.compositions import open_cpu
from specverify.backends.engine.handover.packet import BadHandOver, ExpectedRequest, pack, unpack
from specverify.backends.engine.handover.state import Columns, RequestState
from specverify.backends.engine.kv.base import CacheSpec
from specverify.backends.engine.reach import Reach
from specverify.properties.strategies.models import GALLERY
from specverify.properties.verdict.judge import judge
from specverify.reference.architecture import Seeded
from specverify.reference.case import Case
from specverify.reference.draft import LanguageModel, Ngram, Scripted
from specverify.reference.layout import KINDS, KvLayout
from specverify.reference.sampling import Sampling, Stops
from specverify.reference.session import Action, Mate, Session
from specverify.reference.tree import RankTree, Tree
from specverify.setup.subjects import subject_of
from tests.corruption import BY_NAME, ORACLE
from tests.models import LLAMA

NAME = "serving.hand-over"

PROMPT = (6, 3, 11, 4, 9, 2, 14)
BRANCHES = RankTree((0, 0, 0, 1), (0, 1, 0, 0))
FORK = Tree((0, 0, 0, 1), (PROMPT[-1], 3, 2, 1))
GOES = tuple(
    Action(kind, tuple(requests))
    for kind, *requests in (
        ("add", 0), ("add", 1), ("hand-over", 0), ("step", 0, 1), ("hand-over", 1), ("step", 1, 0), ("hand-over", 0),
        ("hand-over", 0), ("preempt", 0), ("hand-over", 0), ("step", 0, 1), ("evict", 0), ("restore", 0),
        ("hand-over", 0), ("step", 0),
    )
)  # fmt: skip


def session(**changed: Any) -> Case:
    model = changed.pop("model", LLAMA)
    alone = Case(model, PROMPT, changed.pop("draft", Scripted((FORK, FORK, FORK))), stops=Stops(9))
    mate = Mate((*PROMPT[:3], PROMPT[-1]), alone.draft, stops=Stops(9))
    return replace(alone, session=Session((mate,), GOES), **changed)


def compared_invariants(case: Case) -> set[str]:
    """The invariants that compared something; none of them found a difference."""
    verdict = judge(case, tuple(BY_NAME.values()), ORACLE, subject_of(open_cpu()))
    assert not verdict.findings, verdict.findings
    assert verdict.unsupported is None
    return {name for name, outcome in verdict.outcomes.items() if outcome == "checked"}


@pytest.mark.parametrize("kind", list(KINDS))
def test_a_request_goes_on_in_every_layout(kind: str) -> None:
    windowed = Seeded(GALLERY[5], 0) if kind == "sliding" else LLAMA
    assert NAME in compared_invariants(
        session(model=windowed, layout=KvLayout(kind=kind, page_size=2 if KINDS[kind].pages else 0))
    )


@pytest.mark.parametrize(
    "changed",
    [
        {"draft": LanguageModel(LLAMA, BRANCHES)},
        {"draft": Ngram(BRANCHES, 3)},
        {"sampling": Sampling(temperature=1.0, seed=3)},
    ],
    ids=["draft model", "n-gram", "sampling"],
)
def test_a_request_takes_its_draft_and_its_coins_along(changed: dict[str, Any]) -> None:
    assert NAME in compared_invariants(session(**changed))


@pytest.mark.parametrize("reader", [5, 27])
def test_the_window_of_a_draft_that_has_read_the_root_is_sent_from_its_first_column(reader: int) -> None:
    """A preempted step leaves the draft one column ahead; rewound, its rows see one column before those it shows."""
    drafter = replace(GALLERY[reader], vocab_size=GALLERY[20].vocab_size)
    draft = LanguageModel(Seeded(drafter, 1), BRANCHES)
    target = Seeded(GALLERY[20], 0)
    assert NAME in compared_invariants(session(model=target, draft=draft, layout=KvLayout(kind="sliding")))


SPEC = CacheSpec((Reach(), Reach(window=2)), 2, 4, 40, 8, torch.device("cpu"), torch.float32)
ROOT = len(PROMPT) + 1
REQUEST_CASE = Case(LLAMA, PROMPT, LanguageModel(LLAMA, BRANCHES), stops=Stops(9))


def columns(length: int) -> Columns:
    first = (0, length - 1)
    layers = [tuple(torch.ones(2, length - begin, 4) for begin in first) for _ in range(2)]
    return Columns(length, first, layers[0], layers[1])


CALLS = (2, 5, 6)
STATE = RequestState((*PROMPT, 5, 2), ROOT, (1,), 3, 4, 1, *CALLS, None, -0.5, columns(ROOT), columns(ROOT - 2), None)
EXPECTED = ExpectedRequest(REQUEST_CASE, 3, 1, SPEC, SPEC, 0)


def test_a_packet_holds_the_state() -> None:
    data = pack(STATE, REQUEST_CASE, 3, 1)
    state = unpack(data, EXPECTED)
    assert replace(state, target=STATE.target, draft=STATE.draft) == STATE
    assert state.draft is not None
    assert STATE.draft is not None
    for actual, expected in ((state.target, STATE.target), (state.draft, STATE.draft)):
        assert (actual.length, actual.first) == (expected.length, expected.first)
        assert all(map(torch.equal, (*actual.keys, *actual.values), (*expected.keys, *expected.values)))


def alter_packet(
    facts: Callable[[dict[str, Any]], Any] | None = None, tensors: Mapping[str, Tensor | None] | None = None
) -> bytes:
    """The packet with other facts, and with tensors put in or (None) left out."""
    data = pack(STATE, REQUEST_CASE, 3, 1)
    header = json.loads(data[8 : 8 + int.from_bytes(data[:8], "little")])
    fields = json.loads(header["__metadata__"]["facts"])
    if facts is not None:
        facts(fields)
    all_tensors = {**load(data), **(tensors or {})}
    return save(
        {name: tensor for name, tensor in all_tensors.items() if tensor is not None}, {"facts": json.dumps(fields)}
    )


def fact(**fields: Any) -> bytes:
    return alter_packet(lambda facts: facts.update(fields))


BAD: dict[str, tuple[bytes, str]] = {
    "cut off": (pack(STATE, REQUEST_CASE, 3, 1)[:-9], "no whole safetensors file"),
    "no safetensors": (b"\x80\x04", "no whole safetensors file"),
    "no facts": (save({"hidden": torch.ones(1)}), "format is None"),
    "another format": (fact(format="nixl 2"), "format is 'nixl 2'"),
    "a fact less": (alter_packet(lambda facts: facts.pop("position")), "lacks position"),
    "a fact more": (fact(pickle="x"), "has a fact 'pickle'"),
    "another request": (pack(STATE, REQUEST_CASE, 2, 1), "is of request 2; request 3"),
    "twice": (pack(STATE, REQUEST_CASE, 3, 0), "hand-over 0 of its request; 1 is expected"),
    "another draft": (pack(STATE, replace(REQUEST_CASE, draft=Scripted()), 3, 1),
     "the draft of the sender has the digest"),
    "another model": (pack(STATE, replace(REQUEST_CASE, model=Seeded(GALLERY[1], 1)), 3, 1), "the model of the sender"),
    "another dtype": (pack(STATE, replace(REQUEST_CASE, dtype="float64"), 3, 1), "the dtype of the sender"),
    "other settings": (pack(STATE, replace(REQUEST_CASE, sampling=Sampling(temperature=1.0)), 3, 1),
     "the sampling of the"),
    "a token too high": (fact(tokens=[*PROMPT, 5, 99]), "no list of ids below"),
    "another text": (fact(tokens=[1, *PROMPT[1:], 5, 2]), "does not begin with the prompt"),
    "more steps than tokens": (fact(lengths=[0, 0, 0]), "more steps than the 2 output tokens"),
    "a script ahead": (fact(draft_steps=2), "the draft has taken 2 steps"),
    "another position": (fact(position=ROOT - 1), "position is 7; the text has 9 tokens"),
    "coins below none": (fact(proposed=-1), "proposed is -1"),
    "a grammar that is not there": (fact(matched=2), "the grammar has read 2 tokens"),
    "no log-probability": (fact(logprob=None), "log-probability of the last of 2"),
    "KV without its last column": (
        pack(replace(STATE, target=columns(ROOT - 1)), REQUEST_CASE, 3, 1),
        "target cache has 7 columns; the text has 8",
    ),
    "KV ahead": (pack(replace(STATE, draft=columns(ROOT + 1)), REQUEST_CASE, 3, 1), "draft cache has 9 columns"),
    "no draft KV": (pack(replace(STATE, draft=None), REQUEST_CASE, 3, 1), "has no draft cache"),
    "a layer less": (alter_packet(None, {"target.values.1": None}), "tensor target.values.1 is missing"),
    "a layer more": (alter_packet(None, {"target.keys.2": torch.ones(2, 8, 4)}), "target.keys.2 belongs to nothing"),
    "another width": (alter_packet(None, {"target.keys.0": torch.ones(2, 8, 6)}), "expected torch.float32 [2, 8, 4]"),
    "other heads": (alter_packet(None, {"target.keys.0": torch.ones(1, 8, 4)}), "is torch.float32 [1, 8, 4]"),
    "half the bits": (alter_packet(None, {"target.keys.0": torch.ones(2, 8, 4).half()}), "is torch.float16"),
    "not a number": (alter_packet(None, {"draft.keys.0": torch.full((2, 6, 4), float("nan"))}), "not finite"),
    "a window cut": (
        alter_packet(lambda facts: facts["target"].update(first=[1, 7]), {"target.keys.0": torch.ones(2, 7, 4)}),
        "layer 0 of the target cache begins at column 1; its rows see column 0",
    ),
    "hidden states unasked": (alter_packet(None, {"hidden": torch.ones(8, 16)}), "the draft reads none"),
}  # fmt: skip


@pytest.mark.parametrize("name", list(BAD))
def test_a_packet_that_does_not_fit_is_told_in_one_line(name: str) -> None:
    data, why = BAD[name]
    with pytest.raises(BadHandOver) as error:
        unpack(data, EXPECTED)
    assert why in str(error.value)
    assert "\n" not in str(error.value)
    assert len(str(error.value)) < 160


@pytest.mark.parametrize(
    ("hidden", "why"),
    [
        (None, "reads hidden states of width 16, and the packet has none"),
        (torch.ones(ROOT - 1, 16), "hidden states are [7, 16]; expected [8, 16]"),
        (torch.ones(ROOT, 12), "hidden states are [8, 12]; expected [8, 16]"),
        (torch.full((ROOT, 16), float("inf")), "not finite"),
    ],
    ids=["missing", "late", "of another draft", "not finite"],
)
def test_hidden_states_that_do_not_fit_are_told(hidden: Tensor | None, why: str) -> None:
    with pytest.raises(BadHandOver) as error:
        unpack(pack(replace(STATE, hidden=hidden), REQUEST_CASE, 3, 1), replace(EXPECTED, hidden=16))
    assert why in str(error.value)
