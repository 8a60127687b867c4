"""Servers under load: each answer is what the same request gets alone, and mix-ups are shrunk to two requests."""

from dataclasses import replace
from pathlib import Path

import numpy as np
import pytest

from specverify.backends.registry import open_backend
from specverify.campaign.search import Search
from specverify.checkpoints.load import cases_under_load
from specverify.cli import main
from specverify.plan import Plan
from specverify.properties.invariants import ALL
from specverify.properties.verdict.finding import Verdict
from specverify.properties.verdict.judge import judge
from specverify.reference.case import Case
from specverify.reference.oracle.checkpoint import identify
from specverify.reference.oracle.decoder import Oracle
from specverify.reference.sampling import Sampling, Stops
from specverify.reference.session import Action, Mate, Session
from specverify.setup.subjects import subject_of
from tests.inprocess import in_this_process
from tests.servers import Served, checkpoint, serving
from tests.strangers.batching_engine import MIX_UPS

NAMES = ("greedy-match", "own-seed", "takes-part", "stops", "completes")
INVARIANTS = tuple(invariant for invariant in ALL if invariant.name.removeprefix("lossless.") in NAMES)


@pytest.fixture(scope="module")
def tiny(tmp_path_factory: pytest.TempPathFactory) -> Path:
    return checkpoint(tmp_path_factory.mktemp("load") / "tiny")


def session_on(folder: Path, mates: tuple[Mate, ...], actions: tuple[Action, ...]) -> Case:
    alone = Case(identify(folder), (3, 1, 4), sampling=Sampling(1.0, seed=5), stops=Stops(6))
    return replace(alone, session=Session(mates, actions, continuous=True))


def verdict_of(served: Served, case: Case) -> Verdict:
    backend = open_backend(f"openai:{served.url}#own-seed=yes,timeout=10,tries=1")
    return judge(case, INVARIANTS, Oracle(), subject_of(backend))


ADD = tuple(Action("add", (number,)) for number in range(3))
TRIES = 3
"""Runs in which a planted mix-up has to show."""

LONG, SHORT = Mate((3, 2, 7, 1), stops=Stops(12)), Mate((5,), stops=Stops(2))


def test_requests_that_arrive_and_go_change_no_other(tiny: Path) -> None:
    step, cancel = Action("step", (0,)), Action("cancel", (1,))
    case = session_on(tiny, (LONG, SHORT), (ADD[0], step, ADD[1], step, step, cancel, ADD[2]))
    with serving(Served(tiny, mix_up="")) as served:
        verdict = verdict_of(served, case)
        assert verdict.agreed
        assert verdict.outcomes["lossless.own-seed"] == "checked"
        assert verdict.trace is not None
        assert verdict.trace.shared is not None
        assert [trace is not None for trace in verdict.trace.shared.requests] == [True, False, True]
        assert served.stepping is not None
        assert served.stepping.num_cancelled == 1


@pytest.mark.parametrize("mix_up", ["answers-swapped", "seed-shared", "cancelled-kv"])
def test_a_mix_up_differs(mix_up: str, tiny: Path) -> None:
    with serving(Served(tiny, mix_up=mix_up)) as served:
        drawn = replace(SHORT, sampling=Sampling(4.0, seed=3), stops=Stops(8))
        actions = (ADD[0], ADD[1], Action("step", (0,)), Action("step", (0,)), Action("cancel", (0,)), ADD[2])
        case = session_on(tiny, (LONG, drawn), actions)
        # Actions come by the clock: on a busy machine a request may have ended before it is cancelled.
        assert any(verdict_of(served, case).first is not None for _ in range(TRIES))


