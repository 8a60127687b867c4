"""The steps that the requests of a session took, by its actions, accounts and events.

They say which steps asked no draft, and how many requests each batch had; the engine's own counts play no part.
"""

from collections import Counter
from dataclasses import dataclass
from itertools import pairwise

from specverify.properties.verdict.filling import FIRST_ACCOUNT, missing_columns
from specverify.reference.case import Case
from specverify.reference.session import Account, Action, Event
from specverify.reference.trace import Shared


@dataclass(frozen=True)
class TakenStep:
    """A step of one request.

    Attributes:
        kind: The kind of action that took it: step, first, launch.
        batch: The number of requests that took it together.
        action: The number of the action in which it was taken, or in which its results were resolved.
        bare: Whether its draft was not asked.
    """

    kind: str
    batch: int
    action: int
    bare: bool = False


def taken_steps(case: Case, shared: Shared) -> dict[int, tuple[TakenStep, ...]]:
    """For each request of the session, the steps that it took, in order.

    A request that a step names has stepped if it was living before the action, and then either has more tokens
    committed or is over. A request that waits for pages is left out by the engine, and commits nothing. A request whose
    prompt is filled in the forward commits tokens of its prompt, and takes no step. The steps of a request are left out
    where the trace does not account for each of them.
    """
    assert case.session is not None
    launches = [event for event in shared.events if event.kind == "launched"]
    launched = Counter(event.frame for event in launches)
    actions = case.session.actions
    bare_launches = {
        (event.request, event.frame)
        for event in launches
        if event.action < len(actions) and event.request in actions[event.action].bare
    }
    steps_by_request: dict[int, tuple[TakenStep, ...]] = {}
    accounts = pairwise((FIRST_ACCOUNT, *shared.accounts))
    missing = missing_columns(case, shared)
    for number, (action, (before, after)) in enumerate(zip(case.session.actions, accounts, strict=False)):
        resolved = [event for event in shared.events if event.kind == "counted" and event.action == number]
        for event in resolved:
            is_bare = (event.request, event.frame) in bare_launches
            step = TakenStep("launch", launched[event.frame], number, is_bare)
            steps_by_request[event.request] = (*steps_by_request.get(event.request, ()), step)
        if action.kind in ("step", "first"):
            batch = [
                request
                for request in _batch(action, before, after, resolved, shared, steps_by_request)
                if request not in missing[number]
            ]
            for request in batch:
                steps_by_request[request] = (
                    *steps_by_request.get(request, ()),
                    TakenStep(action.kind, len(batch), number, request in action.undrafted),
                )
    lengths = {request: len(trace.steps) for request, trace in enumerate(shared.requests) if trace is not None}
    return {request: steps for request, steps in steps_by_request.items() if lengths.get(request) == len(steps)}


def _batch(
    action: Action,
    before: Account,
    after: Account,
    resolved: list[Event],
    shared: Shared,
    steps_by_request: dict[int, tuple[TakenStep, ...]],
) -> list[int]:
    """The requests that the step `action` names and that took it; results in flight were `resolved` before it."""
    batch = []
    for request in action.requests:
        if request not in before.committed:
            continue
        tokens = [len(event.tokens) for event in resolved if event.request == request]
        if request in after.committed:
            stepped = after.committed[request] > before.committed[request] + sum(tokens)
        elif tokens:  # it is over: the resolved results have ended it, or this step has
            trace = shared.requests[request] if request < len(shared.requests) else None
            stepped = trace is not None and len(trace.steps) > len(steps_by_request.get(request, ()))
        else:
            stepped = True
        if stepped:
            batch.append(request)
    return batch
