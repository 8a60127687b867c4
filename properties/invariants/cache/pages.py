"""Invariants of a session's pages and slots: bookkeeping of the pools, reuse of prefixes.

No page is lost, free twice, or written by one request while another holds it. No slot is lost or owned twice. A prefix
that the prefix cache reuses gives the numbers that computing it would give.
"""

from collections import Counter
from collections.abc import Iterator
from dataclasses import replace
from itertools import pairwise

from specverify.properties.invariants.two_runs import accounts_of, compare_request, largest_reserve
from specverify.properties.verdict.filling import missing_columns
from specverify.properties.verdict.finding import Comparisons, Finding
from specverify.properties.verdict.invariant import Fact, Invariant, NotApplicable, Oracle, Unobserved, needing
from specverify.properties.verdict.session_members import members
from specverify.properties.verdict.subject import Subject
from specverify.reference.case import Case
from specverify.reference.layout import KvLayout
from specverify.reference.session import Account
from specverify.reference.trace import Stage


def allocator_conserves(case: Case, oracle: Oracle, subject: Subject) -> Iterator[Fact]:
    """After every action, each page of the pool is either free or held, and no request may write to a shared page.

    Each slot of recurrent states is either free or has one owner, and each living request owns one.

    Only a prefix cache keeps pages of requests that have left. No request holds more pages than its columns, the
    largest block of the session and the reserve of the layout (`overhang`) need.
    """
    assert case.session is not None
    ahead = largest_reserve(case)
    trace = subject(case)
    # Behind each action: a prompt that is not filled yet has the pages of all its tokens.
    waiting = missing_columns(case, trace.shared)[1:] if trace.shared is not None else ()
    for number, account in enumerate(accounts_of(trace)):
        due = replace(account, committed=account.committed | waiting[number])
        for pool, layout, words in _pools(account, case.layout):
            slots = layout.state_slots if _shows_slots(pool) else 0
            yield Comparisons(pool.total + slots)
            for error, expected, observed in (
                *_account_errors(pool, layout),
                *_beyond_reserve(pool, layout, due, ahead),
                *_slot_errors(pool, layout.state_slots),
            ):
                # The number of batches that ran before the action, since findings of requests count steps too.
                step = sum(action.kind == "step" for action in case.session.actions[:number])
                where: dict[str, int | str] = {"action": number, "side": words + error}
                yield Finding("cache.allocator-conserves", Stage.COMMITTED, step, where, expected, observed)
                return


def _pools(account: Account, layout: KvLayout) -> Iterator[tuple[Account, KvLayout, str]]:
    """The target's pool of pages, then the drafts' where these have one; with its layout, and words before its errors.

    A draft may lag behind its target, whose columns it is to have: its pages are those of the longer of the two. The
    slots of recurrent states stand with the target's pages.
    """
    yield account, layout, ""
    if account.draft is not None:
        yield account.draft, layout.of_draft, "drafts: "


def _account_errors(account: Account, layout: KvLayout) -> Iterator[tuple[str, object, object]]:
    """The errors of an account of the pages of `layout`: (words, expected, observed)."""
    holders = Counter(page for table in account.tables.values() for page in table)
    held_pages = set(holders) | set(account.kept)
    if len(set(account.free)) < len(account.free):
        yield "a page is free twice", "every page once", sorted(account.free)
    if account.kept and not layout.traits.keeps_prefixes:
        yield "a page is kept, and the layout has no prefix cache", "none", sorted(account.kept)
    if account.stored > layout.second_tier:
        yield "the second tier holds more pages than it has room for", layout.second_tier, account.stored
    if account.brought and not layout.second_tier:
        yield "a page came back, and the layout has no second tier", "none", sorted(account.brought)
    both = held_pages & set(account.free)
    if both:
        yield "a page is free and held", "none", sorted(both)
    lost = set(range(account.total)) - held_pages - set(account.free)
    if lost:
        yield "a page is neither free nor held", "none", sorted(lost)
    foreign = (held_pages | set(account.free)) - set(range(account.total))
    if foreign:
        yield "a page is outside the pool", f"below {account.total}", sorted(foreign)
    for request, table in account.tables.items():
        size = account.allocated[request] // max(len(table), 1)
        if account.committed[request] > account.allocated[request]:
            yield "committed beyond what is allocated", account.allocated[request], account.committed[request]
        for place, page in enumerate(table):
            # The page has room behind the committed columns, so that the request may still write to it.
            written = (place + 1) * size > account.committed[request]
            shared = holders[page] > 1 or page in account.kept
            if written and shared and place * size >= account.committed[request]:
                yield "a page that is still to be written is shared", "one holder", page


