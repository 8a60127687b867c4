"""The invariants of launched steps fail on planted faults and wrong events, and pass what is not shown."""

from collections.abc import Callable
from dataclasses import replace
from functools import cache

import pytest

from specverify.backends.faults.fault import Fault, faults_in
from specverify.backends.faults.serving import launched_steps
from specverify.properties.invariants import ALL
from specverify.properties.strategies.acceptance import continuation
from specverify.properties.verdict.finding import Verdict
from specverify.properties.verdict.judge import judge
from specverify.properties.verdict.subject import Subject
from specverify.reference.case import Case
from specverify.reference.draft import Ngram, Scripted
from specverify.reference.draft.trie import Trie
from specverify.reference.layout import KvLayout
from specverify.reference.malformed import Malformed
from specverify.reference.oracle.decoder import Oracle
from specverify.reference.sampling import Stops
from specverify.reference.session import Action, Event, Mate, Session
from specverify.reference.trace import Stage, Trace
from specverify.reference.tree import RankTree, Tree
from specverify.reports import bundle
from specverify.reports.vocabulary import account
from specverify.setup.subjects import open_planted, subject_of
from tests.cases import CORPUS
from tests.models import LLAMA

ORACLE = Oracle()
INVARIANTS = [invariant for invariant in ALL if invariant.every == 1 and invariant.name != "lossless.draft-independent"]
NAMES = (
    "serving.frames-in-epoch",
    "serving.writes-in-owned-pages",
    "serving.no-placeholder",
    "serving.steps-after-finish",
)
PROMPT = (3, 14, 5, 9, 6)


def act(kind: str, *requests: int) -> Action:
    return Action(kind, requests)


@cache
def ahead() -> Case:
    """Two requests a step ahead: accepted blocks, an eviction with a step in flight, an end inside a block."""
    model = LLAMA
    a, b, *_ = continuation(model, PROMPT)
    line = Scripted((Tree((0, 0, 1), (PROMPT[-1], a, b)),))
    mate = Mate((2, 9, 4), Ngram(RankTree((0, 0, 1), (0, 0, 0)), 3), stops=Stops(5))
    actions = (
        *(act("add", 0), act("add", 1), act("launch", 0, 1), act("launch", 1, 0), act("evict", 1)),
        *(act("resolve", 0), act("restore", 1), act("launch", 1), act("launch", 0, 1), act("launch", 0, 1)),
        *(act("launch", 1, 0), act("step", 0, 1), act("launch", 1, 0), act("launch", 0, 1)),
        *(act("launch", 0, 1), act("resolve", 1), act("resolve", 1), act("resolve", 0)),
    )
    layout = KvLayout(kind="paged", page_size=2)
    return Case(model, PROMPT, line, layout, stops=Stops(7), session=Session((mate,), actions))


@cache
def clean() -> Trace:
    return subject_of(open_planted("cpu-eager", None))(ahead())


def events(kind: str) -> list[Event]:
    assert clean().shared is not None
    return [event for event in clean().shared.events if event.kind == kind]  # type: ignore[union-attr]


def verdict_after(change: Callable[[tuple[Event, ...]], tuple[Event, ...]], name: str) -> Verdict:
    """The verdict of one invariant where the events of the right run are changed."""
    shared = clean().shared
    assert shared is not None
    trace = replace(clean(), shared=replace(shared, events=change(shared.events)))
    invariants = [invariant for invariant in ALL if invariant.name == name]
    return judge(ahead(), invariants, ORACLE, Subject("changed", lambda case: trace, frozenset(Stage)))


def test_a_server_a_step_ahead_is_right_and_every_invariant_has_compared() -> None:
    verdict = judge(ahead(), INVARIANTS, ORACLE, subject_of(open_planted("cpu-eager", None)))
    assert not verdict.findings
    assert {verdict.outcomes[name] for name in NAMES} == {"checked"}
    # Both ways out: results that count, and results that do not, of an eviction and behind an end.
    assert len(events("counted")) > 6
    assert len(events("skipped")) >= 2
    assert any(len(event.tokens) > 1 for event in events("counted"))


