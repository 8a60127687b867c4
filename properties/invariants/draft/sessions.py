"""Invariants of drafts in sessions: requests that switch theirs, and requests that share a trie."""

from collections import Counter
from collections.abc import Iterator
from dataclasses import dataclass, replace

from specverify.properties.invariants.draft.proposals import NEEDS, compare_bare_step, compare_proposal
from specverify.properties.invariants.draft.scores import restarted_case
from specverify.properties.invariants.rows import with_place
from specverify.properties.verdict.filling import missing_columns
from specverify.properties.verdict.invariant import Fact, Invariant, NotApplicable, Oracle, Unobserved
from specverify.properties.verdict.subject import Subject
from specverify.properties.verdict.taken_steps import taken_steps
from specverify.reference.case import Case
from specverify.reference.draft import Draft, Scripted
from specverify.reference.malformed import Malformed
from specverify.reference.oracle import draft as meaning
from specverify.reference.oracle.draft.trie import entries
from specverify.reference.oracle.sampled_step import SampledStep
from specverify.reference.session import Account, Action
from specverify.reference.trace import Shared, Step


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
        if not is_complete and any(request in action.undrafted for action in case.session.actions):
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
            if is_complete and steps[number].bare:
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


@dataclass(frozen=True)
class Event:
    """A moment in the life of a request that shares a trie.

    Attributes:
        text: Its prompt and output up to there.
        num_entered: How many tokens of the text have entered the trie; those after them enter now.
        step: The step whose tree is drafted now; None where tokens enter.
        number: The index of that step.
    """

    request: int
    text: tuple[int, ...]
    num_entered: int = 0
    step: Step | None = None
    number: int = 0


def shared_trie(case: Case, oracle: Oracle, subject: Subject) -> Iterator[Fact]:
    """Each request that shares a trie proposes the tree that follows from all texts that entered it, in their order.

    A prompt enters with its request, and the tokens of a step when they are emitted, in the order of the batch.
    draft.fidelity cannot judge such a request: there it is a script of its own trees
    (`properties/verdict/session_members.py`).
    """
    shared = subject(case).shared
    if shared is None or not shared.accounts:
        raise Unobserved("the trace does not say what the requests of the session did")
    trie_texts: dict[Draft, tuple[tuple[int, ...], ...]] = {}
    num_judged = 0
    for event in _events(case, shared):
        request = case.alone(event.request)
        if event.step is None:
            trie_texts[request.draft] = trie_texts.get(request.draft, ()) + entries(event.text, event.num_entered)
        elif event.step.drafted is not None:
            num_judged += 1
            request_case = restarted_case(replace(request, prompt=event.text[-1:], draft=Scripted()), event.text)
            texts = trie_texts[request.draft]
            question = meaning.Question(event.text, 0, None, SampledStep(request_case, (), 0), entered=texts)
            scripted_case = replace(request_case, draft=Scripted((meaning.propose(request.draft, question).tree,)))
            root = event.text[-1]
            for fact in compare_proposal("draft.shared", scripted_case, oracle, event.number, event.step, 0, root):
                yield with_place(fact, request=event.request)
    if not num_judged:
        raise NotApplicable("no request that shares a trie took a step")


def _events(case: Case, shared: Shared) -> Iterator[Event]:
    """The events of all requests that share a trie; those of a request that switches to another draft end there."""
    texts: dict[int, tuple[int, ...]] = {}
    sharing, steps = set[int](), Counter[int]()
    living: dict[int, int] = {}
    missing = missing_columns(case, shared)
    for number_of_action, (action, account) in enumerate(actions_with_accounts(case, shared)):
        if action.kind in ("add", "fork"):
            number = action.requests[-1]
            if number in account.committed and number not in texts:
                texts[number] = shared.prompts[number]
                if case.alone(number).draft.shared:
                    sharing.add(number)
                    yield Event(number, texts[number])
        elif action.kind == "switch":
            sharing -= set(action.requests) & set(account.committed)
        elif action.kind == "step":
            # A request that waited for pages has as many columns as before; one that met a stop has none. The columns
            # of a prompt that is filled in the forward are no step.
            batch = [
                request
                for request in action.requests
                if request in living
                and account.committed.get(request, -1) != living[request]
                and request not in missing[number_of_action]
            ]
            taken_steps = {request: _step(shared, request, steps[request]) for request in batch}
            for request in (request for request in batch if request in sharing):
                yield Event(request, texts[request], 0, taken_steps[request], steps[request])
            for request in batch:
                emitted = taken_steps[request].emitted
                num_entered = len(texts[request])
                if emitted is None:
                    raise Unobserved("the backend does not reveal what each step emitted")
                texts[request] += emitted.tokens
                steps[request] += 1
                if request in sharing:
                    yield Event(request, texts[request], num_entered)
        living = account.committed


def _step(shared: Shared, request: int, number: int) -> Step:
    trace = shared.requests[request]
    if trace is None or number >= len(trace.steps):
        raise Unobserved("the trace does not hold every step that the accounts tell of")
    return trace.steps[number]


def _shares(case: Case) -> bool:
    return case.session is not None and any(
        case.alone(number).draft.shared for number in range(1 + len(case.session.mates))
    )


INVARIANTS = (
    Invariant(
        "draft.switched",
        "A request that switched drafts proposes what its new draft gives from scratch for the tokens so far.",
        NEEDS,
        switched_drafts,
        _switches,
        speaks_of="session",
    ),
    Invariant(
        "draft.shared",
        "Requests that share a trie propose what follows from all texts that entered it, in their order.",
        NEEDS,
        shared_trie,
        _shares,
        speaks_of="session",
    ),
)
