"""The invariants `serving.*`: a server's state is in step with the text.

They judge a grammar's matcher, the events of launched steps, and hand-overs. Requests, evictions and ends are read from
the session's actions and from the texts, and not from the engine's own epochs.
"""

from collections import Counter
from collections.abc import Iterator
from dataclasses import replace

from specverify.properties.invariants.lossless.guided import has_grammar
from specverify.properties.invariants.two_runs import accounts_of, compare_request, present_requests, unlike_bits
from specverify.properties.verdict.finding import Comparisons, Finding
from specverify.properties.verdict.invariant import TURNS, Fact, Invariant, NotApplicable, Oracle, Unobserved, needing
from specverify.properties.verdict.session_members import members
from specverify.properties.verdict.subject import Subject
from specverify.reference.case import Case
from specverify.reference.oracle.language import legal_after
from specverify.reference.session import Event
from specverify.reference.trace import Shared, Stage

MOST_AFTER_END = 1
"""Steps of a request that may be in flight when the host learns that it has ended."""

Where = dict[str, int | str]


def matcher_in_step(case: Case, oracle: Oracle, subject: Subject) -> Iterator[Fact]:
    """After each step the matcher has read the emitted tokens once, up to the first that is not legal.

    A request that was preempted, evicted, restored or forked from shows it in its next step.
    """
    assert case.sampling.grammar is not None
    output: tuple[int, ...] = ()
    read = 0
    for number, step in enumerate(subject(case).steps):
        if step.emitted is None or step.committed is None or step.committed.matched is None:
            raise Unobserved("the backend does not reveal how far its matcher has read")
        for token in step.emitted.tokens:
            output += (token,)
            read += not legal_after(case.sampling.grammar, case.stops.eos, output).refused
        yield Comparisons()
        if step.committed.matched != read:
            where: dict[str, int | str] = {"side": "matcher"}
            name = "serving.matcher-in-step"
            yield Finding(name, Stage.COMMITTED, number, where, read, step.committed.matched)
            return


def _shared_part(case: Case, subject: Subject) -> Shared:
    """The session's part of the trace.

    Raises:
        Unobserved: the backend shows no events although it launched steps.
        NotApplicable: no step was launched.
    """
    shared = subject(case).shared
    if shared is None or not shared.accounts:
        raise Unobserved("the trace does not say what the requests of the session did")
    if not shared.events:
        assert case.session is not None
        launches = [position for position, action in enumerate(case.session.actions) if action.kind == "launch"]
        if any(
            present_requests(shared.accounts, position) & set(case.session.actions[position].requests)
            for position in launches
        ):
            raise Unobserved("the trace does not show the events of launched steps")
        raise NotApplicable("no request that a launch names was there")
    return shared


def frames_in_epoch(case: Case, oracle: Oracle, subject: Subject) -> Iterator[Fact]:
    """Results count once, in the order of the launches, for the request of their launch, if nothing ended it before.

    An eviction or a cancellation between launch and resolution throws results away, and so does an end of the text;
    nothing else does. The tokens of counted results are those that the request's steps emit.
    """
    name = "serving.frames-in-epoch"
    shared = _shared_part(case, subject)
    launched = {(event.request, event.frame): event for event in shared.events if event.kind == "launched"}
    emitted = _emitted(shared)
    ended = set[int]()
    settled = set[tuple[int, int]]()
    next_steps = dict.fromkeys(emitted, 0)
    for event in shared.events:
        key = (event.request, event.frame)
        if event.kind == "launched":
            continue
        where: Where = {"request": event.request, "frame": event.frame, "action": event.action}
        if key not in launched or key in settled:
            yield Finding(name, Stage.EMITTED, 0, where, "results of a launch of this request, once", event.kind)
            return
        settled.add(key)
        reason = _loss_reason(case, shared, launched[key], event) or (
            "it had ended" if event.request in ended else None
        )
        yield Comparisons()
        if (event.kind == "counted") == (reason is not None):
            expected = "they count" if reason is None else f"they do not count: {reason}"
            yield Finding(name, Stage.EMITTED, next_steps[event.request], where, expected, f"they were {event.kind}")
            return
        if event.kind == "counted":
            steps = emitted[event.request]
            if not next_steps[event.request] <= event.step < len(steps) or steps[event.step][0] != event.tokens:
                expected = "a step with its tokens, behind those that counted before"
                yield Finding(name, Stage.EMITTED, next_steps[event.request], where, expected, event.tokens)
                return
            next_steps[event.request] = event.step + 1
            ended |= {event.request} if steps[event.step][1] is not None else set()


