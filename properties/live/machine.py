"""The Hypothesis state machine that plays actions on a live session.

Each rule of the machine is one kind of action. `watch.py` plays the action on the backend and checks the session after
it; `play.py` runs the machine.
"""

import time
from collections.abc import Callable
from dataclasses import replace

from hypothesis import reject
from hypothesis import strategies as st
from hypothesis.stateful import RuleBasedStateMachine, initialize, precondition, rule

from properties.live.openings import MOST_MATES, Declines
from properties.live.watch import Differs, SessionStats, Watch, located
from properties.shrinking.cases import size
from properties.strategies.serving.ahead import takes_ahead
from properties.strategies.sessions import BRANCHES
from properties.verdict.finding import Verdict
from properties.verdict.invariant import Oracle
from properties.verdict.subject import NoTrace, Subject
from reference.case import Case
from reference.draft import Draft, Scripted, most_rows
from reference.malformed import Malformed
from reference.session import Action

GO_ON = st.booleans()
"""Whether all living requests take a step right after an action."""

SHRINK_S = 20.0
"""Time limit, in seconds, for shrinking a session that differs from the oracle."""


class Enough(BaseException):
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
    opened: st.SearchStrategy[Case],
    played: SessionStats,
    judged: int = 1,
    shrink_s: float = SHRINK_S,
    met: list[Verdict] | None = None,
) -> type[RuleBasedStateMachine]:
    """A machine that draws a session from `opened` and plays it on `subject`, counting in `played`.

    Every session is checked after each action; one session in `judged` is also judged by every invariant at its end.
    A difference is raised as `Differs`. After the first one, only a difference in the same invariant at the same stage
    is raised, so that Hypothesis shrinks that session and does not slip to another fault. `Enough` ends the shrinking
    after `shrink_s` seconds. `met` receives the first verdict that differed, then the smallest one so far.
    """
    first: list[Verdict] = [] if met is None else met
    until = float("inf")
    hands_over = subject.abilities is None or "hand-over" in subject.abilities.actions

    class Machine(RuleBasedStateMachine):
        watch: Watch | None = None

        @initialize(case=opened, entering=st.integers(0, 2 * MOST_MATES))
        def open(self, case: Case, entering: int) -> None:
            """Open a session; the case's own request and some of its mates enter."""
            if time.monotonic() > until:
                raise Enough
            try:
                self.watch = Watch(case, oracle, subject, played)
            except NoTrace as absent:
                played.declined[absent.outcome.why] += 1
                reject()
            # Request 0, the case's own, always enters; more draws than mates mean that all enter.
            for number in range(1 + min(entering, len(self._of("new")) - 1)):
                self._do(Action("add", (number,)))

        def _go_on(self, go_on: bool) -> None:
            """If `go_on`, step every living request: damage done by an action shows in the next step."""
            if go_on and self._of("living"):
                self._do(Action("step", tuple(self._of("living"))))

        def _do(self, action: Action) -> None:
            self._told(lambda watch: watch.do(action))

        def _told(self, what: Callable[[Watch], None]) -> None:
            watch = self.watch
            if watch is None:
                return
            self.watch = None  # set again below: a session that broke takes no further action
            try:
                what(watch)
            except NoTrace as absent:
                played.declined[absent.outcome.why] += 1
                return
            except Differs as differs:
                nonlocal until
                if not first:
                    first.append(differs.verdict)
                    until = time.monotonic() + shrink_s
                if located(differs.verdict) == located(first[0]):
                    # The last entry is the smallest verdict so far; the first fixes invariant and stage.
                    first.append(min(first[-1], differs.verdict, key=_size))
                    raise
                return
            self.watch = watch

        def _of(self, kind: str) -> list[int]:
            return sorted(getattr(self.watch, kind)) if self.watch is not None else []

        @rule(data=st.data())
        def step(self, data: st.DataObject) -> None:
            """Step some requests, in any order of the batch; named requests that wait are left out by the engine.

            If no request is living, one is restored or added first: Hypothesis may have left out the rules that do so.
            """
            for kind, waiting in (("restore", "evicted"), ("add", "new")):
                if not self._of("living") and self._of(waiting):
                    self._do(Action(kind, (self._of(waiting)[0],)))
            everyone = [number for kind in ("new", "living", "evicted") for number in self._of(kind)]
            order = data.draw(st.permutations(data.draw(st.sampled_from((self._of("living"), everyone))) or [0]))
            self._do(Action("step", tuple(order[: data.draw(st.integers(1, len(order)))])))

        @precondition(lambda self: self._of("living") and self._ahead())
        @rule(data=st.data(), times=st.sampled_from((1, 2, 2, 3)), resolved=st.integers(0, 2))
        def launch(self, data: st.DataObject, times: int, resolved: int) -> None:
            """Launch steps of some requests, once or more in a row; the results of some are resolved behind them."""
            for _ in range(times):
                order = data.draw(st.permutations(self._of("living") or [0]))
                self._do(Action("launch", tuple(order[: data.draw(st.integers(1, len(order)))])))
            if not resolved:
                self._do(Action("resolve", (data.draw(st.sampled_from(order)),)))

        @precondition(lambda self: self._ahead() and self._launched())
        @rule(data=st.data())
        def resolve(self, data: st.DataObject) -> None:
            """Resolve the results in flight up to those of a request, which may have left meanwhile."""
            self._do(Action("resolve", (data.draw(st.sampled_from(self._launched())),)))

        def _ahead(self) -> bool:
            """Whether this session's steps may be launched ahead of the host."""
            if self.watch is None or self.watch.case.session is None:
                return False
            drafts = [self.watch.case.draft, *(mate.draft for mate in self.watch.case.session.mates)]
            return takes_ahead(drafts, subject.abilities)

        def _launched(self) -> list[int]:
            """Requests that some launch has named."""
            session = None if self.watch is None else self.watch.case.session
            actions = () if session is None else session.actions
            return sorted({one for action in actions if action.kind == "launch" for one in action.requests})

        @precondition(lambda self: self._of("living"))
        @rule()
        def step_all(self) -> None:
            self._do(Action("step", tuple(self._of("living"))))

        @precondition(lambda self: self._of("living"))
        @rule(data=st.data(), backwards=st.booleans())
        def step_two(self, data: st.DataObject, backwards: bool) -> None:
            # At most two neighbours, in either order: the smallest batch in which lanes can be mixed up.
            living = self._of("living")
            at = data.draw(st.integers(0, len(living) - 1))
            self._do(Action("step", tuple(living[at : at + 2][:: -1 if backwards else 1])))

        @precondition(lambda self: self._of("new"))
        @rule(data=st.data(), go_on=GO_ON)
        def add(self, data: st.DataObject, go_on: bool) -> None:
            self._do(Action("add", (data.draw(st.sampled_from(self._of("new"))),)))
            self._go_on(go_on)

        @precondition(lambda self: self._of("new") and self._of("living"))
        @rule(data=st.data(), go_on=GO_ON)
        def fork(self, data: st.DataObject, go_on: bool) -> None:
            source, twin = (data.draw(st.sampled_from(self._of(kind))) for kind in ("living", "new"))
            self._do(Action("fork", (source, twin)))
            self._go_on(go_on)

        @precondition(lambda self: self._of("living"))
        @rule(data=st.data(), go_on=GO_ON)
        def preempt(self, data: st.DataObject, go_on: bool) -> None:
            order = data.draw(st.permutations(self._of("living")))
            self._do(Action("preempt", tuple(order[: data.draw(st.integers(1, 2))])))
            self._go_on(go_on)

        @precondition(lambda self: self._of("living"))
        @rule(data=st.data(), midway=st.booleans(), go_on=GO_ON)
        def evict(self, data: st.DataObject, midway: bool, go_on: bool) -> None:
            """Evict a request, between two steps or (`midway`) between draft and verify."""
            self._interrupt("evict", data.draw(st.sampled_from(self._of("living"))), midway)
            self._go_on(go_on)

        @precondition(lambda self: self._of("living") and hands_over)
        @rule(data=st.data(), go_on=GO_ON)
        def hand_over(self, data: st.DataObject, go_on: bool) -> None:
            """Hand a request over to another server, which goes on from its packet."""
            self._do(Action("hand-over", (data.draw(st.sampled_from(self._of("living"))),)))
            self._go_on(go_on)

        @precondition(lambda self: self._of("evicted"))
        @rule(data=st.data(), go_on=GO_ON)
        def restore(self, data: st.DataObject, go_on: bool) -> None:
            self._do(Action("restore", (data.draw(st.sampled_from(self._of("evicted"))),)))
            self._go_on(go_on)

        @precondition(lambda self: len(self._of("living")) + len(self._of("evicted")) > 1)
        @rule(data=st.data(), midway=st.booleans(), go_on=GO_ON)
        def cancel(self, data: st.DataObject, midway: bool, go_on: bool) -> None:
            """Cancel a request, between two steps or (`midway`) between draft and verify."""
            gone = data.draw(st.sampled_from(self._of("living") + self._of("evicted")))
            self._interrupt("cancel", gone, midway)
            self._go_on(go_on)

        def _interrupt(self, kind: str, number: int, midway: bool) -> None:
            # A preemption drafts the request and throws the draft back before the verify forward.
            if midway and number in self._of("living"):
                self._do(Action("preempt", (number,)))
            self._do(Action(kind, (number,)))

        @precondition(lambda self: self._of("living"))
        @rule(data=st.data(), go_on=GO_ON)
        def switch(self, data: st.DataObject, go_on: bool) -> None:
            number = data.draw(st.sampled_from(self._of("living")))
            known = self._switches(number)
            if known:
                self._do(Action("switch", (number,), data.draw(st.sampled_from(known))))
                self._go_on(go_on)

        def _switches(self, number: int) -> list[Draft]:
            """Drafts to which request `number` may switch."""
            assert self.watch is not None
            case = self.watch.case
            assert case.session is not None
            mine = case.alone(number)
            # A sampled request's tokens depend on its drafts, so that the oracle would have no single answer.
            if not mine.sampling.greedy:
                return []
            drafts = [case.draft, *(mate.draft for mate in case.session.mates)]
            # Blocks of the session were sized for the largest tree of its drafts.
            most = max(map(most_rows, drafts))
            fitting: list[Draft] = [Scripted()]
            for draft in (BRANCHES, *drafts):
                if most_rows(draft) <= most and draft not in fitting and draft.trees is None:
                    fitting.append(draft)
            return [draft for draft in fitting if _admitted(mine, draft, subject.declines)]

        @precondition(lambda self: self.watch is not None)
        @rule(data=st.data(), kind=st.sampled_from(("add", "restore", "evict", "cancel", "preempt", "step")))
        def in_vain(self, data: st.DataObject, kind: str) -> None:
            """An action on a request that has finished or was cancelled, where the action must do nothing."""
            assert self.watch is not None
            assert self.watch.case.session is not None
            everyone = set(range(1 + len(self.watch.case.session.mates)))
            over = sorted(everyone - self.watch.new - self.watch.living - self.watch.evicted)
            if over:
                self._do(Action(kind, (data.draw(st.sampled_from(over)),)))

        def teardown(self) -> None:
            """Close the session, and judge every request of it if the session's turn has come."""
            # While shrinking, every session is judged, since the fault may show only there.
            thoroughly = bool(first) or played.sessions % judged == 0
            self._told(lambda watch: watch.close(thoroughly))
            self.watch = None

    return Machine


def _admitted(mine: Case, draft: Draft, declines: Declines) -> bool:
    try:
        return not declines(replace(mine, draft=draft))
    except Malformed:
        return False
