"""Log-probabilities of a prompt: what the engine tells of them, and what is found where it tells them wrongly."""

from dataclasses import replace
from typing import Any

import numpy as np
import pytest

from specverify.backends.compositions import open_engine
from specverify.properties.invariants import ALL
from specverify.properties.strategies.models import GALLERY
from specverify.properties.verdict.finding import Finding
from specverify.properties.verdict.judge import judge
from specverify.reference.abilities import Abilities
from specverify.reference.adapters import Adapter
from specverify.reference.architecture import Seeded
from specverify.reference.case import Case
from specverify.reference.draft import Scripted
from specverify.reference.layout import KvLayout
from specverify.reference.oracle.decoder import Oracle
from specverify.reference.recorded.lines import read_runs, trace_lines
from specverify.reference.sampling import Sampling, Stops
from specverify.reference.session import Action, Mate, Session
from specverify.reference.trace import Stage, Trace
from specverify.reference.tree import Tree
from specverify.setup.subjects import open_planted, subject_of

ARCH = next(arch for arch in GALLERY if arch.family == "llama" and arch.vocab_size > 8)
PROMPT = (2, 0, 1, 3, 1, 2, 4, 0)
TREE = Scripted((Tree((0, 0, 0, 1), (0, 3, 1, 2)),))
WITH_LOGPROBS = Sampling(prompt_logprobs=True)
PAGED, CACHED = KvLayout(kind="paged", page_size=2), KvLayout(kind="prefix", page_size=2)
LOGPROBS, COMPLETES = (
    next(invariant for invariant in ALL if invariant.name == f"lossless.{name}") for name in ("logprobs", "completes")
)
TIERED = replace(CACHED, second_tier=True)
LORA = Adapter(2, 4.0, ("q", "v"), 2)


def alone(**fields: Any) -> Case:
    return Case(**{
        "model": Seeded(ARCH, 1), "prompt": PROMPT, "draft": TREE, "sampling": WITH_LOGPROBS, "stops": Stops(4),
        "dtype": "float64", **fields,
    })  # fmt: skip


def session(*actions: Action, layout: KvLayout = CACHED, mate: Mate | None = None) -> Case:
    """Two requests with one prompt, of which both ask unless `mate` says otherwise."""
    mates = (mate or Mate(PROMPT, TREE, WITH_LOGPROBS, Stops(4)),)
    return alone(layout=layout, session=Session(mates, actions))


def act(kind: str, *requests: int) -> Action:
    return Action(kind, requests)


STEPS = [act("step", 0, 1)] * 4
ENDED = [act("add", 1), *[act("step", 1)] * 4]

CASES = {
    "plain": alone(),
    "one token": alone(prompt=(0,)),
    "sampled": alone(sampling=replace(WITH_LOGPROBS, temperature=0.8, seed=3)),
    "processed": alone(sampling=replace(WITH_LOGPROBS, temperature=0.8, top_k=2, repetition_penalty=1.4)),
    **{f"chunks of {chunk}": alone(layout=KvLayout(prefill_chunk=chunk)) for chunk in (1, 3, 4, 7)},
    "an adapter": alone(model=Seeded(ARCH, 1, adapter=LORA)),
    "known pages": session(*ENDED, act("add", 0), act("step", 0)),
    "pages of one that asked not": session(*ENDED, act("add", 0), act("step", 0), mate=Mate(PROMPT, TREE)),
    "a fork": session(act("add", 0), act("step", 0), act("fork", 0, 1), *STEPS),
    "preempted": session(act("add", 0), act("add", 1), act("preempt", 0), *STEPS),
    "evicted": session(act("add", 0), act("step", 0), act("evict", 0), act("restore", 0), *STEPS),
    "two tiers": session(
        *ENDED, act("add", 0), act("evict", 0), act("restore", 0), act("step", 0), layout=TIERED
    ),
    "handed over": session(
        act("add", 0), act("hand-over", 0), act("step", 0), act("hand-over", 0), act("evict", 0), act("restore", 0),
        *STEPS, layout=PAGED,
    ),
    "ahead": session(
        act("add", 0), act("add", 1), *[act("launch", 0, 1)] * 2, act("evict", 0), act("restore", 0), *STEPS,
        layout=PAGED,
    ),
}  # fmt: skip


class Altered:
    """The engine, with its traces changed."""

    def __init__(self, change: Any) -> None:
        self.declaration = open_engine("cpu-eager").declaration
        self._change = change

    def run(self, case: Case) -> Trace:
        trace: Trace = self._change(open_engine("cpu-eager").run(case))
        return trace


def findings(case: Case, change: Any = lambda trace: trace) -> tuple[Finding, ...]:
    """What `lossless.logprobs` finds in a run of the engine that `change` has altered."""

    subject = subject_of(Altered(change))
    return judge(case, [LOGPROBS], Oracle(), subject).findings


