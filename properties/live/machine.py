"""The Hypothesis state machine that plays actions on a live session, and its first sessions.

In an opening all requests run on one model, and no action has happened yet. Each rule of the machine is one kind of
action. `watch.py` plays the action on the backend and checks the session after it; `play.py` runs the machine.
"""

import time
from collections.abc import Callable
from contextlib import suppress
from dataclasses import replace

from hypothesis import assume, reject
from hypothesis import strategies as st
from hypothesis.stateful import RuleBasedStateMachine, initialize, precondition, rule

from specverify.properties.live.watch import Difference, SessionStats, Watch, locate
from specverify.properties.shrinking.cases import size
from specverify.properties.strategies.cases import single_cases
from specverify.properties.strategies.layouts import layouts, with_branch_caches
from specverify.properties.strategies.serving.ahead import takes_ahead
from specverify.properties.strategies.serving.second_tier import with_tiers
from specverify.properties.strategies.sessions import BRANCHES, mates
from specverify.properties.verdict.finding import Verdict
from specverify.properties.verdict.invariant import Oracle
from specverify.properties.verdict.subject import NoTrace, Subject
from specverify.reference.architecture import Seeded
from specverify.reference.case import Case
from specverify.reference.draft import Draft, Scripted, most_rows
from specverify.reference.layout import KvLayout
from specverify.reference.malformed import Malformed
from specverify.reference.sampling import Sampling, Stops
from specverify.reference.session import Action, Mate, Session

MOST_MATES = 7
MOST_TOKENS = 24
"""Largest number of tokens that a request emits; it takes as many steps if no draft token is accepted."""

GO_ON = st.booleans()
"""Whether all living requests take a step right after an action."""

SHRINK_S = 20.0
"""Time limit, in seconds, for shrinking a session that differs from the oracle."""

Declines = Callable[[Case], str | None]
"""Returns the backend's reason against a case, or None if the backend takes the case."""


def _mate(case: Case) -> Mate:
    return Mate(case.prompt, case.draft, case.sampling, case.stops)


def _long_stops(stops: Stops) -> st.SearchStrategy[Stops]:
    """Stops that let a request live long enough to be interrupted.

    Three in four have a limit of length alone; the others keep the end tokens and strings of `stops`.
    """
    tokens = st.integers(1, MOST_TOKENS)
    free = tokens.map(Stops)
    return st.one_of(free, free, free, tokens.map(lambda count: replace(stops, max_new_tokens=count)))


def _fit(case: Case, declines: Declines) -> Case:
    """`case`, or a plainer case that is not declined: without sampling, then also without stops and draft."""
    if not declines(case):
        return case
    plain = replace(case, sampling=Sampling())
    if not declines(plain):
        return plain
    bare = replace(plain, draft=Scripted(), stops=Stops(plain.stops.max_new_tokens))
    return next((candidate for candidate in (replace(plain, stops=bare.stops), bare) if not declines(candidate)), bare)


@st.composite
def openings(draw: st.DrawFn, kind: str | None, dtype: str, declines: Declines) -> Case:
    """Sessions without actions: requests on one model, in KV layout `kind` if given.

    Settings that `declines` has a reason against are left out of the requests.
    """
    case = draw(single_cases((dtype,), (), kind))
    draft = case.draft.in_batches(())  # the actions will decide how many requests step together
    case = _fit(replace(case, draft=draft, layout=replace(case.layout, pages=())), declines)
    # No plainer request changes the model: a draw of one that the engine does not declare is repeated.
    assume(not declines(case))
    assert isinstance(case.model, Seeded)
    # A second case on the same model lends its draft and its sampling to some mates.
    stranger = draw(single_cases((dtype,), (), kind, case.model))
    stranger = replace(stranger, draft=stranger.draft.in_batches(()))
    company = []
    unpaged = replace(case, layout=replace(case.layout, pages=()))  # drawn for one request of its own length
    for _ in range(draw(st.integers(2, MOST_MATES))):
        mate = _mate(_fit(replace(unpaged, session=Session((draw(mates(unpaged, stranger)),))).alone(1), declines))
        company.append(replace(mate, stops=draw(_long_stops(mate.stops))))
    opening = replace(case, layout=KvLayout(), steps=0, session=Session(tuple(company)))
    with suppress(Malformed):  # the draft model may not have enough positions for more tokens
        opening = replace(opening, stops=draw(_long_stops(case.stops)))
    # A fork's prompt includes another request's tokens, so that the sum of all lengths is the upper bound.
    requests = [opening.alone(number) for number in range(1 + len(company))]
    longest = sum(request.longest for request in requests)
    most = max(most_rows(request.draft) for request in requests)
    opening = replace(opening, layout=draw(layouts(longest, most, len(case.prompt), kind, len(requests))))
    for draw_layout in (with_tiers, with_branch_caches):
        candidate = draw(draw_layout(opening, None))
        opening = opening if declines(candidate) else candidate
    return opening


