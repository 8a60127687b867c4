"""Sessions: a request does not notice its company, no page is lost, and what is reused is what would be computed."""

from collections import Counter
from collections.abc import Iterator
from dataclasses import replace
from itertools import pairwise

from properties.invariants.rows import compared, placed
from properties.invariants.serving import takes_part
from properties.tolerance.closeness import noise
from properties.tolerance.ties import TIE_SIGMA
from properties.verdict.finding import Compared, Finding
from properties.verdict.invariant import TURNS, Fact, Invariant, NotApplicable, Oracle, Unobserved, needing
from properties.verdict.session_members import Member, members
from properties.verdict.subject import Subject
from properties.verdict.variants import dice
from reference.case import Case
from reference.session import Account, Session
from reference.trace import Stage, Trace


def _alike(name: str, member: Member, other: Trace, oracle: Oracle, subject: Subject, variant: str) -> Iterator[Fact]:
    """Findings where request `member` is not, within a pair's noise, what `other` shows of it.

    Steps are compared while both have the same context and tree; texts may part where the top two logits tie.
    """
    error = noise(member.alone, oracle, subject)
    for number, (one, twin) in enumerate(zip(member.trace.steps, other.steps, strict=False)):
        if one.drafted is None or twin.drafted is None or one.scored is None or twin.scored is None:
            continue
        yield Compared(0)
        if one.context != twin.context or one.drafted.tree != twin.drafted.tree:
            return
        rows = list(range(len(one.drafted.tree)))
        for fact in compared(name, twin, one, rows, rows, error, variant):
            yield placed(fact, number, request=member.number)
            if isinstance(fact, Finding):
                return
        if one.emitted is not None and twin.emitted is not None and one.emitted.tokens != twin.emitted.tokens:
            ranked = twin.scored.logits.copy()
            ranked.partition(ranked.shape[1] - 2, axis=1)
            # Sampled or nearly tied: a coin beside its threshold falls on either side of the noise.
            margin = float((ranked[:, -1] - ranked[:, -2]).min()) if ranked.shape[1] > 1 else float("inf")
            if member.alone.sampling.greedy and margin > TIE_SIGMA * error.logits:
                where: dict[str, int | str] = {"request": member.number, "variant": variant}
                yield Finding(name, Stage.EMITTED, number, where, twin.emitted.tokens, one.emitted.tokens)
            return


def mate_independent(case: Case, oracle: Oracle, subject: Subject) -> Iterator[Fact]:
    """Each request alone, to as many steps: its numbers and tokens are those that it has in company."""
    for member in members(case, subject(case)):
        alone = subject(member.alone)
        yield from _alike("attention.batch-mate-independent", member, alone, oracle, subject, "alone")


def schedule_independent(case: Case, oracle: Oracle, subject: Subject) -> Iterator[Fact]:
    """The same actions with every batch in another order: each request's numbers and tokens stay."""
    assert case.session is not None
    turned = tuple(
        replace(one, requests=one.requests[::-1]) if one.kind in ("step", "preempt") else one
        for one in case.session.actions
    )
    accounts = _accounts(subject(case))
    together = [
        at
        for at, one in enumerate(turned)
        if one != case.session.actions[at] and (not accounts or len(_there(accounts, at) & set(one.requests)) > 1)
    ]
    if not together:
        raise NotApplicable("no action finds two requests")
    other = subject(replace(case, session=Session(case.session.mates, turned)))
    for member in members(case, subject(case)):
        twin = other.shared.requests[member.number] if other.shared is not None else None
        if twin is not None:
            variant = "every batch in reverse order"
            yield from _alike("lossless.schedule-independent", member, twin, oracle, subject, variant)


def allocator_conserves(case: Case, oracle: Oracle, subject: Subject) -> Iterator[Fact]:
    """After every action: free and held pages are all pages, none is both, and nobody writes to a shared one.

    Only a prefix cache keeps pages of requests that left.
    """
    assert case.session is not None
    for number, account in enumerate(_accounts(subject(case))):
        yield Compared(account.total)
        for what, expected, observed in _broken(account, case.layout.traits.keeps_prefixes):
            # In steps, as findings of requests are: that many batches ran before.
            step = sum(action.kind == "step" for action in case.session.actions[:number])
            where: dict[str, int | str] = {"action": number, "side": what}
            yield Finding("cache.allocator-conserves", Stage.COMMITTED, step, where, expected, observed)
            return


def _accounts(trace: Trace) -> tuple[Account, ...]:
    return trace.shared.accounts if trace.shared is not None else ()


def _there(accounts: tuple[Account, ...], at: int) -> set[int]:
    """Requests that could take a step when action `at` began, by the account after the action before."""
    return set(accounts[at - 1].committed) if 0 < at <= len(accounts) else set()


