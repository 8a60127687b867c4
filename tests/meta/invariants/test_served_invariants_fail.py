"""Serving: drafts that are switched, requests that wait for nobody, and counters, each wrong once and right once."""

from collections.abc import Callable
from dataclasses import replace

import pytest

from specverify.backends import faults
from specverify.backends.compositions import open_cpu
from specverify.backends.engine.kv.prefix import PrefixCache
from specverify.backends.faults.fault import Fault
from specverify.properties.strategies.models import small_draft
from specverify.properties.verdict.finding import Comparisons, Finding
from specverify.properties.verdict.subject import Crash, Refusal, Subject
from specverify.reference.case import Case
from specverify.reference.draft import Draft, LanguageModel, Ngram, Scripted
from specverify.reference.layout import KvLayout
from specverify.reference.sampling import Stops
from specverify.reference.session import Action, Mate, Session
from specverify.reference.trace import Stage, Trace
from specverify.reference.tree import RankTree, Tree
from specverify.setup.subjects import subject_of
from tests.corruption import BY_NAME, ORACLE, corrupted_subject, outcomes
from tests.models import LLAMA

PROMPT = (3, 14, 15, 9, 6)
FORK = RankTree((0, 0, 1, 0), (0, 0, 0, 1))
OWN_DRAFT = LanguageModel(LLAMA, FORK)
STRANGER = LanguageModel(small_draft(17, 0), FORK)
SCRIPT = Scripted((Tree((0, 0, 0), (6, 1, 2)), Tree((0, 0), (6, 4))))


def clean() -> Subject:
    return subject_of(open_cpu())


def findings(name: str, subject: Subject, case: Case) -> tuple[Finding, ...]:
    ((_, outcome, case_findings),) = outcomes(name, subject, {"it": case})
    assert outcome == ("failed" if case_findings else "checked")
    return case_findings


def session(mates: tuple[Mate, ...], happened: str, layout: KvLayout, draft: Draft = Scripted()) -> Case:
    """Actions in words: `kind number number, ...`."""
    words = [phrase.split() for phrase in happened.split(", ")]
    actions = tuple(Action(kind, tuple(map(int, numbers))) for kind, *numbers in words)
    return Case(LLAMA, PROMPT, draft, layout, stops=Stops(3), session=Session(mates, actions))


def switching(old: Draft, new: Draft) -> Case:
    """Two steps by one draft and two by another."""
    step = Action("step", (0,))
    actions = (Action("add", (0,)), step, step, Action("switch", (0,), new), step, step)
    return Case(LLAMA, PROMPT, old, stops=Stops(16), session=Session((), actions))


def otherwise(change: Callable[[Case], Case]) -> Subject:
    """The clean engine, which runs another case than it was asked for."""
    engine = clean()

    def run(case: Case) -> Trace | Refusal | Crash:
        return engine(change(case))

    return Subject("otherwise", run, engine.reveals)


def switched_to(draft: Draft) -> Callable[[Case], Case]:
    """Whatever a request switches to, it gets this draft."""

    def change(case: Case) -> Case:
        assert case.session is not None
        actions = tuple(
            replace(action, draft=draft) if action.draft is not None else action for action in case.session.actions
        )
        return replace(case, session=replace(case.session, actions=actions))

    return change


@pytest.mark.parametrize(
    ("old", "new", "instead"),
    [
        (OWN_DRAFT, STRANGER, OWN_DRAFT),
        (STRANGER, OWN_DRAFT, STRANGER),
        (OWN_DRAFT, Ngram(FORK), OWN_DRAFT),
        (Ngram(FORK), SCRIPT, Scripted(SCRIPT.trees[1:])),
        (Scripted(), SCRIPT, Scripted()),
    ],
    ids=["the-old-model-stays", "a-stranger-stays", "no-trie", "the-script-goes-on", "no-script"],
)
def test_a_switch_that_keeps_the_old_draft_is_named(old: Draft, new: Draft, instead: Draft) -> None:
    case = switching(old, new)
    assert not findings("draft.switched", clean(), case)
    first, *_ = findings("draft.switched", otherwise(switched_to(instead)), case)
    assert (first.stage, first.step, first.where["request"]) == (Stage.DRAFTED, 2, 0)


def test_a_request_that_never_switches_is_not_asked() -> None:
    case = session((), "add 0, step 0", KvLayout(), OWN_DRAFT)
    ((_, outcome, _),) = outcomes("draft.switched", clean(), {"it": case})
    assert outcome == "not_applicable"


class Hoarding(PrefixCache):
    """A prefix cache that lets go of nothing."""

    def evict(self, count: int) -> None:
        """Too bad."""


def hoarding() -> Subject:
    backend = open_cpu()
    faults.plant(
        backend,
        Fault(
            "hoards",
            Stage.COMMITTED,
            "A prefix cache lets go of nothing.",
            "",
            "",
            lambda seams: replace(seams, kv=replace(seams.kv, prefix=Hoarding)),
        ),
    )
    return subject_of(backend)


