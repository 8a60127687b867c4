"""Company: the requests of a session, each seen as the case that it would be alone."""

from collections.abc import Iterator
from dataclasses import dataclass, replace

from properties.verdict.subject import Crashed, Declined, NoTrace, Subject
from reference.case import Case
from reference.draft import Scripted
from reference.trace import Trace


@dataclass(frozen=True)
class Member:
    """Request `number` of a session: the case it would be alone, as far as it came, and what it did.

    `retold` says that this case's script was made of the trees that the request proposed.
    """

    number: int
    alone: Case
    trace: Trace
    retold: bool = False


def members(case: Case, trace: Trace) -> Iterator[Member]:
    """The requests that entered and took a step.

    A request that switched drafts on the way is told as a script of the trees that it proposed.
    """
    assert case.session is not None
    if trace.shared is None:
        return
    for number, one in enumerate(trace.shared.requests):
        if one is None or not one.steps:
            continue
        alone = replace(case.alone(number), prompt=trace.shared.prompts[number], draft=Scripted())
        retold = any(action.kind == "switch" and number in action.requests for action in case.session.actions)
        draft = _script(one) if retold else case.alone(number).draft
        # Draft and prompt at once: a script begins with the prompt's last token.
        yield Member(number, replace(alone, draft=draft, steps=len(one.steps)), one, retold)


def _script(trace: Trace) -> Scripted:
    """The trees that a request proposed."""
    return Scripted(tuple(step.drafted.tree for step in trace.steps if step.drafted is not None))


def view(subject: Subject, member: Member) -> Subject:
    """The backend as `member`'s own case sees it: that case ran in the session, every other is run for itself."""

    def run(case: Case) -> Trace | Declined | Crashed:
        if case == member.alone:
            return member.trace
        try:
            return subject(case)
        except NoTrace as absent:
            return absent.outcome

    seen = Subject(subject.name, run, subject.reveals, tables=subject.tables, takes_tape=subject.takes_tape)
    seen.notes = subject.notes
    seen.retold = member.retold
    seen.remember(member.alone, member.trace)
    return seen
