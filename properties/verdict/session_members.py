"""Members: the requests of a session, each as the case that it would be alone."""

from collections.abc import Iterator
from dataclasses import dataclass, replace

from specverify.properties.verdict.subject import Crash, Refusal, Subject
from specverify.properties.verdict.taken_steps import TakenStep, taken_steps
from specverify.reference.case import Case
from specverify.reference.draft import Draft, Scripted
from specverify.reference.trace import Stage, Trace
from specverify.reference.tree import Tree


@dataclass(frozen=True)
class Member:
    """Request `number` of a session: its case alone, cut to the steps that it took, and its trace.

    Attributes:
        retold: Whether the script of the case was made of the trees that the request proposed: they say nothing of its
            drafts.
        unknown: Whether the trace does not tell what its drafts had to propose; else another invariant judges those of
            a retold request.
        bare: The steps in which its draft was not asked.
        setting: The setting in which the session ran.
    """

    number: int
    alone: Case
    trace: Trace
    retold: bool = False
    unknown: bool = False
    bare: frozenset[int] = frozenset()
    setting: str = ""


def members(case: Case, trace: Trace) -> Iterator[Member]:
    """The requests that entered and took a step.

    A request that took steps without its draft keeps it, and is told which steps they were. The draft of a request
    whose trees depend on batches is told the sizes of its batches. A request that switched drafts on the way, or whose
    draft learns from other requests, becomes a script of the trees that it proposed; so does one of which the trace
    does not tell what its draft had to know.
    """
    for number, run, steps in _stepping_requests(case, trace):
        draft = case.alone(number).draft
        complete = len(steps) == len(run.steps)
        # The sizes and the bare steps are known of all steps, or of none.
        needs_all_steps = draft.dispatch is not None or _is_undrafted(case, number)
        bare = _bare_steps(steps) if complete else frozenset()
        switches = _is_named(case, "switch", number)
        unknown = needs_all_steps and not complete
        retold = switches or draft.shared or unknown
        drafted_trees = Scripted(tuple(step.drafted.tree for step in run.steps if step.drafted is not None))
        draft = drafted_trees if retold else _in_batches(draft, steps)
        # An engine that batches by itself runs a request to its end, in steps of its own, unless it is cancelled.
        assert case.session is not None
        is_whole = case.session.continuous and not _is_named(case, "cancel", number)
        num_steps = 0 if is_whole else len(run.steps)
        alone = _alone(case, trace, number, draft, frozenset() if retold else bare, num_steps)
        yield Member(number, alone, run, retold, unknown, bare, case.session.setting)


def before_a_switch(case: Case, trace: Trace) -> Iterator[Member]:
    """The requests that switched drafts, each with the steps that its own draft proposed before: a run of their own."""
    assert case.session is not None
    for number, run, steps in _stepping_requests(case, trace):
        switches = (
            index
            for index, action in enumerate(case.session.actions)
            if action.kind == "switch" and number in action.requests
        )
        switch = next(switches, None)
        draft = case.alone(number).draft
        if switch is None or len(steps) != len(run.steps) or draft.shared:
            continue
        count = sum(step.action <= switch for step in steps)
        if count:
            bare = _bare_steps(steps[:count])
            alone = _alone(case, trace, number, _in_batches(draft, steps[:count]), bare, count)
            yield Member(number, alone, replace(run, steps=run.steps[:count]), bare=bare)


def _stepping_requests(case: Case, trace: Trace) -> Iterator[tuple[int, Trace, tuple[TakenStep, ...]]]:
    """The number of each request that took a step, its trace, and its steps by the session's accounts, if they tell."""
    if trace.shared is None:
        return
    steps_by_request = taken_steps(case, trace.shared)
    for number, run in enumerate(trace.shared.requests):
        if run is not None and run.steps:
            yield number, run, steps_by_request.get(number, ())


def _bare_steps(steps: tuple[TakenStep, ...]) -> frozenset[int]:
    return frozenset(index for index, step in enumerate(steps) if step.bare)


def _in_batches(draft: Draft, steps: tuple[TakenStep, ...]) -> Draft:
    """The draft, told the sizes of its batches if its trees depend on them."""
    batches = tuple(step.batch for step in steps)
    return draft if draft.dispatch is None else draft.in_batches(batches if set(batches) != {1} else ())


def _alone(case: Case, trace: Trace, number: int, draft: Draft, bare: frozenset[int], steps: int) -> Case:
    """The case of a request with the prompt with which it entered, and so many steps of `draft`.

    A script with a tree for each step gets the root alone in each bare step, so that its other trees keep their order.
    Trees to which it did not come stay behind them: the places of a step's coins follow from the largest tree.
    """
    assert trace.shared is not None
    text = trace.shared.prompts[number]
    context = text[: len(text) - len(case.alone(number).prompt)]
    entered = replace(case.alone(number, context), draft=Scripted())
    if draft.trees is not None and bare:
        root = Tree((0,), (entered.prompt[-1],))
        drafted_trees = iter(draft.trees)
        by_step = tuple(root if step in bare else next(drafted_trees, root) for step in range(steps))
        draft = Scripted((*by_step, *drafted_trees))
    # The prompt changes before the draft: a script's first tree must begin with the prompt's last token.
    return replace(entered, draft=draft, steps=steps)


def _is_named(case: Case, kind: str, number: int) -> bool:
    """Whether an action of this kind names the request."""
    assert case.session is not None
    return any(action.kind == kind and number in action.requests for action in case.session.actions)


def _is_undrafted(case: Case, number: int) -> bool:
    """Whether an action leaves the request without its draft."""
    assert case.session is not None
    return any(number in action.undrafted for action in case.session.actions)


def view(subject: Subject, member: Member, assumes_noise: bool = False) -> Subject:
    """The backend for `member`'s own case: that case has the trace from the session, every other case is run.

    With `assumes_noise` no control is run for it where the backend shows scores (see `Subject`); without scores rule N
    assumes the largest error that is admissible.

    The trace is shown without its forwards of the target by kind: evictions, hand-overs and launches that came to
    nothing need more of them than the case alone.
    """
    trace = _without_target_calls(member.trace)

    def run(case: Case) -> Trace | Refusal | Crash:
        return trace if case == member.alone else subject.outcome(case)

    member_subject = Subject(subject.name, run, subject.reveals, tables=subject.tables, takes_tape=subject.takes_tape)
    member_subject.notes = subject.notes
    member_subject.abilities = subject.abilities
    member_subject.retold = member.retold
    member_subject.unknown = member.unknown
    member_subject.bare = member.bare
    member_subject.setting = member.setting
    shows_scores = Stage.SCORED in subject.reveals and all(step.scored is not None for step in trace.steps)
    member_subject.assumes_noise = assumes_noise and shows_scores
    member_subject.remember(member.alone, trace)
    return member_subject


def _without_target_calls(trace: Trace) -> Trace:
    counters = trace.accounting
    return trace if counters is None else replace(trace, accounting=replace(counters, target_calls=None))