def test_sessions_under_load_are_drawn_by_the_seed(tiny: Path) -> None:
    alone = Case(identify(tiny), (3, 1, 4, 1, 5), sampling=Sampling(1.0), stops=Stops(16))
    cases = [replace(alone, prompt=(number, *alone.prompt)) for number in range(12)]
    loaded = cases_under_load(cases, (1, 4, 16), 0, own_stops=True)
    assert loaded == cases_under_load(cases, (1, 4, 16), 0, own_stops=True)
    assert loaded[:12] == cases
    sessions = [case.session for case in loaded if case.session is not None]
    assert [1 + len(session.mates) for session in sessions] == [4, 4, 4, 16]
    assert {action.kind for session in sessions for action in session.actions} == {"add", "step", "cancel"}
    mates = [mate for session in sessions for mate in session.mates]
    assert {mate.stops.max_new_tokens for mate in mates} == {16, 8, 2}
    assert {bool(mate.stops.stop_tokens) for mate in mates} == {True, False}
    assert {mate.sampling.greedy for mate in mates} == {True, False}
    assert len({mate.prompt[0] for mate in mates[-15:]}) < 12, "some begin as another"


@pytest.mark.parametrize(
    ("words", "line"),
    [
        (["--backend", "cpu-eager", "--model", "tiny", "--concurrency", "1,4"],
         "--concurrency 1,4: cpu-eager declares no continuous batching"),
        (["--backend", "cpu-eager", "--concurrency", "4"], "--concurrency needs --model, and contradicts --batch"),
        (["--backend", "cpu-eager", "--model", "tiny", "--batch", "2", "--concurrency", "4"], "contradicts --batch"),
        (["--backend", "cpu-eager", "--model", "tiny", "--concurrency", "4,1"], "ascending, such as 1,4,16"),
    ],
)  # fmt: skip
def test_a_number_of_requests_that_nobody_can_run_is_refused(
    words: list[str], line: str, tiny: Path, monkeypatch: pytest.MonkeyPatch, capfd: pytest.CaptureFixture[str]
) -> None:
    in_this_process(monkeypatch)
    monkeypatch.chdir(tiny.parent)
    with pytest.raises(SystemExit) as ended:
        main(["diff", *words])
    assert ended.value.code == 2
    printed = capfd.readouterr()
    assert line in " ".join((printed.out + printed.err).split())


def cases_on(folder: Path, count: int) -> list[Case]:
    """Sampled cases with prompts of one to ten tokens, and room for eight."""
    rng = np.random.default_rng(0)
    prompts = [tuple(rng.integers(0, 17, size=int(rng.integers(1, 11))).tolist()) for _ in range(count)]
    return [Case(identify(folder), prompt, sampling=Sampling(1.0, seed=1), stops=Stops(8)) for prompt in prompts]


# Whether a request is inside when its connection closes is a matter of time: that mix-up has its own actions above.
@pytest.mark.slow
@pytest.mark.parametrize("mix_up", [name for name in MIX_UPS if name != "cancelled-kv"])
def test_a_mix_up_of_a_server_is_shrunk_to_the_fewest_requests(mix_up: str, tiny: Path) -> None:
    with serving(Served(tiny, mix_up=mix_up)) as served:
        subject = subject_of(open_backend(f"openai:{served.url}#own-seed=yes,timeout=10,tries=1"))
        plan = Plan("server", dtypes=("float32",), shrink_s=60.0)
        search = Search(plan, INVARIANTS, Oracle(), subject, lambda _: None, lambda: False)
        search.run_given((case, INVARIANTS) for case in cases_under_load(cases_on(tiny, 64), (4,), 0, own_stops=True))
    assert search.smallest is not None, "nothing was found"
    assert search.smallest.session is not None
    assert len(search.smallest.session.mates) < 3


@pytest.mark.slow
def test_a_server_that_mixes_nothing_up_agrees(
    tiny: Path, tmp_path: Path, monkeypatch: pytest.MonkeyPatch, capfd: pytest.CaptureFixture[str]
) -> None:
    in_this_process(monkeypatch)
    monkeypatch.chdir(tmp_path)
    with serving(Served(tiny, mix_up="")) as served:
        words = ["--backend", f"openai:{served.url}#own-seed=yes,timeout=10,tries=1", "--model", str(tiny)]
        words += ["--concurrency", "1,4,16", "--temperature", "1", "--cases", "16", "--new-tokens", "6"]
        with pytest.raises(SystemExit) as ended:
            main(["diff", *words])
    assert "21 of 21 cases agree" in " ".join(capfd.readouterr().out.split())
    assert ended.value.code == 0
