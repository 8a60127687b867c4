"""Invariants of sessions: others change no request, and each takes the steps that actions give it."""

from collections import Counter
from collections.abc import Iterator
from dataclasses import replace

from specverify.properties.invariants.two_runs import (
    accounts_of,
    compare_request,
    has_session,
    largest_block,
    present_requests,
)
from specverify.properties.verdict.filling import FIRST_ACCOUNT, missing_columns
from specverify.properties.verdict.finding import Comparisons, Finding
from specverify.properties.verdict.invariant import TURNS, Fact, Invariant, NotApplicable, Oracle, Unobserved, needing
from specverify.properties.verdict.session_members import members
from specverify.properties.verdict.subject import Subject
from specverify.properties.verdict.variants import dice
from specverify.reference.case import Case
from specverify.reference.session import BATCHES, Account, Roster, Session
from specverify.reference.trace import Shared, Stage, Trace


def schedule_independent(case: Case, oracle: Oracle, subject: Subject) -> Iterator[Fact]:
    """With every batch in reverse order, each request keeps its numbers and tokens."""
    assert case.session is not None
    reversed_actions = tuple(
        replace(action, requests=action.requests[::-1]) if action.kind in BATCHES else action
        for action in case.session.actions
    )
    accounts = accounts_of(subject(case))
    positions = [
        position
        # Without accounts every reversed action counts; with them, only one that finds two requests present.
        for position, action in enumerate(reversed_actions)
        if action != case.session.actions[position]
        and (not accounts or len(present_requests(accounts, position) & set(action.requests)) > 1)
    ]
    if not positions:
        raise NotApplicable("no action finds two requests")
    reversed_trace = subject(replace(case, session=replace(case.session, actions=reversed_actions)))
    for member in members(case, subject(case)):
        twin = reversed_trace.shared.requests[member.number] if reversed_trace.shared is not None else None
        if twin is not None:
            variant = "every batch in reverse order"
            yield from compare_request("lossless.schedule-independent", member, twin, oracle, subject, variant)


def interruption_isolated(case: Case, oracle: Oracle, subject: Subject) -> Iterator[Fact]:
    """Without one of the interruptions, every request that it did not name keeps its numbers and tokens."""
    assert case.session is not None
    kinds = ("preempt", "cancel", "evict")
    places = [position for position, action in enumerate(case.session.actions) if action.kind in kinds]
    accounts = accounts_of(subject(case))
    if accounts:  # an interruption that met no living request changes nothing, so its removal proves nothing
        places = [
            position
            for position in places
            if present_requests(accounts, position) & set(case.session.actions[position].requests)
        ]
    stepped = {member.number for member in members(case, subject(case))}
    places = [position for position in places if stepped - set(case.session.actions[position].requests)]
    if not places:
        raise NotApplicable("nothing is interrupted beside a request that took a step")
    position = places[int(dice(case, "interruption").integers(len(places)))]
    removed = case.session.actions[position]
    actions = (*case.session.actions[:position], *case.session.actions[position + 1 :])
    variant_trace = subject(replace(case, session=replace(case.session, actions=actions)))
    for member in members(case, subject(case)):
        twin = variant_trace.shared.requests[member.number] if variant_trace.shared is not None else None
        if twin is not None and member.number not in removed.requests:
            variant = f"without action {position}, {removed.kind} of {list(removed.requests)}"
            yield from compare_request("lossless.interruption-isolated", member, twin, oracle, subject, variant)


SCORED = needing(Stage.SCORED)


def takes_part(case: Case, oracle: Oracle, subject: Subject) -> Iterator[Fact]:
    """Each request takes every step that names it until it ends, and leaves when it is cancelled or evicted.

    The actions are replayed on request numbers alone, which gives the steps that each request is due. A launched step
    may count later or never: it makes no step due. In a pool with limited pages any request may have to wait, so steps
    are not counted there; instead, no request may wait for pages that no other request holds. An engine that batches by
    itself owes each request an output that it does not cancel. Without a session, a request takes at most as many steps
    as its case allows.
    """
    name = "lossless.takes-part"
    trace = subject(case)
    if case.session is None:
        yield Comparisons()
        num_steps = len(trace.steps)
        if not trace.steps and not trace.output:
            yield Finding(name, Stage.DRAFTED, 0, {}, "a step", "none")
        elif case.steps and num_steps > case.steps:
            yield Finding(name, Stage.DRAFTED, case.steps, {}, f"at most {case.steps} steps", num_steps)
        return
    if trace.shared is None:
        raise Unobserved("the trace does not say what the requests of the session did")
    if case.session.continuous:
        yield from _missing_outputs(case.session, trace.shared)
        return
    for index, (action, account) in enumerate(zip(case.session.actions, trace.shared.accounts, strict=False)):
        yield Comparisons(action.kind in ("cancel", "evict"))
        served = set(action.requests) & set(account.committed) if action.kind in ("cancel", "evict") else set()
        for number in sorted(served):
            where: dict[str, int | str] = {"request": number, "action": index}
            yield Finding(name, Stage.COMMITTED, 0, where, f"nothing of it after {action.kind}", "it is still served")
    if case.may_wait:
        yield from _waiting_findings(case, trace.shared)
        return
    roster = Roster(1 + len(case.session.mates))
    steps, launched = Counter[int](), Counter[int]()
    filled = _filled_by_actions(case, trace.shared)
    for index, action in enumerate(case.session.actions):
        admitted_requests = roster.admitted(action)
        if action.kind in ("step", "first"):
            steps.update(number for number in admitted_requests if number not in filled.get(index, ()))
        elif action.kind == "launch":
            launched.update(admitted_requests)
        elif action.kind != "fork":
            for number in admitted_requests:
                roster.move(action.kind, number)
        elif admitted_requests:
            source, twin = admitted_requests
            own_prompt = case.session.mates[twin - 1].prompt
            # The twin enters unless the source has ended, or the two do not fit: then the trace shows `own_prompt`, or
            # nothing.
            is_ended = _has_ended(trace, source, steps[source])
            if not is_ended and trace.shared.prompts[twin] not in ((), own_prompt):
                roster.move("fork", twin)
    yield Comparisons(len(roster.entered))
    for number in sorted(roster.entered):
        due = steps[number]
        run = _request(trace, number)
        num_steps = 0 if run is None else len(run.steps)
        if run is None or num_steps > due + launched[number] or (num_steps < due and run.finish is None):
            yield Finding(
                name,
                Stage.DRAFTED,
                num_steps,
                {"request": number},
                due,
                "it is not there" if run is None else num_steps,
            )


