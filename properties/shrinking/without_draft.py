"""Cases without a model draft that ask the target's code for what a draft's forwards did."""

from collections.abc import Iterator
from contextlib import suppress
from dataclasses import replace
from functools import partial

from properties.shrinking.sessions import Attempt
from properties.tolerance.closeness import chain
from properties.verdict.session_members import Member, members
from reference.architecture import Model
from reference.case import Case
from reference.draft import Draft, Scripted
from reference.malformed import Malformed
from reference.sampling import Sampling
from reference.trace import Trace
from reference.tree import Tree

CHAIN_NODES = 64
"""Last tokens of a context that are verified as one chain; kernels change their ways at 16 and 32 rows."""


def without_draft(case: Case, trace: Trace, request: int, step: int) -> Iterator[Case]:
    """The trees that a model draft proposed, written down for the target, and for the draft's model as the target.

    Where the code that draft and target share is wrong, one of these cases fails without any draft. Each model is asked
    for the step at which the draft differed, its context prefilled at once, for all steps up to it, greedily, and for
    the end of that context as one tree, a chain, since a draft is fed its context in one block. Cases that the models
    do not admit are left out.

    Args:
        case: The case, with or without a session.
        trace: What the backend did with it; it must reveal its trees.
        request: The request of the session whose draft differed; 0 without a session.
        step: The index of the step at which it differed.
    """
    runs = [Member(0, case, trace)] if case.session is None else list(members(case, trace))
    run = next((run for run in runs if run.number == request), None)
    if run is None:
        return
    proposed = [(one.context, one.drafted.tree) for one in run.trace.steps[: step + 1] if one.drafted is not None]
    for model in _models(run.alone, case) if proposed else ():
        for attempt in _attempts(run.alone, model, proposed):
            with suppress(Malformed):
                yield attempt()


def _attempts(case: Case, model: Model, proposed: list[tuple[tuple[int, ...], Tree]]) -> Iterator[Attempt]:
    """The last proposed tree after its own context; all of them, one after the other; the context as a chain."""
    context, tree = proposed[-1]
    bare = replace(case, model=model, draft=Scripted(), session=None)
    yield partial(bare.rebased, context, tree)
    if len(proposed) > 1:
        trees = Scripted(tuple(tree for _, tree in proposed))
        layout = replace(case.layout, pages=())  # drawn for another request, or for several
        greedy = {"sampling": Sampling(), "steps": len(proposed), "session": None}
        yield partial(replace, case, model=model, draft=trees, layout=layout, **greedy)
    fed = (*context, tree.token[0])
    yield partial(bare.rebased, fed[:-CHAIN_NODES], chain(fed[-CHAIN_NODES:]))


def _models(alone: Case, case: Case) -> list[Model]:
    """The target's model, then those of the drafts that the request may have had, each once."""
    drafts: list[Draft] = [alone.draft, case.draft]
    if case.session is not None:
        drafts += [mate.draft for mate in case.session.mates]
        drafts += [action.draft for action in case.session.actions if action.draft is not None]
    models = [alone.model, *(draft.model for draft in drafts if draft.model is not None)]
    return list(dict.fromkeys(models))
