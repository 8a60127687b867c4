"""What runs leave in the backend's process: a finding where it can change answers, and else told once."""

import json
import re
from collections.abc import Iterator
from pathlib import Path
from types import SimpleNamespace

import pytest

from specverify.campaign import campaign
from specverify.cli import main
from specverify.isolation.ancestor import end_keeper
from specverify.isolation.backend_spec import BackendSpec
from specverify.isolation.growth import BLOCKS, RISES, Growth, Trend
from specverify.isolation.isolated import Isolated
from specverify.isolation.limits import Patience
from specverify.properties.verdict.subject import Crash
from specverify.pytest_plugin import pytest_terminal_summary, yield_backend
from specverify.reference.case_json import case_to_json
from specverify.reference.trace import Trace
from tests.inprocess import CrewHere
from tests.meta.shell.test_isolation import ROOT, case_of, run_command

CHANGED = {
    "autocast": "torch's autocast is {'cpu': 'torch.bfloat16'}, was {}",
    "mode": "torch's stack of modes is ['BaseTorchFunctionMode'], was []",
    "kernels": "torch's attention kernels is ['mem_efficient', 'math', 'cudnn'], was ",
    "alarm-later": "the list of timers that run is ['ITIMER_REAL'], was []",
    "warnings-raise": "the number of warnings filters that raise is 1, was 0",
    "softmax-replaced": "torch.softmax was replaced",
    "attention-replaced": "torch.nn.functional.scaled_dot_product_attention was replaced",
    "method-replaced": "torch.Tensor.argmax was replaced",
    "method-hidden": "torch.nn.Linear.__call__ was replaced",
    "registry": "transformers' ALL_ATTENTION_FUNCTIONS.sdpa was replaced",
}
"""Deeds that can change the answers of later cases, and the words of their findings."""

RESIDUE_BY_DEED = {
    "environment": ("environment", "set HOSTILE_ENGINE in the environment"),
    "filters": ("warnings filters", "changed the list of warnings filters"),
    "import-path": ("import path", "changed sys.path"),
    "recursion-limit": ("recursion limit", "changed the recursion limit"),
    "garbage": ("garbage collection", "turned the garbage collector on or off"),
    "torch-drawn": ("random numbers of torch", "moved torch's global generator"),
    "torch-seeded": ("random numbers of torch", "seeded torch's global generator"),
    "numpy-drawn": ("random numbers of NumPy", "moved NumPy's global generator"),
    "handler": ("signals", "changed what signals do: SIGTERM is no longer ignored; SIGTERM is handled"),
    "program": ("programs", "left programs running: sleep"),
    "program-of-a-shell": ("programs", "left programs running: sleep"),
    "python-drawn": ("random numbers of Python", "moved the global generator of Python's random"),
}
"""Deeds that change no answer by themselves, and the kind and the words of what they leave."""


@pytest.fixture(autouse=True)
def here(monkeypatch: pytest.MonkeyPatch) -> None:
    """Engines of tests can be imported in every process."""
    monkeypatch.syspath_prepend(str(ROOT))


@pytest.fixture(scope="module", autouse=True)
def _keeper_ends() -> Iterator[None]:
    yield
    end_keeper()


def engine(deed: str) -> BackendSpec:
    return BackendSpec(f"tests.strangers.hostile:{deed.replace('-', '_')}")


@pytest.mark.slow
@pytest.mark.parametrize("deed", CHANGED)
def test_what_can_change_later_answers_is_a_finding_of_the_case_that_ran(deed: str) -> None:
    with Isolated(engine(deed), Patience(20.0)) as backend:
        subject = backend.subject(0)
        assert isinstance(subject.run_fresh(case_of(1)), Trace)
        outcome = subject.run_fresh(case_of(0))
        assert isinstance(outcome, Crash)
        assert outcome.why.startswith(f"the run left its process changed: {CHANGED[deed]}")
        assert isinstance(subject.run_fresh(case_of(2)), Trace), "a clean process has taken its place"


@pytest.mark.parametrize("deed", RESIDUE_BY_DEED)
def test_what_changes_no_answer_is_told_once_with_the_first_case(deed: str) -> None:
    with Isolated(engine(deed), Patience(20.0)) as backend:
        subject = backend.subject(0)
        for number in (1, 2, 0, 3, 0):
            assert isinstance(subject.run_fresh(case_of(number)), Trace)
        (residue,) = backend.residue.values()
        # A program that has just been started may still have the name of the process that starts it.
        what = re.sub(r"running: (python[\d.]*|sh)$", "running: sleep", residue.what)
        assert (residue.kind, what, residue.case) == (*RESIDUE_BY_DEED[deed], case_of(0).id)
        assert backend.generation == 1, "no process is replaced for it"
        assert backend.complaints == []


LEAKED = {
    "leaking-threads": ("threads, growing", "left more threads behind than the run before, run by run: "),
    "leaking-memory": ("memory, growing", "left more resident memory behind than the run before, run by run: "),
    "leaking-files": ("open files, growing", "left more open descriptors behind than the run before, run by run: "),
    "leaking-programs": ("processes, growing", "left more child processes behind than the run before, run by run: "),
}
"""Engines that leave a little more behind in every case."""


