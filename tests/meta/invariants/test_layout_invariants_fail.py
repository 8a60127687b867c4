"""Invariants of layouts and sessions are shown to fail before they are believed, and so is each fault of pages."""

from collections.abc import Callable
from dataclasses import replace
from functools import cache

import pytest

from specverify.backends.compositions import open_cpu
from specverify.backends.faults.cache import contiguous_layouts, page_release, paged_writes, shared_pages, stale_columns
from specverify.backends.faults.fault import faults_in
from specverify.properties.invariants import ALL
from specverify.properties.invariants.attention import whole_runs
from specverify.properties.invariants.cache import layouts
from specverify.properties.invariants.cache import pages as allocation
from specverify.properties.invariants.lossless import sessions
from specverify.properties.strategies.acceptance import continuation
from specverify.properties.strategies.models import GALLERY
from specverify.properties.verdict.judge import judge
from specverify.reference.architecture import Seeded
from specverify.reference.case import Case
from specverify.reference.draft import LanguageModel, Scripted
from specverify.reference.layout import KvLayout
from specverify.reference.sampling import Stops
from specverify.reference.session import Account, Action, Mate, Session
from specverify.reference.trace import Scored, Trace
from specverify.reference.tree import RankTree, Tree
from specverify.reports import bundle
from specverify.setup.subjects import subject_of
from tests.cases import CORPUS
from tests.corruption import ORACLE, Corruption, in_stage, outcomes, where, wrong
from tests.models import LLAMA

FAULTS = (
    *faults_in(contiguous_layouts),
    *faults_in(stale_columns),
    *faults_in(paged_writes),
    *faults_in(shared_pages),
    *faults_in(page_release),
)


PROMPT = (3, 14, 5, 9, 6)


def act(kind: str, *requests: int) -> Action:
    return Action(kind, requests)


@cache
def fixed_cases() -> dict[str, Case]:
    """Each layout alone and in company, with full and half acceptance, forks, evictions and cancelled requests."""
    model, windowed = LLAMA, Seeded(GALLERY[5], 0)
    a, b, c, d, *_ = continuation(model, PROMPT)
    e, f, *_ = continuation(windowed, PROMPT)

    def off(token: int) -> int:
        return (token + 1) % 17

    # The second child is accepted, and a child of it whose row comes before its parent's.
    fork = Tree((0, 0, 3, 0, 1), (6, off(a), b, a, 1))
    line = Tree((0, 0, 1, 2), (6, a, b, c))
    late = Tree((0,), (c,))
    ring = Tree((0, 0, 0, 2, 1), (6, off(e), e, f, 4))
    branches = RankTree((0, 0, 0, 1), (0, 1, 0, 0))
    alone = Case(model, PROMPT, Scripted((fork, late)), stops=Stops(6))
    mate = Mate((*PROMPT, a, 7), Scripted(), stops=Stops(6))
    wide = Mate((2, 9, 4), Scripted((Tree((0, 0, 0, 0), (4, 1, 2, 3)),)), stops=Stops(6))
    both = Session(
        (wide, mate),
        (act("add", 0), act("add", 1), act("step", 1, 0), act("step", 0), act("preempt", 0), act("step", 0, 1)),
    )
    forked = Session(
        (Mate((1,), Scripted(), stops=Stops(6)), mate),
        (
            *(act("add", 0), act("step", 0), act("fork", 0, 1), act("step", 0, 1), act("step", 1, 0)),
            *(act("cancel", 0), act("step", 1), act("evict", 1), act("restore", 1), act("step", 1)),
        ),
    )
    again = Session(
        (Mate((*PROMPT, a, 7, 8), stops=Stops(6)), Mate((9, 6, 3, 14, 5, 9), stops=Stops(6)), wide),
        (
            *(act("add", 0), act("step", 0), act("evict", 0), act("restore", 0), act("step", 0), act("cancel", 0)),
            *(act("add", 1), act("step", 1), act("add", 2), act("step", 2, 1), act("add", 3), act("step", 3)),
        ),
    )
    drafted = replace(alone, draft=LanguageModel(model, branches))
    pages = KvLayout(kind="paged", page_size=5, overhang=3)
    return {
        "fast": replace(alone, layout=KvLayout("fast")),
        "overwrite": replace(alone, layout=KvLayout(kind="overwrite")),
        "scratch": replace(alone, layout=KvLayout(kind="scratch")),
        "static": replace(alone, layout=KvLayout(kind="static")),
        "ring": Case(windowed, PROMPT, Scripted((ring,)), KvLayout(kind="sliding"), stops=Stops(5)),
        "paged": replace(alone, layout=KvLayout(kind="paged", page_size=1, pages=(*range(1, 40, 2), *range(0, 40, 2)))),
        "line": replace(
            alone,
            draft=Scripted((line, Tree((0, 0, 1, 2), (d, 1, 2, 3)))),
            layout=replace(pages, page_size=1, overhang=0),
        ),
        "company": replace(alone, layout=KvLayout(kind="static", poison="large"), session=both),
        "forked": replace(alone, layout=pages, session=forked),
        "forked full": replace(alone, layout=replace(pages, page_size=1), session=forked),
        "drafted": replace(drafted, layout=replace(pages, page_size=2), session=forked),
        "followed by another text": bundle.load(CORPUS / "head-page-followed-by-another-text.json").case,
        "forked to another draft model": bundle.load(CORPUS / "draft-page-forked-across-models.json").case,
        "again": replace(alone, layout=KvLayout(kind="prefix", page_size=1), session=again),
        "again, drafted": replace(drafted, layout=replace(pages, kind="prefix"), session=again),
        "again in threes": replace(alone, layout=KvLayout(kind="prefix", page_size=3), session=again),
        "slotted": replace(alone, layout=KvLayout(state_slots=3), session=forked),
        "scarce": replace(
            alone,
            layout=KvLayout(kind="prefix", page_size=1, pages=tuple(range(18))),
            session=again,
        ),
    }


