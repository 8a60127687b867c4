"""The invariant of requests whose drafts learn from one another's texts."""

from collections import Counter
from collections.abc import Iterator
from dataclasses import dataclass, replace

from properties.invariants.draft.proposals import NEEDS, proposed
from properties.invariants.draft.scores import restarted
from properties.invariants.draft.switches import happened
from properties.invariants.rows import placed
from properties.verdict.invariant import Fact, Invariant, NotApplicable, Oracle, Unobserved
from properties.verdict.subject import Subject
from reference.case import Case
from reference.draft import Draft, Scripted
from reference.oracle import draft as meaning
from reference.oracle.draft.trie import entries
from reference.oracle.sampled_step import SampledStep
from reference.trace import Shared, Step

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
    known: int = 0
    step: Step | None = None
    number: int = 0


def shared(case: Case, oracle: Oracle, subject: Subject) -> Iterator[Fact]:
    """Each request that shares a trie proposes the tree that follows from all texts that entered it, in their order.

    A prompt enters with its request, and the tokens of a step when they are emitted, in the order of the batch.
    draft.fidelity cannot judge such a request: there it is a script of its own trees
    (`properties/verdict/session_members.py`).
    """
    told = subject(case).shared
    if told is None or not told.accounts:
        raise Unobserved("the trace does not say what the requests of the session did")
    entered: dict[Draft, tuple[tuple[int, ...], ...]] = {}
    judged = 0
    for event in _events(case, told):
        request = case.alone(event.request)
        if event.step is None:
            entered[request.draft] = entered.get(request.draft, ()) + entries(event.text, event.known)
        elif event.step.drafted is not None:
            judged += 1
            alone = restarted(replace(request, prompt=event.text[-1:], draft=Scripted()), event.text)
            known = entered[request.draft]
            question = meaning.Question(event.text, 0, None, SampledStep(alone, (), 0), entered=known)
            wanted = replace(alone, draft=Scripted((meaning.proposed(request.draft, question).tree,)))
            for fact in proposed(NAME, wanted, oracle, event.number, event.step, 0, event.text[-1]):
                yield placed(fact, request=event.request)
    if not judged:
        raise NotApplicable("no request that shares a trie took a step")


def _events(case: Case, told: Shared) -> Iterator[Event]:
    """The events of all requests that share a trie; those of a request that switches to another draft end there."""
    texts: dict[int, tuple[int, ...]] = {}
    sharing, steps = set[int](), Counter[int]()
    living: dict[int, int] = {}
    for action, account in happened(case, told):
        if action.kind in ("add", "fork"):
            number = action.requests[-1]
            if number in account.committed and number not in texts:
                texts[number] = told.prompts[number]
                if case.alone(number).draft.shared:
                    sharing.add(number)
                    yield Event(number, texts[number])
        elif action.kind == "switch":
            sharing -= set(action.requests) & set(account.committed)
        elif action.kind == "step":
            # A request that waited for pages has as many columns as before; one that met a stop has none.
            batch = [one for one in action.requests if one in living and account.committed.get(one, -1) != living[one]]
            taken = {one: _step(told, one, steps[one]) for one in batch}
            for one in (one for one in batch if one in sharing):
                yield Event(one, texts[one], 0, taken[one], steps[one])
            for one in batch:
                emitted, known = taken[one].emitted, len(texts[one])
                if emitted is None:
                    raise Unobserved("the backend does not reveal what each step emitted")
                texts[one] += emitted.tokens
                steps[one] += 1
                if one in sharing:
                    yield Event(one, texts[one], known)
        living = account.committed


def _step(told: Shared, request: int, number: int) -> Step:
    trace = told.requests[request]
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
        shared,
        _shares,
        speaks_of="session",
    ),
)
