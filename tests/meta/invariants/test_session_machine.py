"""The session machine drives whoever serves sessions: a stranger clean, and with a fault that it makes small."""

import sys
from pathlib import Path

import pytest

sys.path.insert(0, str(Path(__file__).resolve().parents[2] / "strangers"))

from specverify.campaign.replay import replay
from specverify.properties.live.play import play
from specverify.properties.live.watch import Difference, SessionStats, Watch
from specverify.properties.tally import Failure
from specverify.properties.verdict.subject import Crash, NoTrace
from specverify.reference.case import Case
from specverify.reference.layout import KvLayout
from specverify.reference.oracle.decoder import Oracle
from specverify.reference.sampling import Stops
from specverify.reference.session import Action, Mate, Session
from specverify.reference.trace import Stage
from specverify.reports import bundle
from specverify.setup.subjects import open_planted, subject_of
from tests.models import LLAMA

TWO = Case(
    LLAMA,
    (3, 1, 4),
    layout=KvLayout(kind="paged", page_size=2),
    stops=Stops(6),
    session=Session((Mate((3, 1, 5), stops=Stops(6)),)),
)


def drive_sessions(
    backend: str, sessions: int = 10, number: int = 0, actions: int = 12
) -> tuple[Failure | None, SessionStats]:
    played = SessionStats()
    subject = subject_of(open_planted(backend, None))
    failure = play(subject, Oracle(), played, "paged", sessions=sessions, actions=actions, number=number, name=backend)
    return failure, played


def test_a_strangers_engine_is_driven_clean() -> None:
    failure, played = drive_sessions("paged_sessions:clean")
    assert failure is None
    assert played.judged == played.sessions > 0
    assert played.steps > 0
    assert played.compared == played.advances > 0
    assert {"add", "step"} <= set(played.actions)
    assert not played.declined


@pytest.mark.slow
def test_its_fault_becomes_the_smallest_session_that_shows_it_and_replays(tmp_path: Path) -> None:
    # Not every seed meets the fault, and another version of Hypothesis draws other sessions.
    tries = (
        drive_sessions("paged_sessions:careless", sessions=100, number=number, actions=25)[0] for number in range(2, 10)
    )
    failure = next((attempt for attempt in tries if attempt is not None), None)
    assert failure is not None
    session = failure.verdict.case.session
    assert session is not None
    assert len(session.actions) <= 12  # 3 on an idle machine: making it smaller ends by the clock
    assert "fork" in {action.kind for action in session.actions}
    assert failure.finding.stage is Stage.EMITTED
    file = str(bundle.save(tmp_path, failure, {}))
    assert replay(file, backend="paged_sessions:careless", fault=None).word == "FAILED"
    assert replay(file, backend="paged_sessions:clean", fault=None).word == "FIXED"


def watch_for(name: str, played: SessionStats) -> Watch:
    return Watch(TWO, Oracle(), subject_of(open_planted(name, None)), played)


@pytest.mark.parametrize("name", ["paged_sessions:clean", "cpu-eager"])
def test_who_lives_waits_and_is_over_is_followed_and_counted(name: str) -> None:
    played = SessionStats()
    watch = watch_for(name, played)
    watch.do(Action("add", (0,)))
    watch.do(Action("add", (1,)))
    assert (watch.new, watch.living, watch.evicted) == (set(), {0, 1}, set())
    watch.do(Action("step", (1, 0)))
    watch.do(Action("evict", (1,)))
    assert (watch.living, watch.evicted) == ({0}, {1})
    assert played.undisturbed == 0
    watch.do(Action("step", (0, 1)))
    assert played.undisturbed == 1
    watch.do(Action("restore", (1,)))
    watch.do(Action("step", (1,)))
    watch.do(Action("cancel", (0,)))
    assert (watch.living, watch.evicted) == ({1}, set())
    watch.close()
    assert (played.steps, played.advances, played.sessions, played.judged) == (3, 4, 1, 1)
    assert played.interruptions == {"evict": 1, "cancel": 2}


def test_a_session_that_breaks_is_a_finding_of_its_own() -> None:
    watch = watch_for("paged_sessions:clean", SessionStats())

    class Breaking:
        trace = None

        def do(self, action: Action) -> None:
            raise NoTrace(Crash(Stage.COMMITTED, "no slot"))

    watch._live = Breaking()  # type: ignore[assignment]
    with pytest.raises(Difference, match=r"lossless\.completes at COMMITTED") as caught:
        watch.do(Action("add", (0,)))
    assert caught.value.verdict.case == watch.case
