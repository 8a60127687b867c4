"""Members: the requests of a session, each as the case that it would be alone."""

from collections.abc import Iterator
from dataclasses import dataclass, replace

from properties.verdict.batch_sizes import batch_sizes
from properties.verdict.subject import Crashed, Declined, NoTrace, Subject
from reference.case import Case
from reference.draft import Scripted
from reference.trace import Trace


@dataclass(frozen=True)
class Member:
    """Request `number` of a session: its case alone, cut to the steps that it took, and its trace.

    `retold` says that the script of this case was made of the trees that the request proposed.
    """

    number: int
    alone: Case
    trace: Trace
    retold: bool = False


def members(case: Case, trace: Trace) -> Iterator[Member]:
    """The requests that entered and took a step.

    A request that switched drafts on the way or took a step without its draft, or whose draft learns from other
    requests, becomes a script of the trees that it proposed. The draft of a request whose trees depend on batches is
    told the sizes of its batches; where the trace does not tell them, the request becomes a script too.
    """
    assert case.session is not None
    if trace.shared is None:
        return
    sizes = batch_sizes(case, trace.shared)
    for number, one in enumerate(trace.shared.requests):
        if one is None or not one.steps:
            continue
        draft, text = case.alone(number).draft, trace.shared.prompts[number]
        before = text[: len(text) - len(case.alone(number).prompt)]
        alone = replace(case.alone(number, before), draft=Scripted())
        switches = any(action.kind == "switch" and number in action.requests for action in case.session.actions)
        bare = any(action.kind == "first" and number in action.requests for action in case.session.actions)
        retold = switches or bare or draft.shared
        if draft.dispatch is not None:
            batches = (sizes or {}).get(number, ())
            retold = retold or len(batches) != len(one.steps)
            draft = draft.in_batches(batches if set(batches) != {1} else ())
        draft = _script(one) if retold else draft
        # The prompt changes together with the draft: a script's first tree must begin with the prompt's last token.
        yield Member(number, replace(alone, draft=draft, steps=len(one.steps)), one, retold)


def _script(trace: Trace) -> Scripted:
    """The trees that a request proposed."""
    return Scripted(tuple(step.drafted.tree for step in trace.steps if step.drafted is not None))


def view(subject: Subject, member: Member) -> Subject:
    """The backend for `member`'s own case: that case has the trace from the session, every other case is run."""

    def run(case: Case) -> Trace | Declined | Crashed:
        if case == member.alone:
            return member.trace
        try:
            return subject(case)
        except NoTrace as absent:
            return absent.outcome

    seen = Subject(subject.name, run, subject.reveals, tables=subject.tables, takes_tape=subject.takes_tape)
    seen.notes = subject.notes
    seen.abilities = subject.abilities
    seen.retold = member.retold
    seen.remember(member.alone, member.trace)
    return seen
