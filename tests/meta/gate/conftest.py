"""The sample repository in a folder of the test, and gates that run in this process."""

import json
import shutil
from functools import partial
from pathlib import Path
from typing import Any

import pytest

from specverify.cli import main
from specverify.gate import run as gate_run
from specverify.plan import Plan
from tests.inprocess import in_this_process

SAMPLE = Path(__file__).resolve().parents[2] / "sample_repository"


class Sample:
    """The sample repository, whose engine runs in this process."""

    def __init__(self, folder: Path, monkeypatch: pytest.MonkeyPatch, capfd: pytest.CaptureFixture[str]) -> None:
        self.folder, self._monkeypatch, self._capfd = folder, monkeypatch, capfd
        self.out = self.err = ""

    def plant(self, faults: str) -> None:
        self._monkeypatch.setenv("SMALL_ENGINE", faults)

    def __call__(self, *words: str) -> int:
        """Run a command of the shell; its exit code."""
        self._capfd.readouterr()
        with pytest.raises(SystemExit) as ended:
            main(list(words))
        told = self._capfd.readouterr()
        self.out, self.err = told.out, told.err
        assert isinstance(ended.value.code, int)
        return ended.value.code

    def report(self, name: str) -> str:
        return (self.folder / ".specverify" / name).read_text("utf-8")

    def result(self) -> Any:
        return json.loads(self.report("gate.json"))

    def lines(self) -> list[Any]:
        return [json.loads(line) for line in self.report("results.jsonl").splitlines()]

    def bundles(self) -> list[Path]:
        return sorted((self.folder / ".specverify").glob("[0-9a-f]" * 12 + ".json"))


@pytest.fixture
def sample(tmp_path: Path, monkeypatch: pytest.MonkeyPatch, capfd: pytest.CaptureFixture[str]) -> Sample:
    folder = tmp_path / "sample"
    shutil.copytree(SAMPLE, folder, ignore=shutil.ignore_patterns("__pycache__", ".*"))
    monkeypatch.chdir(folder)
    monkeypatch.syspath_prepend(folder)
    for name in ("SMALL_ENGINE", "GITHUB_ACTIONS", "GITHUB_STEP_SUMMARY", "GITHUB_WORKSPACE", "CI_PROJECT_DIR"):
        monkeypatch.delenv(name, raising=False)
    in_this_process(monkeypatch)
    monkeypatch.setattr(gate_run, "Plan", partial(Plan, shrink_s=1.0))
    return Sample(folder, monkeypatch, capfd)