class ShrinkTimeout(BaseException):
    """Ends the shrinking of a session from inside the machine.

    It is no Exception, so that Hypothesis does not take it for a failure of the session.
    """


def _size(verdict: Verdict) -> tuple[float, ...]:
    session = verdict.case.session
    assert session is not None
    return (len(session.actions), len(session.mates), *size(verdict.case))


def machine(
    subject: Subject,
    oracle: Oracle,
    opening: st.SearchStrategy[Case],
    stats: SessionStats,
    judged: int,
    verdicts: list[Verdict],
) -> type[RuleBasedStateMachine]:
    """A machine that draws a session from `opening` and plays it on `subject`, counting in `stats`.

    Every session is checked after each action; one session in `judged` is also judged by every invariant at its end.
    A difference is raised as `Difference`. After the first one, only a difference in the same invariant at the same
    stage is raised, so that Hypothesis shrinks that session and does not slip to another fault. `ShrinkTimeout` ends
    the shrinking after SHRINK_S. `verdicts` receives the first verdict that differed, then the smallest so far.
    """
    deadline = float("inf")
    hands_over = subject.abilities is None or "hand-over" in subject.abilities.actions

    class Machine(RuleBasedStateMachine):
        watch: Watch | None = None

        @initialize(case=opening, entering=st.integers(0, 2 * MOST_MATES))
        def open(self, case: Case, entering: int) -> None:
            """Open a session; the case's own request and some of its mates enter."""
            if time.monotonic() > deadline:
                raise ShrinkTimeout
            try:
                self.watch = Watch(case, oracle, subject, stats)
            except NoTrace as no_trace:
                stats.declined[no_trace.outcome.why] += 1
                reject()
            # Request 0, the case's own, always enters; more draws than mates mean that all enter.
            for number in range(1 + min(entering, len(self._requests("new")) - 1)):
                self._do(Action("add", (number,)))

        def _go_on(self, go_on: bool) -> None:
            """If `go_on`, step every living request: damage done by an action shows in the next step."""
            if go_on and self._requests("living"):
                self._do(Action("step", tuple(self._requests("living"))))

        def _do(self, action: Action) -> None:
            self._play_on_watch(lambda watch: watch.do(action))

        def _play_on_watch(self, play: Callable[[Watch], None]) -> None:
            watch = self.watch
            if watch is None:
                return
            self.watch = None  # set again below: a session that broke takes no further action
            try:
                play(watch)
            except NoTrace as no_trace:
                stats.declined[no_trace.outcome.why] += 1
                return
            except Difference as difference:
                nonlocal deadline
                if not verdicts:
                    verdicts.append(difference.verdict)
                    deadline = time.monotonic() + SHRINK_S
                if locate(difference.verdict) == locate(verdicts[0]):
                    # The last entry is the smallest verdict so far; the first fixes invariant and stage.
                    verdicts.append(min(verdicts[-1], difference.verdict, key=_size))
                    raise
                return
            self.watch = watch

        def _requests(self, kind: str) -> list[int]:
            return sorted(getattr(self.watch, kind)) if self.watch is not None else []

        @rule(data=st.data())
        def step(self, data: st.DataObject) -> None:
            """Step some requests, in any order of the batch; named requests that wait are left out by the engine.

            If no request is living, one is restored or added first: Hypothesis may have left out the rules that do so.
            """
            for kind, waiting in (("restore", "evicted"), ("add", "new")):
                if not self._requests("living") and self._requests(waiting):
                    self._do(Action(kind, (self._requests(waiting)[0],)))
            everyone = [number for kind in ("new", "living", "evicted") for number in self._requests(kind)]
            order = data.draw(st.permutations(data.draw(st.sampled_from((self._requests("living"), everyone))) or [0]))
            self._do(Action("step", tuple(order[: data.draw(st.integers(1, len(order)))])))

        @precondition(lambda self: self._requests("living") and self._can_launch())
        @rule(data=st.data(), times=st.sampled_from((1, 2, 2, 3)), resolved=st.integers(0, 2))
        def launch(self, data: st.DataObject, times: int, resolved: int) -> None:
            """Launch steps of some requests, once or more in a row; the results of some are resolved behind them."""
            for _ in range(times):
                order = data.draw(st.permutations(self._requests("living") or [0]))
                self._do(Action("launch", tuple(order[: data.draw(st.integers(1, len(order)))])))
            if not resolved:
                self._do(Action("resolve", (data.draw(st.sampled_from(order)),)))

        @precondition(lambda self: self._can_launch() and self._launched_requests())
        @rule(data=st.data())
        def resolve(self, data: st.DataObject) -> None:
            """Resolve the results in flight up to those of a request, which may have left meanwhile."""
            self._do(Action("resolve", (data.draw(st.sampled_from(self._launched_requests())),)))

        def _can_launch(self) -> bool:
            """Whether this session's steps may be launched ahead of the host."""
            if self.watch is None or self.watch.case.session is None:
                return False
            drafts = [self.watch.case.draft, *(mate.draft for mate in self.watch.case.session.mates)]
            return takes_ahead(drafts, subject.abilities)

        def _launched_requests(self) -> list[int]:
            """Requests that some launch has named."""
            session = None if self.watch is None else self.watch.case.session
            actions = () if session is None else session.actions
            return sorted({number for action in actions if action.kind == "launch" for number in action.requests})

        @precondition(lambda self: self._requests("living"))
        @rule()
        def step_all(self) -> None:
            self._do(Action("step", tuple(self._requests("living"))))

        @precondition(lambda self: self._requests("living"))
        @rule(data=st.data(), backwards=st.booleans())
        def step_two(self, data: st.DataObject, backwards: bool) -> None:
            # At most two neighbours, in either order: the smallest batch in which lanes can be mixed up.
            living = self._requests("living")
            index = data.draw(st.integers(0, len(living) - 1))
            self._do(Action("step", tuple(living[index : index + 2][:: -1 if backwards else 1])))

        @precondition(lambda self: self._requests("new"))
        @rule(data=st.data(), go_on=GO_ON)
        def add(self, data: st.DataObject, go_on: bool) -> None:
            self._do(Action("add", (data.draw(st.sampled_from(self._requests("new"))),)))
            self._go_on(go_on)

        @precondition(lambda self: self._requests("new") and self._requests("living"))
        @rule(data=st.data(), go_on=GO_ON)
        def fork(self, data: st.DataObject, go_on: bool) -> None:
            source, twin = (data.draw(st.sampled_from(self._requests(kind))) for kind in ("living", "new"))
            self._do(Action("fork", (source, twin)))
            self._go_on(go_on)

        @precondition(lambda self: self._requests("living"))
        @rule(data=st.data(), go_on=GO_ON)
        def preempt(self, data: st.DataObject, go_on: bool) -> None:
            order = data.draw(st.permutations(self._requests("living")))
            self._do(Action("preempt", tuple(order[: data.draw(st.integers(1, 2))])))
            self._go_on(go_on)

        @precondition(lambda self: self._requests("living"))
        @rule(data=st.data(), midway=st.booleans(), go_on=GO_ON)
        def evict(self, data: st.DataObject, midway: bool, go_on: bool) -> None:
            """Evict a request, between two steps or (`midway`) between draft and verify."""
            self._interrupt("evict", data.draw(st.sampled_from(self._requests("living"))), midway)
            self._go_on(go_on)

        @precondition(lambda self: self._requests("living") and hands_over)
        @rule(data=st.data(), go_on=GO_ON)
        def hand_over(self, data: st.DataObject, go_on: bool) -> None:
            """Hand a request over to another server, which goes on from its packet."""
            self._do(Action("hand-over", (data.draw(st.sampled_from(self._requests("living"))),)))
            self._go_on(go_on)

        @precondition(lambda self: self._requests("evicted"))
        @rule(data=st.data(), go_on=GO_ON)
        def restore(self, data: st.DataObject, go_on: bool) -> None:
            self._do(Action("restore", (data.draw(st.sampled_from(self._requests("evicted"))),)))
            self._go_on(go_on)

        @precondition(lambda self: len(self._requests("living")) + len(self._requests("evicted")) > 1)
        @rule(data=st.data(), midway=st.booleans(), go_on=GO_ON)
        def cancel(self, data: st.DataObject, midway: bool, go_on: bool) -> None:
            """Cancel a request, between two steps or (`midway`) between draft and verify."""
            number = data.draw(st.sampled_from(self._requests("living") + self._requests("evicted")))
            self._interrupt("cancel", number, midway)
            self._go_on(go_on)

        def _interrupt(self, kind: str, number: int, midway: bool) -> None:
            # A preemption drafts the request and throws the draft back before the verify forward.
            if midway and number in self._requests("living"):
                self._do(Action("preempt", (number,)))
            self._do(Action(kind, (number,)))

        @precondition(lambda self: self._requests("living"))
        @rule(data=st.data(), go_on=GO_ON)
        def switch(self, data: st.DataObject, go_on: bool) -> None:
            number = data.draw(st.sampled_from(self._requests("living")))
            drafts = self._switches(number)
            if drafts:
                self._do(Action("switch", (number,), data.draw(st.sampled_from(drafts))))
                self._go_on(go_on)

        def _switches(self, number: int) -> list[Draft]:
            """Drafts to which request `number` may switch."""
            assert self.watch is not None
            case = self.watch.case
            assert case.session is not None
            alone = case.alone(number)
            # A sampled request's tokens depend on its drafts, so that the oracle would have no single answer.
            if not alone.sampling.greedy:
                return []
            drafts = [case.draft, *(mate.draft for mate in case.session.mates)]
            # Blocks of the session were sized for the largest tree of its drafts.
            most = max(map(most_rows, drafts))
            fitting: list[Draft] = [Scripted()]
            for draft in (BRANCHES, *drafts):
                if most_rows(draft) <= most and draft not in fitting and draft.trees is None:
                    fitting.append(draft)
            return [draft for draft in fitting if _admits(alone, draft, subject.declines)]

        @precondition(lambda self: self.watch is not None)
        @rule(data=st.data(), kind=st.sampled_from(("add", "restore", "evict", "cancel", "preempt", "step")))
        def in_vain(self, data: st.DataObject, kind: str) -> None:
            """An action on a request that has finished or was cancelled, where the action must do nothing."""
            assert self.watch is not None
            assert self.watch.case.session is not None
            everyone = set(range(1 + len(self.watch.case.session.mates)))
            finished = sorted(everyone - self.watch.new - self.watch.living - self.watch.evicted)
            if finished:
                self._do(Action(kind, (data.draw(st.sampled_from(finished)),)))

        def teardown(self) -> None:
            """Close the session, and judge every request of it if the session's turn has come."""
            # While shrinking, every session is judged, since the fault may show only there.
            thoroughly = bool(verdicts) or stats.sessions % judged == 0
            self._play_on_watch(lambda watch: watch.close(thoroughly))
            self.watch = None

    return Machine


def _admits(alone: Case, draft: Draft, declines: Declines) -> bool:
    try:
        return not declines(replace(alone, draft=draft))
    except Malformed:
        return False
