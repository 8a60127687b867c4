"""Events: what the run of a request reached, each read off the trace that the backend showed."""

from collections.abc import Callable, Iterator
from dataclasses import dataclass

from specverify.properties.verdict.coverage.request import JudgedRequest
from specverify.reference.session import Account


@dataclass(frozen=True)
class RunEvent:
    """An event of coverage.

    Attributes:
        name: The event.
        interval: One request of so many in default cases reaches it, by `python -m tests.measure pairs`.
        is_reached: Whether the run of a request reached it.
    """

    name: str
    interval: int
    is_reached: Callable[[JudgedRequest], bool]


def _accepts(least: int) -> Callable[[JudgedRequest], bool]:
    return lambda request: any(len(path) > least for _, _, path in request.walks)


def _rejects_behind_accepted(request: JudgedRequest) -> bool:
    return any(1 < len(path) < len(tree) for _, tree, path in request.walks)


def _goes_on_after_rejection(request: JudgedRequest) -> bool:
    return any(len(path) < len(tree) for _, tree, path in request.walks[:-1])


def _leaves_row_order(request: JudgedRequest) -> bool:
    return any(path != tuple(range(len(path))) for _, _, path in request.walks)


def _ends_inside_block(request: JudgedRequest) -> bool:
    return any(
        step.emitted is not None and step.emitted.finish is not None and len(step.emitted.tokens) < len(path)
        for step, _, path in request.walks
    )


def _finishes(*reasons: str) -> Callable[[JudgedRequest], bool]:
    return lambda request: request.trace.finish in reasons


def _closes_grammar(request: JudgedRequest) -> bool:
    return request.alone.sampling.grammar is not None and request.trace.finish in ("eos", "grammar")


def _crosses_page(request: JudgedRequest) -> bool:
    size = request.case.layout.page_size
    return bool(size) and any(
        len(path) > 1 and len(step.context) // size < (len(step.context) + len(path)) // size
        for step, _, path in request.walks
    )


def _crosses(request: JudgedRequest, reaches: tuple[int, ...]) -> bool:
    """Whether rows of a step lie on both sides of the end of a window, or of a chunk."""
    return any(
        reach and any(len(step.context) < reach <= len(step.context) + tree.height for step, tree, _ in request.walks)
        for reach in reaches
    )


def _crosses_window(request: JudgedRequest) -> bool:
    arch = request.architecture
    return arch is not None and _crosses(request, arch.windows)


def _crosses_chunk(request: JudgedRequest) -> bool:
    arch = request.architecture
    return arch is not None and any(
        chunk and 0 < chunk - len(step.context) % chunk <= tree.height
        for chunk in arch.chunks
        for step, tree, _ in request.walks
    )


def _steps_after(*kinds: str) -> Callable[[JudgedRequest], bool]:
    """Whether an action of these kinds acts on a request that has entered, which then takes a step."""

    def is_reached(request: JudgedRequest) -> bool:
        entered = False
        for number, action in request.actions:
            if action.kind in kinds and entered and request.steps_after(number):
                return True
            entered |= action.kind == "add" or (action.kind == "fork" and action.requests[1] == request.number)
        return False

    return is_reached


def _is_forked(place: int) -> Callable[[JudgedRequest], bool]:
    """Whether the request is the source (0) or the twin (1) of a fork, and takes a step after it."""
    return lambda request: any(
        action.kind == "fork" and action.requests[place] == request.number and request.steps_after(number)
        for number, action in request.actions
    )


def _is_taken(kind: str) -> Callable[[JudgedRequest], bool]:
    return lambda request: any(step.kind == kind for step in request.taken)


def _is_bare(kind: str = "") -> Callable[[JudgedRequest], bool]:
    """Whether the request takes a step without its draft, of that kind if one is given."""
    return lambda request: any(step.bare and kind in ("", step.kind) for step in request.taken)


def _is_bare_in_batch(request: JudgedRequest) -> bool:
    session = request.case.session
    actions = () if session is None else session.actions
    return any(
        step.bare and step.batch > 1 and step.action < len(actions) and len(actions[step.action].bare) < step.batch
        for step in request.taken
        if step.kind == "step"
    )


