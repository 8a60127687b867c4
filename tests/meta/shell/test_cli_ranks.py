"""Ranks on the command line: `diff --ranks`, its refusals, and a rank that dies in the middle of a run."""

import json
import os
import signal
from pathlib import Path

import pytest

from specverify.backends.ranked import RankedBackend
from specverify.cli import main
from specverify.properties.invariants.lossless.ranks import NAME
from specverify.reference.abilities import Abilities
from specverify.reference.case import Case
from specverify.reference.parallel import SHARDED
from specverify.reference.trace import Trace
from specverify.setup.selection import Unknown, over_ranks
from tests.inprocess import in_this_process


@pytest.fixture(autouse=True)
def folder(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> Path:
    monkeypatch.chdir(tmp_path)
    return tmp_path


def code_of(*words: str) -> int | str | None:
    with pytest.raises(SystemExit) as ended:
        main(["diff", *words])
    return ended.value.code


@pytest.mark.slow
def test_every_case_is_sharded(folder: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    in_this_process(monkeypatch)
    assert code_of("--ranks", "2", "--cases", "5", "--jobs", "1", "--invariant", NAME, "--json", "run.json") == 0
    result = json.loads((folder / "run.json").read_text())
    assert result["invariants"][NAME]["checked"] == 5


def test_a_backend_without_so_many_ranks_is_refused(capsys: pytest.CaptureFixture[str]) -> None:
    assert code_of("--ranks", "4", "--backend", "cpu-fused", "--cases", "1") == 2
    message = "specverify: cpu-fused declares no run on 4 ranks: it has 1 (`cpu-ranks` has 2 and 4)\n"
    assert capsys.readouterr().err == message


def test_an_engine_that_is_not_ours_is_checked_when_it_is_opened() -> None:
    able = Abilities(dtypes=("float32",), ranks=(1, 2), families=("llama", "gemma2"))
    assert over_ranks(able, 2, "able").families == ("llama",)
    assert over_ranks(able, 1, "able").families == ("llama", "gemma2")
    assert "gemma2" not in SHARDED
    with pytest.raises(Unknown, match=r"^able declares no run on 4 ranks: it has 1 and 2"):
        over_ranks(able, 4, "able")


@pytest.mark.slow
def test_a_rank_that_dies_ends_the_run_with_its_name(
    monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]
) -> None:
    in_this_process(monkeypatch)
    plain, cases = RankedBackend.run, list[Case]()

    def run(backend: RankedBackend, case: Case) -> Trace:
        cases.append(case)
        if len(cases) == 3:
            os.kill(backend._crew(2).processes[1], signal.SIGKILL)
        return plain(backend, case)

    monkeypatch.setattr(RankedBackend, "run", run)
    assert code_of("--backend", "cpu-ranks", "--ranks", "2", "--cases", "6", "--jobs", "1") == 3
    output = capsys.readouterr()
    assert "cpu-ranks: rank 1 died: its process was killed by signal 9" in " ".join((output.out + output.err).split())