@pytest.mark.parametrize("name", CASES)
def test_the_engine_tells_what_the_oracle_does(name: str) -> None:
    case = CASES[name]
    trace = open_engine("cpu-eager").run(case)
    every = (trace,) if trace.shared is None else trace.shared.requests
    num_compared = 0
    for number, request_trace in enumerate(every):
        if request_trace is None:
            continue
        prompt = case.prompt if trace.shared is None else trace.shared.prompts[number]
        lone_case = case.alone(
            number, prompt[: -len(case.alone(number).prompt)] if number and len(prompt) > len(PROMPT) else ()
        )
        true = Oracle()(lone_case).prompt_logprobs
        assert (request_trace.prompt_logprobs is None) == (true is None)
        if true is not None and request_trace.prompt_logprobs is not None:
            num_compared += 1
            assert len(request_trace.prompt_logprobs) == len(true) == len(lone_case.prompt) - 1
            np.testing.assert_allclose(request_trace.prompt_logprobs, true, rtol=0, atol=1e-9)
    assert num_compared
    assert not findings(case)


def test_a_request_that_does_not_ask_is_told_nothing() -> None:
    quiet = alone(sampling=Sampling())
    assert open_engine("cpu-eager").run(quiet).prompt_logprobs is None
    assert Oracle()(quiet).prompt_logprobs is None


def test_known_pages_are_taken_by_requests_that_do_not_ask() -> None:
    ended = (*ENDED, act("add", 0))

    def shares_pages(case: Case) -> bool:
        trace = open_engine("cpu-eager").run(case)
        assert trace.shared is not None
        account = trace.shared.accounts[-1]
        return bool(set(account.tables[0]) & set(account.kept))

    assert not shares_pages(session(*ended))
    assert shares_pages(replace(session(*ended), sampling=Sampling()))


def test_an_engine_that_declares_them_and_tells_none_is_found() -> None:
    (finding,) = findings(alone(), lambda trace: replace(trace, prompt_logprobs=None))
    assert (finding.where["side"], finding.stage, finding.expected, finding.observed) == (
        "prompt length",
        Stage.EMITTED,
        7,
        0,
    )


@pytest.mark.parametrize("change", [lambda old: old[:-1], lambda old: (0.0, *old)])
def test_a_wrong_number_of_them_is_found(change: Any) -> None:
    (finding,) = findings(alone(), lambda trace: replace(trace, prompt_logprobs=change(trace.prompt_logprobs)))
    assert finding.where["side"] == "prompt length"


@pytest.mark.parametrize("value", [0.0, float("nan"), float("-inf")])
def test_one_wrong_value_is_found_at_its_place(value: float) -> None:
    def wrong(trace: Trace) -> Trace:
        assert trace.prompt_logprobs is not None
        return replace(trace, prompt_logprobs=(*trace.prompt_logprobs[:2], value, *trace.prompt_logprobs[3:]))

    (finding,) = findings(alone(), wrong)
    assert (finding.where["side"], finding.where["position"], finding.where["token"]) == ("prompt", 3, PROMPT[3])


def test_a_word_among_them_is_refused_at_the_door() -> None:
    def with_words(trace: Trace) -> Trace:
        return replace(trace, prompt_logprobs=("much",) * 7)  # type: ignore[arg-type]

    (finding,) = judge(alone(), [COMPLETES], Oracle(), subject_of(Altered(with_words))).findings
    assert "prompt_logprobs" in str(finding.observed)


def test_an_engine_that_does_not_tell_them_gets_no_request_that_asks() -> None:
    able = Abilities(dtypes=("float64",), drafts=("scripted",), sessions=True, ranks=(1, 2), prompt_logprobs=True)
    assert able.outside(alone()) is None
    assert replace(able, prompt_logprobs=False).outside(alone()) == "prompt_logprobs"
    assert able.outside(replace(alone(), ranks=2)) == "prompt_logprobs on 2 ranks"
    mate = session(mate=Mate(PROMPT, sampling=WITH_LOGPROBS))
    quiet = replace(mate, sampling=Sampling(), layout=KvLayout())
    assert replace(able, prompt_logprobs=False).outside(quiet) == "prompt_logprobs"
    assert not open_planted("cpu-handed-over", None).declaration.prompt_logprobs


def test_a_recorded_trace_holds_them() -> None:
    case = alone()
    trace = open_engine("cpu-eager").run(case)
    (back,) = read_runs(trace_lines(case, trace))
    assert back.trace(case).prompt_logprobs == trace.prompt_logprobs
    (older,) = read_runs(trace_lines(alone(sampling=Sampling()), replace(trace, prompt_logprobs=None)))
    assert older.trace(case).prompt_logprobs is None
