"""Invariant of serving: each request takes the steps that the actions give it."""

from collections import Counter
from collections.abc import Iterator

from properties.invariants.same_request import largest_block
from properties.verdict.finding import Compared, Finding
from properties.verdict.invariant import Fact, Invariant, Oracle, Unobserved, needing
from properties.verdict.subject import Subject
from reference.case import Case
from reference.session import Account
from reference.trace import Shared, Stage, Trace


def takes_part(case: Case, oracle: Oracle, subject: Subject) -> Iterator[Fact]:
    """Each request takes every step that names it until it ends, and leaves when it is cancelled or evicted.

    The actions are replayed on request numbers alone, which gives the steps that each request is due. A launched step
    may count later or never: it makes no step due. In a pool with limited pages any request may have to wait, so steps
    are not counted there; instead, no request may wait for pages that no other request holds. Without a session, a
    request takes at most as many steps as its case allows.
    """
    name = "lossless.takes-part"
    trace = subject(case)
    if case.session is None:
        yield Compared()
        taken = len(trace.steps)
        if not trace.steps and not trace.output:
            yield Finding(name, Stage.DRAFTED, 0, {}, "a step", "none")
        elif case.steps and taken > case.steps:
            yield Finding(name, Stage.DRAFTED, case.steps, {}, f"at most {case.steps} steps", taken)
        return
    if trace.shared is None:
        raise Unobserved("the trace does not say what the requests of the session did")
    for at, (action, account) in enumerate(zip(case.session.actions, trace.shared.accounts, strict=False)):
        yield Compared(action.kind in ("cancel", "evict"))
        left = set(action.requests) & set(account.committed) if action.kind in ("cancel", "evict") else set()
        for number in sorted(left):
            where: dict[str, int | str] = {"request": number, "action": at}
            yield Finding(name, Stage.COMMITTED, 0, where, f"nothing of it after {action.kind}", "it is still served")
    # Pages are listed: the pool is limited, and requests may wait.
    if case.layout.pages:
        yield from _waits(case, trace.shared)
        return
    steps, living, evicted, launched = Counter[int](), set[int](), set[int](), Counter[int]()
    for action in case.session.actions:
        named = set(action.requests)
        if action.kind == "add":
            living |= named - set(steps)
            steps.update(dict.fromkeys(named - set(steps), 0))
        elif action.kind == "fork":
            source, twin = action.requests
            own = case.session.mates[twin - 1].prompt
            # The twin enters unless the source has ended, or the two do not fit: then the trace shows `own` or nothing.
            from_it = source in living and not _ended(trace, source, steps[source])
            if from_it and twin not in steps and trace.shared.prompts[twin] not in ((), own):
                living.add(twin)
                steps[twin] = 0
        elif action.kind in ("step", "first"):
            steps.update(named & living)
        elif action.kind == "launch":
            launched.update(named & living)
        elif action.kind == "restore":
            living |= named & evicted
            evicted -= named
        elif action.kind in ("evict", "cancel"):
            evicted = evicted | (named & living) if action.kind == "evict" else evicted - named
            living -= named
    yield Compared(len(steps))
    for number, due in sorted(steps.items()):
        one = _request(trace, number)
        taken = 0 if one is None else len(one.steps)
        if one is None or taken > due + launched[number] or (taken < due and one.finish is None):
            yield Finding(
                name, Stage.DRAFTED, taken, {"request": number}, due, "it is not there" if one is None else taken
            )


def _waits(case: Case, shared: Shared) -> Iterator[Finding | Compared]:
    """Findings where a request waits (to enter, to be restored, to step) although it is alone in a pool with room.

    It needs room for its tokens, the largest block of the session and the overhang. Every page that it writes to must
    be its own, so pages of its table that the prefix cache holds too may have to be copied. Other pages of the prefix
    cache are evicted if the room is needed.
    """
    assert case.session is not None
    plans = [case.alone(number) for number in range(1 + len(case.session.mates))]
    block = largest_block(case)
    before, known, out = Account((), 0, {}, (), {}, {}), set[int](), dict[int, int]()
    for at, (action, after) in enumerate(zip(case.session.actions, shared.accounts, strict=False)):
        held, number = before.committed, action.requests[0]
        tokens = None  # tokens of the request that must be served now; None if no request must be
        if action.kind == "step" and len(held) == 1 and set(held) <= set(action.requests):
            (number,) = held
            tokens = held[number] + 1
        elif action.kind == "add" and not held and number not in known:
            tokens = len(plans[number].prompt)
        elif action.kind == "restore" and not held and number in out:
            tokens = out[number] + 1
        # A page that the prefix cache also holds is shared: writing to it needs a copy in a free page.
        copied = len(set(before.tables.get(number, ())) & set(before.kept))
        if tokens is not None and case.layout.pages_for(tokens + block) + copied <= after.total:
            yield Compared()
            waits = after.committed.get(number) == held.get(number)  # a step commits tokens or ends the request
            if waits:
                step = sum(one.kind == "step" for one in case.session.actions[:at])
                where: dict[str, int | str] = {"request": number, "action": at}
                expected = f"{action.kind}: no other request holds a page, and the pool has room for it"
                yield Finding("lossless.takes-part", Stage.COMMITTED, step, where, expected, "it waits")
                return
        if action.kind == "evict" and number in held:
            out[number] = held[number]
        elif action.kind == "cancel" or number in after.committed:
            out.pop(number, None)
        known |= set(after.committed)
        before = after


def _ended(trace: Trace, number: int, due: int) -> bool:
    """Whether the request had finished after `due` steps."""
    one = _request(trace, number)
    return one is not None and one.finish is not None and len(one.steps) <= due


def _request(trace: Trace, number: int) -> Trace | None:
    assert trace.shared is not None
    return trace.shared.requests[number] if number < len(trace.shared.requests) else None


INVARIANTS = (
    Invariant(
        "lossless.takes-part",
        "A request takes every step that names it until it ends, and no other.",
        needing(),
        takes_part,
        speaks_of="both",
    ),
)