def _drafts_again(request: JudgedRequest) -> bool:
    """Whether a step with an accepted token, then one without a draft, then one with it follow each other."""
    if len(request.taken) != len(request.walks):
        return False
    steps = [(step.bare, len(path) > 1) for step, (_, _, path) in zip(request.taken, request.walks, strict=True)]
    return any(
        before[1] and middle[0] and not after[0]
        for before, middle, after in zip(steps, steps[1:], steps[2:], strict=False)
    )


def _is_in_batch(request: JudgedRequest) -> bool:
    return any(step.batch > 1 for step in request.taken)


def _skips_launch(request: JudgedRequest) -> bool:
    events = () if request.shared is None else request.shared.events
    return any(event.kind == "skipped" and event.request == request.number for event in events)


def _entries(request: JudgedRequest) -> Iterator[tuple[Account, Account]]:
    """The page pool before and after each action by which the request comes in."""
    for number, action in request.actions:
        around = request.accounts_around(number) if action.kind in ("add", "restore") else None
        if around is not None:
            yield around


def _hits_prefix(request: JudgedRequest) -> bool:
    return any(set(after.tables.get(request.number, ())) & set(before.kept) for before, after in _entries(request))


def _waits_for_room(request: JudgedRequest) -> bool:
    """Whether the request finds no room when it is to come in, comes in later, and takes a step then."""
    waits = is_known = False
    for number, action in request.actions:
        around = request.accounts_around(number)
        if around is None:
            break
        before, after = (request.number in account.committed for account in around)
        # A request that has come in before can come back only.
        if action.kind == ("restore" if is_known else "add") and not before:
            if waits and after and request.steps_after(number):
                return True
            waits = not after
        is_known |= after
    return False


def _brings_back(request: JudgedRequest) -> bool:
    return any(set(after.tables.get(request.number, ())) & set(after.brought) for _, after in _entries(request))


EVENTS = (
    RunEvent("accepts one", 3, _accepts(1)),
    RunEvent("accepts two", 6, _accepts(2)),
    RunEvent("accepts four", 16, _accepts(4)),
    RunEvent("rejects behind an accepted node", 4, _rejects_behind_accepted),
    RunEvent("goes on after a rejection", 2, _goes_on_after_rejection),
    RunEvent("path leaves the row order", 7, _leaves_row_order),
    RunEvent("ends inside a block", 8, _ends_inside_block),
    RunEvent("ends by eos", 25, _finishes("eos")),
    RunEvent("ends by a stop", 14, _finishes("stop")),
    RunEvent("ends by length", 2, _finishes("length")),
    RunEvent("closes its grammar", 74, _closes_grammar),
    RunEvent("accepted path crosses a page", 8, _crosses_page),
    RunEvent("tree crosses a window", 28, _crosses_window),
    RunEvent("tree crosses a chunk", 43, _crosses_chunk),
    RunEvent("in a batch", 2, _is_in_batch),
    RunEvent("step without a draft", 7, _is_bare()),
    RunEvent("without its draft beside drafted trees", 48, _is_bare_in_batch),
    RunEvent("launched without its draft", 40, _is_bare("launch")),
    RunEvent("drafts again behind accepted and bare steps", 96, _drafts_again),
    RunEvent("launched step", 7, _is_taken("launch")),
    RunEvent("result of a launch skipped", 13, _skips_launch),
    RunEvent("thrown back, then steps", 15, _steps_after("preempt")),
    RunEvent("evicted and restored, then steps", 9, _steps_after("restore")),
    RunEvent("handed over, then steps", 15, _steps_after("hand-over")),
    RunEvent("switches drafts, then steps", 23, _steps_after("switch")),
    RunEvent("forked, then steps", 17, _is_forked(0)),
    RunEvent("twin of a fork", 19, _is_forked(1)),
    RunEvent("waits for room, then steps", 130, _waits_for_room),
    RunEvent("prefix hit", 15, _hits_prefix),
    RunEvent("brought back from the second tier", 58, _brings_back),
)
"""Every event. No event has the name of a value of an axis."""