def mate(*prompt: int) -> Mate:
    return Mate(prompt, stops=Stops(3))


FULL = "add 1, step 1, cancel 1, add 2, step 2, cancel 2, "
"""Their pages are kept, and few are free."""


@pytest.mark.parametrize(
    ("happened", "message"),
    [
        (FULL + "add 0", "add"),
        (FULL + "add 3, step 3, step 3, step 3, step 3, step 3, step 3", "step"),
        ("add 0, evict 0, " + FULL + "restore 0", "restore"),
    ],
    ids=["to-enter", "to-step", "to-come-back"],
)
def test_who_is_alone_waits_for_nobody(happened: str, message: str) -> None:
    layout = KvLayout(kind="prefix", page_size=2, pages=tuple(range(8)))
    mates = (mate(7, 8, 2, 7, 1, 5, 5), mate(1, 2, 3, 4, 5, 6, 7), Mate((9,), stops=Stops(12)))
    case = session(mates, happened, layout)
    assert not findings("lossless.takes-part", clean(), case)
    (finding,) = findings("lossless.takes-part", hoarding(), case)
    assert str(finding.expected).startswith(message)
    assert finding.observed == "it waits"


def test_a_pool_that_is_too_small_for_two_makes_one_wait_and_nobody_is_blamed() -> None:
    layout = KvLayout(kind="paged", page_size=2, pages=tuple(range(6)))
    case = session((mate(*PROMPT),), "add 0, add 1, step 0 1, step 1", layout)
    trace = clean()(case)
    assert trace.shared is not None
    assert trace.shared.accounts[-1].committed == {0: 4, 1: 4}, "neither should have found room for a step"
    assert not findings("lossless.takes-part", clean(), case)


def idle(case: Case, trace: Trace, time: int) -> Trace:
    """Request 1 took no step."""
    assert trace.shared is not None
    first, second, *other_requests = trace.shared.requests
    assert second is not None
    stood = replace(second, steps=(), output=(), finish=None)
    return replace(trace, shared=replace(trace.shared, requests=(first, stood, *other_requests)))


def test_nobody_forks_from_a_request_that_has_ended() -> None:
    case = session(
        (mate(4), mate(7, 8)), "add 0, add 2, step 0, step 0, step 0, fork 0 1, step 1, fork 2 1, step 1", KvLayout()
    )
    trace = clean()(case)
    assert trace.shared is not None
    assert trace.finish == "length"
    assert trace.shared.prompts[1] == (7, 8, 4)
    assert not findings("lossless.takes-part", clean(), case)
    (finding,) = findings("lossless.takes-part", corrupted_subject(idle), case)
    assert (finding.where, finding.expected, finding.observed) == ({"request": 1}, 1, 0)


def test_nobody_steps_more_often_than_was_asked() -> None:
    case = Case(LLAMA, PROMPT, stops=Stops(12), steps=2)
    assert not findings("lossless.takes-part", clean(), case)
    (finding,) = findings("lossless.takes-part", otherwise(lambda asked_case: replace(asked_case, steps=3)), case)
    assert (finding.step, finding.expected, finding.observed) == (2, "at most 2 steps", 3)


def test_pages_without_a_prefix_cache_are_kept_by_nobody() -> None:
    case = session((mate(*PROMPT),), "add 0, step 0, cancel 0, add 1, step 1", KvLayout(kind="paged", page_size=2))
    keeping = otherwise(lambda asked_case: replace(asked_case, layout=replace(asked_case.layout, kind="prefix")))
    assert not findings("cache.allocator-conserves", clean(), case)
    (finding,) = findings("cache.allocator-conserves", keeping, case)
    assert finding.where["side"] == "a page is kept, and the layout has no prefix cache"


def count_draft_calls(case: Case, trace: Trace, time: int) -> Trace:
    assert trace.accounting is not None
    return replace(trace, accounting=replace(trace.accounting, draft_calls=len(trace.steps)))


def fell_back(case: Case, trace: Trace, time: int) -> Trace:
    return replace(trace, fallbacks={"a reason": trace.attention_calls + 1})


def test_counters_that_cannot_be_are_named() -> None:
    case = Case(LLAMA, PROMPT, STRANGER, stops=Stops(3))
    assert not findings("lossless.accounting", clean(), case)
    assert [
        finding.where["side"] for finding in findings("lossless.accounting", corrupted_subject(count_draft_calls), case)
    ] == ["draft_calls"]
    (finding,) = findings("lossless.accounting", corrupted_subject(fell_back), case)
    assert finding.where["side"] == "fallback: a reason"
    uncounted = replace(clean()(case), attention_calls=0, fallbacks={"a reason": 3})
    silent = Subject("silent", lambda _: uncounted, clean().reveals)
    assert list(BY_NAME["lossless.accounting"].check(case, ORACLE, silent)) == [Comparisons(5), Comparisons(2)]
