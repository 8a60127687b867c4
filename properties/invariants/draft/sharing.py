"""The invariant of requests whose drafts learn from one another's texts."""

from collections import Counter
from collections.abc import Iterator
from dataclasses import dataclass, replace

from specverify.properties.invariants.draft.proposals import NEEDS, compare_proposal
from specverify.properties.invariants.draft.scores import restarted_case
from specverify.properties.invariants.draft.switches import actions_with_accounts
from specverify.properties.invariants.rows import with_place
from specverify.properties.verdict.invariant import Fact, Invariant, NotApplicable, Oracle, Unobserved
from specverify.properties.verdict.subject import Subject
from specverify.reference.case import Case
from specverify.reference.draft import Draft, Scripted
from specverify.reference.oracle import draft as meaning
from specverify.reference.oracle.draft.trie import entries
from specverify.reference.oracle.sampled_step import SampledStep
from specverify.reference.trace import Shared, Step

NAME = "draft.shared"


@dataclass(frozen=True)
class Event:
    """A moment in the life of a request that shares a trie.

    Attributes:
        request: The number of the request.
        text: Its prompt and output up to there.
        known: How many tokens of the text have entered the trie; those after them enter now.
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
            for fact in compare_proposal(NAME, scripted_case, oracle, event.number, event.step, 0, event.text[-1]):
                yield with_place(fact, request=event.request)
    if not num_judged:
        raise NotApplicable("no request that shares a trie took a step")


def _events(case: Case, shared: Shared) -> Iterator[Event]:
    """The events of all requests that share a trie; those of a request that switches to another draft end there."""
    texts: dict[int, tuple[int, ...]] = {}
    sharing, steps = set[int](), Counter[int]()
    living: dict[int, int] = {}
    for action, account in actions_with_accounts(case, shared):
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
            # A request that waited for pages has as many columns as before; one that met a stop has none.
            batch = [
                request
                for request in action.requests
                if request in living and account.committed.get(request, -1) != living[request]
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
        NAME,
        "Requests that share a trie propose what follows from all texts that entered it, in their order.",
        NEEDS,
        shared_trie,
        _shares,
        speaks_of="session",
    ),
)
