"""Members: the requests of a session, each as the case that it would be alone."""

from collections.abc import Iterator
from dataclasses import dataclass, replace

from specverify.properties.verdict.subject import Crash, NoTrace, Refusal, Subject
from specverify.properties.verdict.taken_steps import TakenStep, taken_steps
from specverify.reference.case import Case
from specverify.reference.draft import Draft, Scripted
from specverify.reference.trace import Trace
from specverify.reference.tree import Tree


@dataclass(frozen=True)
class Member:
    """Request `number` of a session: its case alone, cut to the steps that it took, and its trace.

    Attributes:
        number: The number of the request.
        alone: Its case.
        trace: Its trace.
        retold: Whether the script of the case was made of the trees that the request proposed: they say nothing of its
            drafts.
        unknown: Whether the trace does not tell what its drafts had to propose; else another invariant judges those of
            a retold request.
        bare: The steps in which its draft was not asked.
    """

    number: int
    alone: Case
    trace: Trace
    retold: bool = False
    unknown: bool = False
    bare: frozenset[int] = frozenset()


def members(case: Case, trace: Trace) -> Iterator[Member]:
    """The requests that entered and took a step.

    A request that took steps without its draft keeps it, and is told which steps they were. The draft of a request
    whose trees depend on batches is told the sizes of its batches. A request that switched drafts on the way, or whose
    draft learns from other requests, becomes a script of the trees that it proposed; so does one of which the trace
    does not tell what its draft had to know.
    """
    for number, run, steps in _stepping_requests(case, trace):
        alone = _alone(case, trace, number)
        draft = case.alone(number).draft
        complete = len(steps) == len(run.steps)
        # The sizes and the bare steps are known of all steps, or of none.
        needs_all_steps = draft.dispatch is not None or _is_named(case, "first", number)
        bare = frozenset(index for index, step in enumerate(steps) if step.kind == "first") if complete else frozenset()
        switches = _is_named(case, "switch", number)
        unknown = needs_all_steps and not complete
        retold = switches or draft.shared or unknown
        if draft.dispatch is not None:
            batches = tuple(step.batch for step in steps)
            draft = draft.in_batches(batches if set(batches) != {1} else ())
        draft = _script(run) if retold else _with_bare_trees(draft, bare, len(run.steps), alone.prompt[-1])
        # The prompt changes together with the draft: a script's first tree must begin with the prompt's last token.
        alone = replace(alone, draft=draft, steps=len(run.steps))
        yield Member(number, alone, run, retold, unknown, bare)


def before_a_switch(case: Case, trace: Trace) -> Iterator[Member]:
    """The requests that switched drafts, each with the steps that its own draft proposed before: a run of their own."""
    assert case.session is not None
    for number, run, steps in _stepping_requests(case, trace):
        switch = next(
            (
                index
                for index, step in enumerate(case.session.actions)
                if step.kind == "switch" and number in step.requests
            ),
            None,
        )
        draft = case.alone(number).draft
        if switch is None or len(steps) != len(run.steps) or draft.shared:
            continue
        count = sum(step.action <= switch for step in steps)
        if count:
            bare = frozenset(index for index, step in enumerate(steps[:count]) if step.kind == "first")
            if draft.dispatch is not None:
                batches = tuple(step.batch for step in steps[:count])
                draft = draft.in_batches(batches if set(batches) != {1} else ())
            alone = _alone(case, trace, number)
            draft = _with_bare_trees(draft, bare, count, alone.prompt[-1])
            alone = replace(alone, draft=draft, steps=count)
            yield Member(number, alone, replace(run, steps=run.steps[:count]), bare=bare)


def _stepping_requests(case: Case, trace: Trace) -> Iterator[tuple[int, Trace, tuple[TakenStep, ...]]]:
    """The number of each request that took a step, its trace, and its steps by the session's accounts, if they tell."""
    if trace.shared is None:
        return
    steps_by_request = taken_steps(case, trace.shared)
    for number, run in enumerate(trace.shared.requests):
        if run is not None and run.steps:
            yield number, run, steps_by_request.get(number, ())


def _alone(case: Case, trace: Trace, number: int) -> Case:
    """The case of a request with the prompt with which it entered, and no trees."""
    assert trace.shared is not None
    text = trace.shared.prompts[number]
    context = text[: len(text) - len(case.alone(number).prompt)]
    return replace(case.alone(number, context), draft=Scripted())


def _is_named(case: Case, kind: str, number: int) -> bool:
    """Whether an action of this kind names the request."""
    assert case.session is not None
    return any(action.kind == kind and number in action.requests for action in case.session.actions)


def _with_bare_trees(draft: Draft, bare: frozenset[int], steps: int, pending: int) -> Draft:
    """A script with the root alone in each bare step, so that its other trees keep their order; else `draft` itself.

    The script has a tree for each of so many steps; `pending` is the root of the first.
    """
    if draft.trees is None or not bare:
        return draft
    drafted_trees = iter(draft.trees)
    root = Tree((0,), (pending,))
    trees = [root if step in bare else next(drafted_trees, root) for step in range(steps)]
    return Scripted(tuple(trees))


def _script(trace: Trace) -> Scripted:
    """The trees that a request proposed."""
    return Scripted(tuple(step.drafted.tree for step in trace.steps if step.drafted is not None))


def view(subject: Subject, member: Member) -> Subject:
    """The backend for `member`'s own case: that case has the trace from the session, every other case is run."""

    def run(case: Case) -> Trace | Refusal | Crash:
        if case == member.alone:
            return member.trace
        try:
            return subject(case)
        except NoTrace as no_trace:
            return no_trace.outcome

    member_subject = Subject(subject.name, run, subject.reveals, tables=subject.tables, takes_tape=subject.takes_tape)
    member_subject.notes = subject.notes
    member_subject.abilities = subject.abilities
    member_subject.retold = member.retold
    member_subject.unknown = member.unknown
    member_subject.bare = member.bare
    member_subject.remember(member.alone, member.trace)
    return member_subject
