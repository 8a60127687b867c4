"""A backend in a process of its own: whatever breaks it is a finding with its case, and every other case is judged."""

import json
import os
import shlex
import subprocess
import sys
from collections.abc import Iterator
from pathlib import Path

import numpy as np
import pytest
import torch

from specverify.backends.base import Unavailable
from specverify.campaign.replay import replay
from specverify.cli import main
from specverify.isolation.ancestor import end_keeper, own_keeper
from specverify.isolation.backend_spec import BackendSpec
from specverify.isolation.isolated import Isolated
from specverify.isolation.lifeline import children
from specverify.isolation.limits import AFTER_A_HANG_S, Patience, default_memory, size_of, size_words
from specverify.isolation.process import how_ended, last_words
from specverify.isolation.watch import Watch
from specverify.properties.invariants import ALL
from specverify.properties.strategies.models import GALLERY
from specverify.properties.tally import Failure
from specverify.properties.verdict.judge import judge
from specverify.properties.verdict.subject import Crash
from specverify.reference.architecture import Seeded
from specverify.reference.case import Case
from specverify.reference.case_json import case_to_json
from specverify.reference.draft import Scripted
from specverify.reference.oracle.decoder import Oracle
from specverify.reference.sampling import Stops
from specverify.reference.trace import Trace
from specverify.reference.tree import Tree
from specverify.reports import bundle
from tests.models import LLAMA
from tests.strangers import hostile
from tests.tiers import first

ROOT = Path(__file__).resolve().parents[3]
LOOKING = tuple(invariant for invariant in ALL if invariant.looks_at_run or invariant.name == "lossless.completes")
ORACLE = Oracle()
TIMEOUT_S = 2.0
MEMORY = 1 << 30
QUICK = ("exit", "null-pointer", "spin", "fork", "scribble", "leave-0", "close", "dtype", "nothing")
"""What every run of the tests tries; the others are slow."""

EVERY = [*hostile.DEEDS, *hostile.ANSWERS]


def case_of(number: int) -> Case:
    """A small case; number 0 is the marked one."""
    model = Seeded(GALLERY[0], 1)
    rng = np.random.default_rng(number)
    prompt = (hostile.MARK,) * hostile.MARK if number == 0 else tuple(rng.integers(0, 3, size=4).tolist())
    tree = Tree((0, 0, 0), (prompt[-1], *rng.permutation(model.vocab_size)[:2].tolist()))
    return Case(model, prompt, Scripted((tree,)), stops=Stops(2), dtype="float64")


CLEAN = [case_of(number) for number in range(1, 41)]


@pytest.fixture(autouse=True)
def here(monkeypatch: pytest.MonkeyPatch) -> None:
    """Engines of tests can be imported in every process."""
    monkeypatch.syspath_prepend(str(ROOT))


@pytest.fixture(scope="module", autouse=True)
def _no_process_is_left() -> Iterator[None]:
    before = children()  # a module tested earlier in this process may keep ranks
    yield
    end_keeper()
    assert set(children()) <= set(before)