def _emitted(shared: Shared) -> dict[int, list[tuple[tuple[int, ...], str | None]]]:
    """For each request that entered, the tokens and the end of each step."""
    return {
        number: [(step.emitted.tokens, step.emitted.finish) for step in trace.steps if step.emitted is not None]
        for number, trace in enumerate(shared.requests)
        if trace is not None
    }


def _loss_reason(case: Case, shared: Shared, launch: Event, event: Event) -> str | None:
    """Why the results of `launch` are lost when the host meets them in `event`, or None."""
    assert case.session is not None
    for index, action in enumerate(case.session.actions[: event.action + 1]):
        if index <= launch.action:
            continue
        is_ended = action.kind in ("evict", "cancel") and launch.request in action.requests
        if is_ended and launch.request in present_requests(shared.accounts, index):
            return f"action {index}, {action.kind}"
        if is_ended and action.kind == "cancel":
            return f"action {index}, cancel"
    return None


def writes_in_owned_pages(case: Case, oracle: Oracle, subject: Subject) -> Iterator[Fact]:
    """The rows of a launched step lie in pages that the request's block table held when the host launched it."""
    shared = _shared_part(case, subject)
    steps = Counter[int]()
    for event in shared.events:
        steps[event.request] += event.kind == "counted"
        if event.kind == "launched" and event.written:
            yield Comparisons(len(event.written))
            foreign = sorted(set(event.written) - set(event.owned))
            if foreign:
                where: Where = {"request": event.request, "frame": event.frame, "action": event.action}
                name = "serving.writes-in-owned-pages"
                yield Finding(name, Stage.ATTENDED, steps[event.request], where, sorted(event.owned), foreign)
                return


def no_placeholder(case: Case, oracle: Oracle, subject: Subject) -> Iterator[Fact]:
    """What a launched step reads are tokens: no number that stands for one which the host does not know yet."""
    shared = _shared_part(case, subject)
    steps = Counter[int]()
    for event in shared.events:
        steps[event.request] += event.kind == "counted"
        if event.kind == "launched":
            yield Comparisons(len(event.inputs))
            strange = [token for token in event.inputs if not 0 <= token < case.model.vocab_size]
            if strange:
                where: Where = {"request": event.request, "frame": event.frame, "action": event.action}
                expected = f"tokens below {case.model.vocab_size}"
                name = "serving.no-placeholder"
                yield Finding(name, Stage.LOWERED, steps[event.request], where, expected, strange[0])
                return


def steps_after_finish(case: Case, oracle: Oracle, subject: Subject) -> Iterator[Fact]:
    """Once the host knows that a request has ended, none of its steps is launched; at most one was before."""
    shared = _shared_part(case, subject)
    emitted = _emitted(shared)
    ended_requests = set[int]()
    last_counted, num_after = Counter[int](), Counter[int]()
    for event in shared.events:
        request = event.request
        if event.kind == "counted":
            last_counted[request] = event.step
            steps = emitted.get(request, [])
            ended_requests |= {request} if event.step < len(steps) and steps[event.step][1] is not None else set()
        elif request in ended_requests:
            num_after[request] += event.kind == "skipped"
            yield Comparisons()
            if event.kind == "launched" or num_after[request] > MOST_AFTER_END:
                where: Where = {"request": request, "frame": event.frame, "action": event.action}
                name = "serving.steps-after-finish"
                most = f"at most {MOST_AFTER_END} step, launched before"
                observed = "launched after" if event.kind == "launched" else num_after[request]
                yield Finding(name, Stage.EMITTED, last_counted[request], where, most, observed)
                return
    yield Comparisons(len(ended_requests))