def scored_off(case: Case, trace: Trace, time: int) -> Trace:
    """Every logit of every request off by a hair, as if another cell had been read."""
    moved = in_stage("scored", lambda stage: Scored(stage.logits + 1e-3))
    if trace.shared is None:
        return moved(case, trace, time)
    every = tuple(request and moved(case, request, time) for request in trace.shared.requests)
    return replace(trace, shared=replace(trace.shared, requests=every))


def change_account(change: Callable[[Account], Account]) -> Corruption:
    """The account after the third action, changed."""

    def corruption(case: Case, trace: Trace, time: int) -> Trace:
        if trace.shared is None or len(trace.shared.accounts) < 3:
            return trace
        accounts = list(trace.shared.accounts)
        accounts[2] = change(accounts[2])
        return replace(trace, shared=replace(trace.shared, accounts=tuple(accounts)))

    return corruption


def longer(account: Account) -> Account:
    """The first request has committed one column more than its table has room for."""
    return replace(account, committed={request: room + 1 for request, room in account.allocated.items()})


def roomier(account: Account) -> Account:
    """The tables say that they have room for more columns than their pages and the reserve give."""
    return replace(account, allocated={request: 3 * room for request, room in account.allocated.items()})


def in_one_slot(account: Account) -> Account:
    """All requests own slot 0, and the others are free."""
    return replace(account, slots=dict.fromkeys(account.slots, 0), free_slots=(1, 2))


def without(case: Case, trace: Trace, change: Callable[[Trace], Trace | None]) -> Trace:
    """Request 1 changed."""
    assert trace.shared is not None
    requests = tuple(
        change(request) if number == 1 and request else request for number, request in enumerate(trace.shared.requests)
    )
    return replace(trace, shared=replace(trace.shared, requests=requests))


def idle(case: Case, trace: Trace, time: int) -> Trace:
    """Request 1 has left out its last step."""
    return without(case, trace, lambda request: replace(request, steps=request.steps[:-1], finish=None))


def absent(case: Case, trace: Trace, time: int) -> Trace:
    """Request 1 was never let in."""
    return without(case, trace, lambda request: None)


def served(case: Case, trace: Trace, time: int) -> Trace:
    """No request ever leaves."""
    assert trace.shared is not None
    everyone = {number: 1 for number in range(len(trace.shared.requests))}
    accounts = tuple(replace(account, committed=everyone | account.committed) for account in trace.shared.accounts)
    return replace(trace, shared=replace(trace.shared, accounts=accounts))


def is_turned(case: Case) -> bool:
    """Whether the case is one whose batches are in another order."""
    return case.session is not None and act("step", 0, 1) in case.session.actions[:3]