def _broken(account: Account, keeps: bool) -> Iterator[tuple[str, object, object]]:
    """The errors of an account, where the layout `keeps` pages of requests that left: words, expected, observed."""
    holders = Counter(page for table in account.tables.values() for page in table)
    held = set(holders) | set(account.kept)
    if len(set(account.free)) < len(account.free):
        yield "a page is free twice", "every page once", sorted(account.free)
    if account.kept and not keeps:
        yield "a page is kept, and the layout has no prefix cache", "none", sorted(account.kept)
    both = held & set(account.free)
    if both:
        yield "a page is free and held", "none", sorted(both)
    lost = set(range(account.total)) - held - set(account.free)
    if lost:
        yield "a page is neither free nor held", "none", sorted(lost)
    foreign = (held | set(account.free)) - set(range(account.total))
    if foreign:
        yield "a page is outside the pool", f"below {account.total}", sorted(foreign)
    for request, table in account.tables.items():
        size = account.allocated[request] // max(len(table), 1)
        if account.committed[request] > account.allocated[request]:
            yield "committed beyond what is allocated", account.allocated[request], account.committed[request]
        for place, page in enumerate(table):
            written = (place + 1) * size > account.committed[request]
            shared = holders[page] > 1 or page in account.kept
            if written and shared and place * size >= account.committed[request]:
                yield "a page that is still to be written is shared", "one holder", page


def prefix_reuse(case: Case, oracle: Oracle, subject: Subject) -> Iterator[Fact]:
    """Without the prefix cache: each request's numbers and tokens stay, warm or cold."""
    trace = subject(case)
    reused = _reused(_accounts(trace))
    if not _accounts(trace):
        raise Unobserved("the trace does not say which pages are reused")
    if not reused:
        raise NotApplicable("no request began with kept pages")
    cold = subject(replace(case, layout=replace(case.layout, kind="paged")))
    for member in members(case, subject(case)):
        twin = cold.shared.requests[member.number] if cold.shared is not None else None
        if twin is not None:
            yield from _alike("cache.prefix-reuse", member, twin, oracle, subject, "no prefix is reused")


def _reused(accounts: tuple[Account, ...]) -> set[int]:
    """Requests whose block table, when they entered or came back, began with a page that the prefix cache had kept."""
    found = set[int]()
    for before, after in pairwise(accounts):
        for request in set(after.tables) - set(before.tables):
            if set(after.tables[request][:1]) & set(before.kept):
                found.add(request)
    return found


def state_isolated(case: Case, oracle: Oracle, subject: Subject) -> Iterator[Fact]:
    """Drop one interruption: every other request's numbers and tokens stay."""
    assert case.session is not None
    kinds = ("preempt", "cancel", "evict")
    places = [at for at, one in enumerate(case.session.actions) if one.kind in kinds]
    accounts = _accounts(subject(case))
    if accounts:  # dropping what happened to nobody leaves the same session
        places = [at for at in places if _there(accounts, at) & set(case.session.actions[at].requests)]
    stepped = {member.number for member in members(case, subject(case))}
    places = [at for at in places if stepped - set(case.session.actions[at].requests)]
    if not places:
        raise NotApplicable("nothing is interrupted beside a request that took a step")
    at = places[int(dice(case, "interruption").integers(len(places)))]
    gone = case.session.actions[at]
    actions = (*case.session.actions[:at], *case.session.actions[at + 1 :])
    other = subject(replace(case, session=Session(case.session.mates, actions)))
    for member in members(case, subject(case)):
        twin = other.shared.requests[member.number] if other.shared is not None else None
        if twin is not None and member.number not in gone.requests:
            variant = f"without action {at}, {gone.kind} of {list(gone.requests)}"
            yield from _alike("lossless.interruption-isolated", member, twin, oracle, subject, variant)


def _session(case: Case) -> bool:
    return case.session is not None


def _paged(case: Case) -> bool:
    return case.session is not None and case.layout.traits.pages


def _prefixed(case: Case) -> bool:
    return case.session is not None and case.layout.traits.keeps_prefixes


SCORED = needing(Stage.SCORED)

INVARIANTS = (
    Invariant(
        "attention.batch-mate-independent",
        "A request's numbers and tokens are those that it has alone.",
        SCORED,
        mate_independent,
        _session,
        every=2,
        speaks_of="session",
    ),
    Invariant(
        "lossless.schedule-independent",
        "The order of the requests in a batch changes nothing.",
        SCORED,
        schedule_independent,
        _session,
        every=TURNS,
        speaks_of="session",
    ),
    Invariant(
        "lossless.interruption-isolated",
        "A request that is cancelled, evicted or thrown back leaves every other one's output unchanged.",
        SCORED,
        state_isolated,
        _session,
        every=TURNS,
        speaks_of="session",
    ),
    Invariant(
        "lossless.takes-part",
        "A request takes every step that names it until it ends, and no other.",
        needing(),
        takes_part,
        speaks_of="both",
    ),
    Invariant(
        "cache.allocator-conserves",
        "Free and held pages are all pages, one to be written has one holder, and only a prefix cache keeps any.",
        needing(),
        allocator_conserves,
        _paged,
        speaks_of="session",
    ),
    Invariant(
        "cache.prefix-reuse",
        "A prefix that is reused gives what computing it would give.",
        SCORED,
        prefix_reuse,
        _prefixed,
        every=2,
        speaks_of="session",
    ),
)
