"""The invariant of requests that switch drafts in the middle of their session."""

from collections.abc import Iterator
from dataclasses import replace

from specverify.properties.invariants.draft.proposals import NEEDS, compare_bare_step, compare_proposal
from specverify.properties.invariants.rows import with_place
from specverify.properties.verdict.invariant import Fact, Invariant, NotApplicable, Oracle, Unobserved
from specverify.properties.verdict.subject import Subject
from specverify.properties.verdict.taken_steps import taken_steps
from specverify.reference.case import Case
from specverify.reference.draft import Draft, Scripted
from specverify.reference.malformed import Malformed
from specverify.reference.session import Account, Action
from specverify.reference.trace import Shared


def switched_drafts(case: Case, oracle: Oracle, subject: Subject) -> Iterator[Fact]:
    """Each step of a request that switches drafts proposes the tree that its current draft gives from scratch.

    A switch precedes a step if, at the switch, the request had committed no more tokens than the step's context.
    draft.fidelity cannot judge such a request: there it is a script of its own trees
    (`properties/verdict/session_members.py`).
    """
    assert case.session is not None
    shared = subject(case).shared
    if shared is None or not shared.accounts:
        raise Unobserved("the trace does not say what the requests of the session did")
    if not any(
        action.draft is not None and set(action.requests) & set(account.committed)
        for action, account in actions_with_accounts(case, shared)
    ):
        raise NotApplicable("no request was there to switch its draft")
    steps_by_request = taken_steps(case, shared)
    for request, trace in enumerate(shared.requests):
        changes = [
            (account.committed[request], action.draft)
            for action, account in actions_with_accounts(case, shared)
            if action.draft is not None and request in action.requests and request in account.committed
        ]
        if trace is None or not changes:
            continue
        context = shared.prompts[request][: -len(case.alone(request).prompt)]
        begins = replace(case.alone(request, context), draft=Scripted())
        changes = [change for change in changes if _fits(begins, change[1])]
        changes.insert(0, (0, case.alone(request).draft))
        steps = steps_by_request.get(request, ())
        is_complete = len(steps) == len(trace.steps)
        if not is_complete and any(
            action.kind == "first" and request in action.requests for action in case.session.actions
        ):
            raise Unobserved("the trace does not tell which steps of a request asked its draft")
        place = 0
        last = 0
        for number, step in enumerate(trace.steps):
            current = max(index for index, (length, _) in enumerate(changes) if length <= len(step.context))
            place, last = (place, last) if current == last else (0, current)
            last_emitted = trace.steps[number - 1].emitted if number else None
            if number and last_emitted is None:
                raise Unobserved("the backend does not reveal what each step emitted")
            pending = last_emitted.tokens[-1] if last_emitted is not None and last_emitted.tokens else begins.prompt[-1]
            if is_complete and steps[number].kind == "first":
                if step.drafted is not None:
                    for fact in compare_bare_step("draft.switched", number, step.drafted.tree, pending):
                        yield with_place(fact, request=request)
                continue
            # draft.shared judges a trie that other requests' texts entered.
            if step.drafted is not None and not changes[current][1].shared:
                draft = changes[current][1]
                if draft.dispatch is not None:
                    draft = draft.in_batches(tuple(taken_step.batch for taken_step in steps))
                as_drafted = replace(begins, draft=draft)
                for fact in compare_proposal("draft.switched", as_drafted, oracle, number, step, place, pending):
                    yield with_place(fact, request=request)
            place += 1


def _fits(request: Case, draft: Draft) -> bool:
    """Whether `request` may switch to `draft`: the twin of a fork might outgrow the pool of pages with its trees."""
    try:
        replace(request, draft=draft)
    except Malformed:
        return False
    return True


def actions_with_accounts(case: Case, shared: Shared) -> list[tuple[Action, Account]]:
    """The actions of the session, each with the account after the action."""
    assert case.session is not None
    return list(zip(case.session.actions, shared.accounts, strict=False))


def _switches(case: Case) -> bool:
    return case.session is not None and any(action.kind == "switch" for action in case.session.actions)


INVARIANTS = (
    Invariant(
        "draft.switched",
        "A request that switched drafts proposes what its new draft gives from scratch for the tokens so far.",
        NEEDS,
        switched_drafts,
        _switches,
        speaks_of="session",
    ),
)