def test_the_text_is_that_of_steps_without_overlap() -> None:
    case = ahead()
    assert case.session is not None
    steps = tuple(
        act("step", *action.requests) if action.kind == "launch" else action for action in case.session.actions
    )
    plain = subject_of(open_planted("cpu-eager", None))(
        replace(case, session=Session(case.session.mates, (*steps, *(act("step", 0, 1),) * 5)))
    )
    assert plain.shared is not None
    assert clean().shared is not None
    for plain_request, request in zip(plain.shared.requests, clean().shared.requests, strict=True):  # type: ignore[union-attr]
        assert plain_request is not None
        assert request is not None
        assert plain_request.output == request.output
        assert plain_request.finish == request.finish == "length"


def counted_as(**fields: object) -> Callable[[tuple[Event, ...]], tuple[Event, ...]]:
    """The first counted event changed."""

    def change(shown_events: tuple[Event, ...]) -> tuple[Event, ...]:
        position = next(index for index, event in enumerate(shown_events) if event.kind == "counted")
        return (*shown_events[:position], replace(shown_events[position], **fields), *shown_events[position + 1 :])  # type: ignore[arg-type]

    return change


def launched_with(**fields: object) -> Callable[[tuple[Event, ...]], tuple[Event, ...]]:
    """The first launch changed."""
    return lambda shown_events: (replace(shown_events[0], **fields), *shown_events[1:])  # type: ignore[arg-type]


def every_skipped_counts(shown_events: tuple[Event, ...]) -> tuple[Event, ...]:
    return tuple(replace(event, kind="counted") if event.kind == "skipped" else event for event in shown_events)


def again(shown_events: tuple[Event, ...]) -> tuple[Event, ...]:
    """The last results that the host met, met once more."""
    return (*shown_events, shown_events[-1])


def launched_behind_the_end(shown_events: tuple[Event, ...]) -> tuple[Event, ...]:
    return (*shown_events, replace(shown_events[0], frame=99, action=shown_events[-1].action))


def skipped_behind_the_end(shown_events: tuple[Event, ...]) -> tuple[Event, ...]:
    return (*shown_events, *(replace(shown_events[-1], kind="skipped", frame=90 + offset) for offset in range(2)))


@pytest.mark.parametrize(
    ("change", "name", "stage"),
    [
        (counted_as(request=1), NAMES[0], Stage.EMITTED),
        (counted_as(frame=77), NAMES[0], Stage.EMITTED),
        (counted_as(kind="skipped"), NAMES[0], Stage.EMITTED),
        (counted_as(tokens=(1, 1, 1, 1)), NAMES[0], Stage.EMITTED),
        (counted_as(step=5), NAMES[0], Stage.EMITTED),
        (every_skipped_counts, NAMES[0], Stage.EMITTED),
        (again, NAMES[0], Stage.EMITTED),
        (launched_with(owned=()), NAMES[1], Stage.ATTENDED),
        (launched_with(inputs=(-1,)), NAMES[2], Stage.LOWERED),
        (launched_with(inputs=(PROMPT[-1], 99)), NAMES[2], Stage.LOWERED),
        (launched_behind_the_end, NAMES[3], Stage.EMITTED),
        (skipped_behind_the_end, NAMES[3], Stage.EMITTED),
    ],
)
def test_wrong_events_fail(change: Callable[[tuple[Event, ...]], tuple[Event, ...]], name: str, stage: Stage) -> None:
    assert not verdict_after(lambda shown_events: shown_events, name).findings
    first = verdict_after(change, name).first
    assert first is not None
    assert (first.invariant, first.stage) == (name, stage)
    assert "{" not in account(first)


@pytest.mark.parametrize("name", NAMES)
def test_without_events_nothing_is_judged(name: str) -> None:
    assert verdict_after(lambda shown_events: (), name).outcomes[name] == "unobserved"


@pytest.mark.parametrize("fault", faults_in(launched_steps), ids=lambda fault: str(fault.name))
def test_a_planted_fault_is_found_at_its_stage(fault: Fault) -> None:
    case = bundle.load(CORPUS / f"{fault.name}.json").case
    verdict = judge(case, INVARIANTS, ORACLE, subject_of(open_planted("cpu-eager", fault.name)))
    assert verdict.first is not None
    assert verdict.first.stage is fault.stage
    assert not judge(case, INVARIANTS, ORACLE, subject_of(open_planted("cpu-eager", None))).findings


def test_a_shared_trie_is_not_launched_ahead() -> None:
    with pytest.raises(Malformed, match="launch"):
        replace(ahead(), draft=Trie(RankTree((0, 0), (0, 0)), 2).as_shared)
