"""Play of drawn sessions on a backend, and shrinking of a session that differs."""

import time

from hypothesis import seed
from hypothesis.errors import Flaky
from hypothesis.stateful import run_state_machine_as_test

from specverify.properties.invariants import ALL
from specverify.properties.live.machine import SHRINK_S, ShrinkTimeout, machine, openings
from specverify.properties.live.watch import Difference, SessionStats, locate
from specverify.properties.shrinking.cases import nearer, size
from specverify.properties.strategies.settings import SEARCHING, drawing_settings, without_local_constants
from specverify.properties.tally import Failure
from specverify.properties.verdict.finding import Verdict
from specverify.properties.verdict.invariant import Oracle
from specverify.properties.verdict.judge import judge
from specverify.properties.verdict.subject import Subject

ROUND = 25
"""Sessions that Hypothesis draws from one seed; few, since it remembers all of them while it draws."""


def play(
    subject: Subject,
    oracle: Oracle,
    stats: SessionStats,
    kind: str | None = None,
    dtype: str = "float32",
    sessions: int = ROUND,
    actions: int = 50,
    number: int = 0,
    judged: int = 1,
    name: str | None = None,
) -> Failure | None:
    """Play `sessions` sessions of `actions` actions, drawn from seed `number`, and count them in `stats`.

    The subject must have `serve`, the entry point of live sessions. `kind` names the KV layout; None draws any.
    Hypothesis may draw a few more sessions that it throws away. One session in `judged` is judged by every invariant at
    its end. `name` is the backend's for `--backend`, for the command that replays a failure. The first failure that was
    met comes back as small as shrinking made it.
    """
    settings = drawing_settings(sessions, SEARCHING, stateful_step_count=actions)
    verdicts: list[Verdict] = []
    state_machine = machine(subject, oracle, openings(kind, dtype, subject.declines), stats, judged, verdicts)
    try:
        with without_local_constants():
            run_state_machine_as_test(seed(number)(state_machine), settings=settings)
    # Hypothesis may call a session flaky whose shrinking `ShrinkTimeout` ended.
    except (Difference, ShrinkTimeout, Flaky):
        if not verdicts:
            raise
        return _failure(verdicts[-1], oracle, subject, name or subject.name)
    return None


def _failure(live_verdict: Verdict, oracle: Oracle, subject: Subject, name: str) -> Failure:
    """The failure, judged again as a case in a run of its own, as a replay judges it.

    If the case agrees there, the verdict from the live session is reported.
    """
    invariant, stage = locate(live_verdict)
    invariants = [candidate for candidate in ALL if candidate.name == invariant]
    best = live_verdict.case
    until = time.monotonic() + SHRINK_S
    progress = True
    while progress and time.monotonic() < until:  # without the machine: fewer mates, actions, nodes
        progress = False
        for case in nearer(best):
            if time.monotonic() > until:
                break
            # Only the invariant that failed live is judged here; all of them judge the result at the end.
            finding = judge(case, invariants, oracle, subject).first if size(case) < size(best) else None
            if finding is not None and finding.stage is stage:
                best = case
                progress = True
                break
    verdict = judge(best, ALL, oracle, subject)
    verdict = verdict if verdict.first is not None else live_verdict
    assert verdict.first is not None
    return Failure(verdict, verdict.first, live_verdict.case.id, backend=name)