def _filled_by_actions(case: Case, shared: Shared) -> dict[int, set[int]]:
    """For each action, the requests for which it filled columns of the prompt in place of a step."""
    assert case.session is not None
    filled = {}
    for index, (missing, before, after) in enumerate(
        zip(missing_columns(case, shared), (FIRST_ACCOUNT, *shared.accounts), shared.accounts, strict=False)
    ):
        filled[index] = {number for number in missing if after.committed.get(number, 0) > before.committed[number]}
    return filled


def _missing_outputs(session: Session, shared: Shared) -> Iterator[Finding | Comparisons]:
    """A finding for each request that entered, was not cancelled and has no output."""
    roster = Roster(1 + len(session.mates))
    for action in session.actions:
        roster.play(action)
    yield Comparisons(len(roster.living))
    for number in sorted(roster.living):
        run = shared.requests[number]
        if run is None or not run.output:
            yield Finding("lossless.takes-part", Stage.EMITTED, 0, {"request": number}, "an output", "none")


def _waiting_findings(case: Case, shared: Shared) -> Iterator[Finding | Comparisons]:
    """Findings where a request waits (to enter, to be restored, to step) although it is alone in a pool with room.

    In a layout with pages it needs room for its tokens, the largest block of the session and the overhang; a slot for
    recurrent states is free where it is alone. Every page that it writes to must be its own, so pages of its table that
    the prefix cache holds too may have to be copied. Other pages of the prefix cache are evicted if the room is needed.
    """
    assert case.session is not None
    plans = [case.alone(number) for number in range(1 + len(case.session.mates))]
    block = largest_block(case)
    account = Account((), 0, {}, (), {}, {})
    known_requests = set[int]()
    evicted_lengths = dict[int, int]()
    for index, (action, after) in enumerate(zip(case.session.actions, shared.accounts, strict=False)):
        committed = account.committed
        number = action.requests[0]
        tokens = None  # tokens of the request that must be served now; None if no request must be
        if action.kind == "step" and len(committed) == 1 and set(committed) <= set(action.requests):
            (number,) = committed
            tokens = committed[number] + 1
        elif action.kind == "add" and not committed and number not in known_requests:
            tokens = len(plans[number].prompt)
        elif action.kind == "restore" and not committed and number in evicted_lengths:
            tokens = evicted_lengths[number] + 1
        # A page that the prefix cache also holds is shared: writing to it needs a copy in a free page.
        copied = _pages_to_copy(account, number)
        paged = case.layout.traits.pages
        fits = tokens is not None and (not paged or case.layout.pages_for(tokens + block) + copied <= after.total)
        if after.draft is not None and tokens is not None:
            copied = 0 if account.draft is None else _pages_to_copy(account.draft, number)
            fits = fits and case.layout.of_draft.pages_for(tokens + block) + copied <= after.draft.total
        if fits:
            yield Comparisons()
            waits = after.committed.get(number) == committed.get(number)  # a step commits tokens or ends the request
            if waits:
                step = sum(earlier.kind == "step" for earlier in case.session.actions[:index])
                where: dict[str, int | str] = {"request": number, "action": index}
                expected = f"{action.kind}: no other request holds a page or slot, and the pool has room for it"
                yield Finding("lossless.takes-part", Stage.COMMITTED, step, where, expected, "it waits")
                return
        if action.kind == "evict" and number in committed:
            evicted_lengths[number] = committed[number]
        elif action.kind == "cancel" or number in after.committed:
            evicted_lengths.pop(number, None)
        known_requests |= set(after.committed)
        account = after


def _pages_to_copy(account: Account, number: int) -> int:
    """The pages of the request's table that the prefix cache holds too."""
    return len(set(account.tables.get(number, ())) & set(account.kept))


def _has_ended(trace: Trace, number: int, due: int) -> bool:
    """Whether the request had finished after `due` steps."""
    run = _request(trace, number)
    return run is not None and run.finish is not None and len(run.steps) <= due


def _request(trace: Trace, number: int) -> Trace | None:
    assert trace.shared is not None
    return trace.shared.requests[number] if number < len(trace.shared.requests) else None


INVARIANTS = (
    Invariant(
        "lossless.schedule-independent",
        "The order of the requests in a batch changes nothing.",
        SCORED,
        schedule_independent,
        has_session,
        every=TURNS,
        speaks_of="session",
    ),
    Invariant(
        "lossless.interruption-isolated",
        "A request that is cancelled, evicted or thrown back leaves every other one's output unchanged.",
        SCORED,
        interruption_isolated,
        has_session,
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
)