def _shows_slots(account: Account) -> bool:
    """Whether an engine says whose the slots are; no account of an engine with slots has neither owner nor free one."""
    return bool(account.slots or account.free_slots)


def _slot_errors(account: Account, total: int) -> Iterator[tuple[str, object, object]]:
    """The errors of an account of `total` slots of recurrent states: (words, expected, observed)."""
    if not _shows_slots(account):
        return
    owners = Counter(account.slots.values())
    slots, free, owned = set(range(total)), set(account.free_slots), set(owners)
    if len(free) < len(account.free_slots):
        yield "a slot of recurrent states is free twice", "every slot once", sorted(account.free_slots)
    if max(owners.values(), default=1) > 1:
        yield "a slot of recurrent states has two owners", "one owner", dict(sorted(account.slots.items()))
    if free & owned:
        yield "a slot of recurrent states is free and owned", "none", sorted(free & owned)
    if slots - free - owned:
        yield "a slot of recurrent states is neither free nor owned", "none", sorted(slots - free - owned)
    if (free | owned) - slots:
        yield "a slot of recurrent states is outside the pool", f"below {total}", sorted((free | owned) - slots)
    without = set(account.committed) - set(account.slots)
    if without:
        yield "a request has no slot of recurrent states", "one slot each", sorted(without)


def _beyond_reserve(
    account: Account, layout: KvLayout, target: Account, ahead: int
) -> Iterator[tuple[str, object, object]]:
    """A request that holds more pages of a pool than it may: (words, expected, observed).

    Beyond its committed columns, or those of its `target`, it may have `ahead` columns of open blocks, its root's among
    them, and the reserve of the layout (`overhang`).
    """
    for request, table in account.tables.items():
        committed = max(account.committed[request], target.committed.get(request, 0))
        max_pages = layout.pages_for(committed + ahead)
        if len(table) > max_pages:
            yield "more pages than columns, block and reserve need", f"at most {max_pages} pages", f"{len(table)} pages"
        room = max_pages * layout.page_size
        columns = account.allocated[request]
        if columns > room:
            yield "more room than columns, block and reserve need", f"at most {room} columns", columns


def prefix_reuse(case: Case, oracle: Oracle, subject: Subject) -> Iterator[Fact]:
    """Without the prefix cache, each request of the session has the same numbers and tokens."""
    trace = subject(case)
    reusing_requests = _reusing_requests(accounts_of(trace))
    # Accounts alone reveal reuse; without them "nothing was reused" would be a guess.
    if not accounts_of(trace):
        raise Unobserved("the trace does not say which pages are reused")
    if not reusing_requests:
        raise NotApplicable("no request began with kept pages")
    cold = subject(replace(case, layout=case.layout.of_kind("paged")))
    for member in members(case, subject(case)):
        twin = cold.shared.requests[member.number] if cold.shared is not None else None
        if twin is not None:
            yield from compare_request("cache.prefix-reuse", member, twin, oracle, subject, "no prefix is reused")


def _reusing_requests(accounts: tuple[Account, ...]) -> set[int]:
    """Requests whose block table began, when they entered or came back, with a page that the prefix cache held."""
    requests = set[int]()
    drafts = tuple(account.draft for account in accounts if account.draft is not None)
    for before, after in (*pairwise(accounts), *pairwise(drafts)):
        for request in set(after.tables) - set(before.tables):
            if set(after.tables[request][:1]) & {*before.kept, *after.brought}:
                requests.add(request)
    return requests


INVARIANTS = (
    Invariant(
        "cache.allocator-conserves",
        "Free and held pages are all pages, one to be written has one holder, only a prefix cache keeps any, and no "
        "request holds more than its columns, block and reserve need; each slot of recurrent states is free or owned.",
        needing(),
        allocator_conserves,
        lambda case: case.session is not None and (case.layout.traits.pages or case.layout.state_slots > 0),
        speaks_of="session",
    ),
    Invariant(
        "cache.prefix-reuse",
        "A prefix that is reused gives what computing it would give.",
        needing(Stage.SCORED),
        prefix_reuse,
        lambda case: case.session is not None and case.layout.traits.keeps_prefixes,
        every=2,
        speaks_of="session",
    ),
)