EVERYTHING: list[tuple[str, str | Corruption, tuple[str, ...]]] = [
    ("cache.stale-unreachable", "static-tail-attended", ("static",)),
    ("cache.stale-unreachable", "stale-column-taken-for-cached", ("overwrite",)),
    ("cache.stale-unreachable", where(lambda case: case.layout.poison != "", scored_off), ("paged",)),
    ("attention.page-permutation", "block-written-to-next-in-memory", ("paged",)),
    ("attention.page-permutation", "values-moved-by-token-number", ("paged",)),
    ("cache.page-boundary", "pages-handed-over-from-the-tail", ("forked", "forked full")),
    ("cache.layout-equivalent", "committed-at-flat-index", ("scratch",)),
    ("cache.layout-equivalent", "ring-trimmed-for-one-token", ("ring",)),
    ("cache.layout-equivalent", "crop-makes-new-tensors", ("static",)),
    ("cache.layout-equivalent", where(lambda case: case.layout.kind == "branch", scored_off), ("ring", "paged")),
    ("cache.allocator-conserves", "overhang-never-freed", ("forked",)),
    ("cache.allocator-conserves", "reserve-counted-in-pages", ("forked",)),
    ("cache.allocator-conserves", "page-freed-twice", ("drafted",)),
    ("cache.allocator-conserves", "reserve-freed-from-inside-a-page", ("forked",)),
    ("cache.allocator-conserves", "shared-pages-freed", ("forked",)),
    ("cache.allocator-conserves", "kept-page-evicted-in-use", ("scarce",)),
    (
        "cache.allocator-conserves",
        change_account(lambda account: replace(account, total=account.total + 1)),
        ("forked",),
    ),
    (
        "cache.allocator-conserves",
        change_account(lambda account: replace(account, free=(*account.free, account.total))),
        ("forked",),
    ),
    ("cache.allocator-conserves", change_account(longer), ("forked",)),
    ("cache.allocator-conserves", change_account(roomier), ("forked",)),
    ("cache.allocator-conserves", change_account(lambda account: replace(account, stored=1)), ("forked",)),
    ("cache.allocator-conserves", change_account(lambda account: replace(account, brought=(0,))), ("forked",)),
    *(
        ("cache.allocator-conserves", change_account(change), ("slotted",))
        for change in (
            in_one_slot,
            lambda account: replace(account, slots={}, free_slots=(0, 1, 2)),
            lambda account: replace(account, free_slots=(*account.free_slots, *account.slots.values())),
            lambda account: replace(account, free_slots=account.free_slots * 2),
            lambda account: replace(account, free_slots=()),
            lambda account: replace(account, free_slots=(*account.free_slots, 3)),
        )
    ),
    ("lossless.takes-part", lambda case, trace, time: Trace((), (), None), ("paged",)),
    ("lossless.takes-part", idle, ("company", "forked", "again", "drafted")),
    ("lossless.takes-part", absent, ("company", "forked", "again")),
    ("lossless.takes-part", served, ("forked", "again", "scarce")),
    ("cache.prefix-reuse", "pages-published-unwritten", ("again",)),
    ("cache.prefix-reuse", "reused-prefix-one-too-long", ("again in threes",)),
    ("cache.prefix-reuse", "page-known-by-own-tokens", ("again",)),
    ("attention.batch-mate-independent", "slots-of-equal-rows", ("company",)),
    ("attention.batch-mate-independent", "snapshot-restored-by-lane", ("company",)),
    ("attention.batch-mate-independent", "pages-handed-over-from-the-tail", ("forked full",)),
    ("lossless.schedule-independent", "slots-of-equal-rows", ("company",)),
    ("lossless.schedule-independent", "snapshot-restored-by-lane", ("company",)),
    ("lossless.schedule-independent", where(is_turned, scored_off), ("company",)),
    (
        "lossless.interruption-isolated",
        where(lambda case: case.session is not None and not is_interrupted(case), scored_off),
        ("company",),
    ),
    ("cache.commit-equivalence", "last-layer-not-moved", ("fast", "paged")),
    ("cache.commit-equivalence", "fast-reorder-without-offset", ("fast",)),
    ("cache.commit-equivalence", "scratch-committed-in-row-order", ("scratch",)),
    ("cache.commit-equivalence", "ring-rewound-by-index", ("ring",)),
    ("cache.commit-equivalence", "shared-page-written", ("forked",)),
    ("lossless.completes", "reserved-one-round-behind", ("line",)),
    ("draft.fidelity", "copy-on-write-forgets-draft", ("drafted",)),
    ("draft.fidelity", "draft-page-forked-across-models", ("forked to another draft model",)),
    ("draft.fidelity", "head-page-followed-by-another-text", ("followed by another text",)),
]
"""Invariant, what must make it fail, and the cases that show it."""


def is_interrupted(case: Case) -> bool:
    return case.session is not None and any(action.kind == "preempt" for action in case.session.actions)


@pytest.mark.parametrize(
    ("name", "how", "keys"), EVERYTHING, ids=[f"{name}-{index}" for index, (name, *_) in enumerate(EVERYTHING)]
)
def test_fails_when_it_should(name: str, how: str | Corruption, keys: tuple[str, ...]) -> None:
    cases = {key: fixed_cases()[key] for key in keys}
    case_outcomes = list(outcomes(name, wrong(how), cases))
    assert [key for key, outcome, _ in case_outcomes if outcome == "failed"], [
        outcome for _, outcome, _ in case_outcomes
    ]
    for _, outcome, findings in case_outcomes:
        assert (outcome == "failed") == bool(findings)
        assert {finding.invariant for finding in findings} <= {name}


def test_every_invariant_and_every_fault_has_its_row() -> None:
    names = {name for name, *_ in EVERYTHING}
    assert {
        invariant.name for file in (whole_runs, layouts, allocation, sessions) for invariant in file.INVARIANTS
    } <= names
    assert {fault.name for fault in FAULTS} <= {how for _, how, _ in EVERYTHING if isinstance(how, str)}


def test_the_clean_engine_passes_the_same_cases() -> None:
    """And each invariant has something to say about each of the cases on which it is shown to fail."""
    subject = subject_of(open_cpu(), keep=512)
    for key, case in fixed_cases().items():
        invariants = tuple(
            invariant
            for invariant in ALL
            if any(invariant.name == name and key in keys for name, _, keys in EVERYTHING)
        )
        verdict = judge(case, invariants, ORACLE, subject)
        assert verdict.findings == (), key
        assert set(verdict.outcomes.values()) <= {"checked"}, (key, verdict.outcomes)