@pytest.mark.parametrize("name", LEAKED)
def test_what_grows_run_by_run_is_told_with_the_case_in_which_it_began(name: str) -> None:
    with Isolated(engine(name), Patience(20.0)) as backend:
        subject = backend.subject(0)
        for number in range(1, RISES + 4):
            assert isinstance(subject.run_fresh(case_of(number)), Trace)
        kind, words = LEAKED[name]
        residue = backend.residue[kind]
        assert residue.what.startswith(words)
        assert residue.case == case_of(2).id, "the first run behind which there is more than behind the one before"
        assert set(backend.residue) <= {kind, "programs"}


def test_a_pool_of_threads_is_no_leak_and_a_clean_engine_leaves_nothing() -> None:
    for name in ("pooled-threads", "clean"):
        with Isolated(engine(name), Patience(20.0)) as backend:
            subject = backend.subject(0)
            for number in range(1, 40):
                assert isinstance(subject.run_fresh(case_of(number % 9 + 1)), Trace)
            assert backend.residue == {}


def test_a_run_tells_each_kind_once_on_its_page_and_in_its_json(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch, capfd: pytest.CaptureFixture[str]
) -> None:
    monkeypatch.setattr(campaign, "Crew", CrewHere)
    monkeypatch.chdir(tmp_path)
    words = ["--backend", "tests.strangers.hostile:leaking_environment", "--cases", "12", "--jobs", "2"]
    words += ["--dtype", "float64", "--layout", "branch", "--invariant", "lossless.completes", "--json", "out.json"]
    words += ["--verbose"]
    with pytest.raises(SystemExit):
        main(["diff", *words])
    result = json.loads(Path("out.json").read_text())
    assert result["findings"] == []
    (residue,) = result["residue"]
    assert (residue["kind"], residue["what"]) == ("environment", "set HOSTILE_ENGINE in the environment")
    page = " ".join(capfd.readouterr().out.split())
    assert f"left behind a run set HOSTILE_ENGINE in the environment (first by case {residue['case']})" in page


def test_a_replay_tells_what_its_runs_left(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch, capfd: pytest.CaptureFixture[str]
) -> None:
    monkeypatch.chdir(tmp_path)
    (tmp_path / "case.json").write_text(json.dumps(case_to_json(case_of(0))))
    words = ("case.json", "--backend", "tests.strangers.hostile:environment", "--json", "out.json")
    code, word, page = run_command(capfd, "replay", *words)
    assert (code, word) == (0, "AGREE")
    assert "left behind a run set HOSTILE_ENGINE in the environment" in page
    assert [residue["kind"] for residue in json.loads(Path("out.json").read_text())["residue"]] == ["environment"]


def test_a_session_of_pytest_tells_what_runs_left() -> None:
    config = SimpleNamespace(stash=pytest.Stash())
    request = SimpleNamespace(param="tests.strangers.hostile:environment", config=config)
    fixture = yield_backend(request)  # type: ignore[arg-type]
    backend = next(fixture)
    backend.judge(case_of(0), "lossless.completes")
    assert next(fixture, None) is None
    lines: list[str] = []
    pytest_terminal_summary(SimpleNamespace(write_line=lines.append), config)  # type: ignore[arg-type]
    what = f"left behind: a run set HOSTILE_ENGINE in the environment (first by case {case_of(0).id})"
    assert lines == [f"tests.strangers.hostile:environment {what}"]


def test_a_value_of_the_environment_is_never_told() -> None:
    with Isolated(engine("environment")) as backend:
        backend.subject(0).run_fresh(case_of(0))
        assert "was-here" not in str(backend.residue)


def test_the_first_use_of_a_library_is_no_finding(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    """Late imports and torch's compiler add names, and count the making of modules by a constructor of their own."""
    (tmp_path / "late.py").write_text(
        "from tests.strangers.hostile import Hostile\n"
        "def act():\n"
        "    import scipy.stats, torch\n"
        "    from transformers.modeling_utils import ALL_ATTENTION_FUNCTIONS as functions\n"
        "    functions['mine'] = act\n"
        "    torch.mine = act\n"
        "    torch.compile(lambda x: torch.softmax(x @ x, -1), backend='eager')(torch.ones(3, 3))\n"
        "def open_():\n"
        "    return Hostile(act, lambda trace: trace)\n"
    )
    monkeypatch.syspath_prepend(str(tmp_path))
    with Isolated(BackendSpec("late:open_"), Patience(60.0)) as backend:
        outcome = backend.subject(0).run_fresh(case_of(0))
        assert isinstance(outcome, Trace), outcome


CASES = [case_of(number) for number in range(1, 1000)]


def first_growth(values: list[int], step: int) -> Growth | None:
    trend = Trend(step)
    growths = [trend.add(value, case) for value, case in zip(values, CASES, strict=False)]
    return next((growth for growth in growths if growth is not None), None)


def test_a_leak_in_each_run_is_a_trend_and_a_jump_is_none() -> None:
    assert first_growth([5] * 3 + list(range(6, 30)), 1) == Growth(1, 5, 5 + RISES, CASES[3])
    assert first_growth([5] * 40 + [50] * 600, 1) is None
    assert first_growth([5, 50] * 300, 1) is None, "a peak in every second run comes back"
    assert first_growth([*range(RISES), *[RISES - 1] * 600], 1) is None, "a pool that fills is none"


@pytest.mark.parametrize("block", BLOCKS[1:])
def test_a_slow_leak_is_a_trend_over_longer_stretches(block: int) -> None:
    values = [run // block for run in range(block * (RISES + 1))]
    growth = first_growth(values, 1)
    assert growth == Growth(block, 0, RISES, CASES[block])
    assert first_growth(values[:-1], 1) is None