def _has_overlap(case: Case) -> bool:
    return case.session is not None and case.session.overlapped


def has_hand_over(case: Case) -> bool:
    """Whether a request of the case is handed over."""
    return case.session is not None and any(action.kind == "hand-over" for action in case.session.actions)


def stays(case: Case, oracle: Oracle, subject: Subject) -> Iterator[Fact]:
    """Without its hand-overs, every request keeps its numbers and tokens, and in most layouts its bits.

    Keys and values are copies and the kernels the same. Where pages are kept for later requests, or few, a hand-over
    changes which pages are free, hence which tokens are prefilled or wait: there numbers agree within noise. So they do
    where prompts are filled beside trees, because a hand-over fills the rest of one in a forward of its own.
    """
    assert case.session is not None
    trace = subject(case)
    actions = case.session.actions
    layout = case.layout
    accounts = accounts_of(trace)
    places = [position for position, action in enumerate(actions) if action.kind == "hand-over"]
    if accounts and not any(
        present_requests(accounts, position) & set(actions[position].requests) for position in places
    ):
        raise NotApplicable("no request was there to be handed over")
    remaining_actions = tuple(action for action in actions if action.kind != "hand-over")
    if not remaining_actions:
        raise NotApplicable("nothing but hand-overs happens")
    variant_trace = subject(replace(case, session=replace(case.session, actions=remaining_actions)))
    # Launched steps are resolved before a hand-over: without it some may still be on their way in the end.
    exact = not layout.traits.keeps_prefixes and not case.may_wait and not case.session.overlapped
    exact = exact and not layout.mixed_prefill
    for member in members(case, trace):
        twin = variant_trace.shared.requests[member.number] if variant_trace.shared is not None else None
        if twin is None:
            continue
        variant = "without the hand-overs"
        has_finding = False
        for fact in compare_request("serving.hand-over", member, twin, oracle, subject, variant):
            has_finding = has_finding or isinstance(fact, Finding)
            yield fact
        # Rows of a draft may run again in other blocks: its scores, and the tree with them, round otherwise.
        has_model = member.alone.draft.reads is not None or member.alone.draft.model is not None
        if exact and not has_finding and not has_model:
            where: Where = {"request": member.number, "variant": variant}
            yield from unlike_bits("serving.hand-over", member.trace, twin, where)


INVARIANTS = (
    Invariant(
        "serving.matcher-in-step",
        "After every step the grammar's matcher has read each emitted token once, and nothing that was only drafted.",
        needing(Stage.EMITTED, Stage.COMMITTED),
        matcher_in_step,
        has_grammar,
    ),
    Invariant(
        "serving.frames-in-epoch",
        "The results of a launched step count once, for the request and the epoch that it was launched for.",
        needing(Stage.EMITTED),
        frames_in_epoch,
        _has_overlap,
        speaks_of="session",
    ),
    Invariant(
        "serving.writes-in-owned-pages",
        "A launched step writes to pages that its request owned when it was launched.",
        needing(),
        writes_in_owned_pages,
        lambda case: _has_overlap(case) and case.layout.traits.pages,
        speaks_of="session",
    ),
    Invariant(
        "serving.no-placeholder",
        "No placeholder for an unknown token reaches a draft or the target.",
        needing(),
        no_placeholder,
        _has_overlap,
        speaks_of="session",
    ),
    Invariant(
        "serving.steps-after-finish",
        "A request that has ended runs at most once more, and only if the host did not know of its end.",
        needing(Stage.EMITTED),
        steps_after_finish,
        _has_overlap,
        speaks_of="session",
    ),
    Invariant(
        "serving.hand-over",
        "A request that is handed over to another server goes on with the numbers and tokens that it would have had.",
        needing(Stage.SCORED),
        stays,
        has_hand_over,
        every=TURNS,
        speaks_of="session",
    ),
)