def mischief(name: str, folder: Path, clean: int) -> None:
    """The marked case, in the midst of clean ones, is a finding that replays; every clean one is judged clean."""
    factory = f"tests.strangers.hostile:{name.replace('-', '_')}"
    red_verdicts, judged = [], 0
    with Isolated(BackendSpec(factory), Patience(TIMEOUT_S), MEMORY) as backend:
        subject = backend.subject()
        for case in [*CLEAN[: clean // 2], case_of(0), *CLEAN[clean // 2 : clean]]:
            verdict = judge(case, LOOKING, ORACLE, subject)
            judged += verdict.agreed and verdict.judged
            red_verdicts += [verdict] if verdict.findings else []
        assert backend.complaints == []
    (verdict,) = red_verdicts
    assert hostile.marked(verdict.case)
    assert judged == clean
    first = verdict.first
    assert first is not None
    assert first.invariant == "lossless.completes"
    saved = bundle.save(folder, Failure(verdict, first, verdict.case.id, backend=factory), {})
    again = replay(str(saved), factory, None, case_timeout_s=TIMEOUT_S, memory=MEMORY)
    assert again.word == "FAILED", again.why


@pytest.mark.parametrize("name", first(QUICK, 5))
def test_a_hostile_engine_costs_its_own_case_and_no_other(name: str, tmp_path: Path) -> None:
    mischief(name, tmp_path, clean=4)


@pytest.mark.slow
@pytest.mark.parametrize("name", EVERY)
def test_fifty_hostile_engines_beside_forty_clean_cases(name: str, tmp_path: Path) -> None:
    assert len(EVERY) >= 50
    mischief(name, tmp_path, clean=40)


def test_what_a_process_said_last_is_told_with_the_finding() -> None:
    with Isolated(BackendSpec("tests.strangers.hostile:null_pointer"), Patience(TIMEOUT_S)) as backend:
        outcome = backend.subject(0).run_fresh(case_of(0))
    assert isinstance(outcome, Crash)
    assert outcome.why == "the backend's process was ended by SIGSEGV"
    assert any("Segmentation fault" in line for line in outcome.said)
    assert any("hostile.py" in line for line in outcome.said)
    assert not any("isolation" in line for line in outcome.said)


def test_a_hang_is_told_with_the_place_where_it_hangs() -> None:
    with Isolated(BackendSpec("tests.strangers.hostile:deadlock"), Patience(1.0)) as backend:
        outcome = backend.subject(0).run_fresh(case_of(0))
    assert isinstance(outcome, Crash)
    assert outcome.why == "the backend's process gave no answer within 1 s"
    assert any("in deadlocks" in line for line in outcome.said)


def test_memory_beyond_the_limit_ends_the_process_with_its_case() -> None:
    with Isolated(BackendSpec("tests.strangers.hostile:take_at_once"), Patience(60.0), MEMORY) as backend:
        outcome = backend.subject(0).run_fresh(case_of(0))
    assert isinstance(outcome, Crash)
    assert "of memory, more than the 1 GiB allowed (--memory-limit)" in outcome.why


def test_a_process_that_ends_between_two_cases_is_replaced_and_told() -> None:
    with Isolated(BackendSpec("tests.strangers.hostile:clean")) as backend:
        subject = backend.subject(0)
        first = subject.run_fresh(case_of(1))
        engine = backend._engine
        assert engine is not None
        os.kill(engine.pid, 9)
        own_keeper().listen(5.0)
        assert not isinstance(subject.run_fresh(case_of(2)), Crash)
        assert not isinstance(first, Crash)
        (line,) = backend.complaints
    assert line.startswith("the backend's process was ended by SIGKILL")
    assert f"between two cases after case {case_of(1).id}" in line


@pytest.mark.slow
def test_where_forking_is_not_known_to_be_safe_an_engine_is_a_fresh_interpreter(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    (tmp_path / "torch_npu.py").write_text("")
    monkeypatch.syspath_prepend(str(tmp_path))
    end_keeper()
    with Isolated(BackendSpec("tests.strangers.hostile:leave_7"), Patience(TIMEOUT_S)) as backend:
        subject = backend.subject(0)
        assert isinstance(subject.run_fresh(case_of(1)), Trace)
        assert backend._engine is not None
        words = Path(f"/proc/{backend._engine.pid}/cmdline").read_bytes()
        assert b"specverify.isolation.engine" in words
        outcome = subject.run_fresh(case_of(0))
        assert isinstance(outcome, Crash)
        assert outcome.why == "the backend's process exited with code 7"
        assert isinstance(subject.run_fresh(case_of(2)), Trace)
    end_keeper()


TELLS_FOLDERS = """
import os, tempfile
from specverify.backends.base import Unavailable

def open_():
    raise Unavailable(f"{os.environ['TORCHINDUCTOR_CACHE_DIR']} beside {tempfile.gettempdir()}")
"""


@pytest.mark.parametrize("chosen", ["", "/elsewhere"])
def test_what_torch_compiles_outlives_the_engine(chosen: str, tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    (tmp_path / "tells_folders.py").write_text(TELLS_FOLDERS)
    monkeypatch.syspath_prepend(str(tmp_path))
    monkeypatch.delenv("TORCHINDUCTOR_CACHE_DIR", raising=False)
    if chosen:
        monkeypatch.setenv("TORCHINDUCTOR_CACHE_DIR", chosen)
    with pytest.raises(Unavailable) as caught:
        Isolated(BackendSpec("tells_folders:open_"))
    compiled, _, temporary = str(caught.value).partition(" beside ")
    assert not Path(compiled).is_relative_to(temporary)
    assert not chosen or compiled == chosen


def test_an_engine_on_a_device_that_torch_does_not_know_is_judged() -> None:
    if torch.cuda.is_available():
        pytest.skip("torch sees a device")
    with Isolated(BackendSpec("tests.strangers.hostile:on_a_device_of_its_own")) as backend:
        assert judge(CLEAN[0], LOOKING, ORACLE, backend.subject()).agreed
        assert backend.manifest["device"] == "cuda, of which torch sees none"


def test_an_engine_whose_facts_cannot_be_told_is_refused_with_the_reason() -> None:
    with pytest.raises(Unavailable, match=r"tests\.strangers\.hostile:unnamed: RuntimeError: no mode"):
        Isolated(BackendSpec("tests.strangers.hostile:unnamed"))


def test_patience_is_measured_and_shorter_after_a_hang() -> None:
    patience = Patience(floor=10.0)
    assert patience.seconds == 10.0
    for seconds in (0.1, 0.2, 0.4):
        patience.note_answer(seconds)
    assert patience.seconds == pytest.approx(40.0)
    patience.note_hang()
    assert patience.seconds == pytest.approx(max(AFTER_A_HANG_S, 12.0))
    assert Patience(3.0).seconds == 3.0


def test_sizes_are_read_and_told() -> None:
    assert [size_of(text) for text in ("8G", "512MiB", "2kb", "1000")] == [2**33, 2**29, 2048, 1000]
    for text in ("", "G", "eight", "-1G", "0", "1e400"):
        with pytest.raises(ValueError, match="is no size"):
            size_of(text)
    assert size_words(3 << 29) == "1.5 GiB"
    size_bytes = Watch(os.getpid(), None).memory_bytes()
    assert size_bytes is not None
    limit = default_memory()
    assert limit is not None
    assert 1 << 20 < size_bytes < limit


def test_last_words_begin_before_the_stack() -> None:
    stack = ["Fatal Python error: Aborted", *[f'  File "engine.py", line {n} in f' for n in range(30)]]
    text = "\n".join([*[f"line {n}" for n in range(40)], *stack])
    words = last_words(text)
    assert words[0] == "line 36"
    assert words[4] == "Fatal Python error: Aborted"
    assert len(words) == 12
    assert last_words("a\n\nb\n") == ("a", "b")
    assert how_ended(-11) == "was ended by SIGSEGV"
    assert how_ended(0) == "exited with code 0"


@pytest.mark.slow
def test_an_engine_that_leaves_in_a_campaign_is_a_finding_and_prints_nothing_into_our_json(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch, capfd: pytest.CaptureFixture[str]
) -> None:
    (tmp_path / "leaver.py").write_text(
        "import os\n"
        "from tests.strangers.hostile import Hostile\n"
        "class Leaver(Hostile):\n"
        "    def run(self, case):\n"
        "        print('chatter')\n"
        "        os._exit(0) if len(case.prompt) > 1 else None\n"
        "        return self._oracle(case)\n"
        "def open_():\n"
        "    return Leaver(None, None)\n"
    )
    environment = {**os.environ, "PYTHONPATH": f"{ROOT}{os.pathsep}{tmp_path}"}
    command = [sys.executable, "-m", "specverify", "diff", "--backend", "leaver:open_", "--cases", "60", "--jobs", "1"]
    command += ["--dtype", "float64", "--layout", "branch", "--json", "-"]
    run = subprocess.run(command, cwd=tmp_path, env=environment, capture_output=True, text=True, timeout=300)
    assert run.returncode == 1, run.stderr
    result = json.loads(run.stdout)
    (finding,) = result["findings"]
    assert finding["invariant"] == "lossless.completes"
    assert finding["observed"] == "the backend's process exited with code 0"
    assert (tmp_path / ".specverify" / f"{finding['case']['id']}.json").exists()
    assert result["stopped"] == "at the first failure; --keep-going judges the rest"
    monkeypatch.syspath_prepend(str(tmp_path))
    monkeypatch.chdir(tmp_path)
    assert run_command(capfd, *shlex.split(finding["replay"])[1:])[:2] == (1, "FAILED")


def run_command(capfd: pytest.CaptureFixture[str], *words: str) -> tuple[int, str, str]:
    """Exit code, first word of the last line, and the page of a command in this process."""
    with pytest.raises(SystemExit) as ended:
        main(list(words))
    out = capfd.readouterr().out
    return int(ended.value.code or 0), out.splitlines()[-1].split()[0], " ".join(out.split())


@pytest.mark.slow
def test_an_endless_loop_ends_with_its_time_limit(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch, capfd: pytest.CaptureFixture[str]
) -> None:
    monkeypatch.chdir(tmp_path)
    (tmp_path / "case.json").write_text(json.dumps(case_to_json(case_of(0))))
    spin = ("--backend", "tests.strangers.hostile:spin", "--case-timeout", "2")
    code, word, page = run_command(capfd, "replay", "case.json", *spin)
    assert (code, word) == (1, "DIFFER")
    assert "gave no answer within 2 s" in page


def test_a_machine_that_starts_no_further_process_is_no_fault_of_the_backend(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    """The folder of this process is deleted: the next engine cannot be started in it."""
    case = Case(LLAMA, (3, 1), stops=Stops(2))
    vanished_folder = tmp_path / "gone"
    vanished_folder.mkdir()
    monkeypatch.chdir(vanished_folder)
    with Isolated(BackendSpec("cpu-eager")) as backend:
        backend.close()
        vanished_folder.rmdir()
        with pytest.raises(Unavailable, match="no further process could be started"):
            backend.ask("run", case)
        os.chdir(tmp_path)
        assert backend.ask("run", case).output
