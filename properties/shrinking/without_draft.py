"""Cases without a model draft that run the draft's forwards through the target.

If the code that draft and target share is wrong, one of these cases fails too, and it is the plainer report.
"""

from collections.abc import Iterator
from contextlib import suppress
from dataclasses import replace
from functools import partial

from specverify.properties.shrinking.sessions import Attempt
from specverify.properties.tolerance.closeness import chain
from specverify.properties.verdict.session_members import Member, members
from specverify.reference.architecture import Model
from specverify.reference.case import Case
from specverify.reference.draft import Draft, Scripted
from specverify.reference.malformed import Malformed
from specverify.reference.sampling import Sampling
from specverify.reference.trace import Trace
from specverify.reference.tree import Tree

CHAIN_NODES = 64
"""Length of the chain made of a context's last tokens; kernels change their algorithm at 16 and at 32 rows."""


def without_draft(case: Case, trace: Trace, request: int, step: int) -> Iterator[Case]:
    """The trees that a model draft proposed, as scripts, on the target and on the draft's model as the target.

    If the code that draft and target share is wrong, one of these cases fails without any draft. There are three cases
    for each model: the step at which the draft differed, with its context prefilled at once; all steps up to it,
    greedily; and the end of its context as one chain, since a draft is fed its context in one block. Cases that a
    model does not admit are left out. `trace` reveals its trees; `request` is 0 without a session.
    """
    runs = [Member(0, case, trace)] if case.session is None else list(members(case, trace))
    run = next((run for run in runs if run.number == request), None)
    if run is None:
        return
    proposed = [
        (run_step.context, run_step.drafted.tree)
        for run_step in run.trace.steps[: step + 1]
        if run_step.drafted is not None
    ]
    for model in _models(run.alone, case) if proposed else ():
        for attempt in _attempts(run.alone, model, proposed):
            with suppress(Malformed):
                yield attempt()


def _attempts(case: Case, model: Model, proposed: list[tuple[tuple[int, ...], Tree]]) -> Iterator[Attempt]:
    """The last proposed tree after its own context; all proposed trees in sequence; the context's end as a chain."""
    context, tree = proposed[-1]
    # `rebased` then gives a case of one step: context prefilled at once, tree scripted.
    bare = replace(case, model=model, draft=Scripted(), session=None)
    yield partial(bare.rebased, context, tree)
    if len(proposed) > 1:
        trees = Scripted(tuple(tree for _, tree in proposed))
        layout = replace(case.layout, pages=())  # the free list was drawn for another request, or for several
        greedy = {"sampling": Sampling(), "steps": len(proposed), "session": None}
        yield partial(replace, case, model=model, draft=trees, layout=layout, **greedy)
    fed_tokens = (*context, tree.token[0])
    yield partial(bare.rebased, fed_tokens[:-CHAIN_NODES], chain(fed_tokens[-CHAIN_NODES:]))


def _models(alone: Case, case: Case) -> list[Model]:
    """The target's model, then the model of each draft that the request may have had, without repetition."""
    drafts: list[Draft] = [alone.draft, case.draft]
    if case.session is not None:
        drafts += [mate.draft for mate in case.session.mates]
        drafts += [action.draft for action in case.session.actions if action.draft is not None]
    models = [alone.model, *(draft.model for draft in drafts if draft.model is not None)]
    models += [alone.drafting_model] if alone.drafting_model is not None else []
    return list(dict.fromkeys(models))
