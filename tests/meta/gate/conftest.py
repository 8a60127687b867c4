"""The sample repository in a folder of the test, and gates that run in this process."""

import json
import shutil
from functools import partial
from pathlib import Path
from typing import Any

import pytest

from specverify.gate import run as gate_run
from specverify.plan import Plan
from tests.inprocess import exit_code_of, in_this_process

SAMPLE = Path(__file__).resolve().parents[2] / "sample_repository"


BUNDLE = "[0-9a-f]" * 12 + ".json"
IGNORED = shutil.ignore_patterns("__pycache__", ".*")


ASKED_INVARIANTS = 'invariants = ["lossless.greedy-match", "lossless.stops", "lossless.completes"]'
"""The profile's line for tests: invariants that run the engine once for each case."""


def copy_sample(folder: Path) -> None:
    """Copy the sample repository to `folder`, with ASKED_INVARIANTS in its profile."""
    shutil.copytree(SAMPLE, folder, ignore=IGNORED)
    file = folder / "pyproject.toml"
    file.write_text(file.read_text().replace("jobs = 1", f"jobs = 1\n{ASKED_INVARIANTS}"))


def settle(folder: Path, patch: pytest.MonkeyPatch) -> None:
    """Make `folder` the current one, run commands in this process, and forget every CI."""
    patch.chdir(folder)
    patch.syspath_prepend(folder)
    for name in ("SMALL_ENGINE", "GITHUB_ACTIONS", "GITHUB_STEP_SUMMARY", "GITHUB_WORKSPACE", "CI_PROJECT_DIR"):
        patch.delenv(name, raising=False)
    in_this_process(patch)
    patch.setattr(gate_run, "Plan", partial(Plan, shrink_s=0.5))


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
        code = exit_code_of(*words)
        output = self._capfd.readouterr()
        self.out, self.err = output.out, output.err
        return code

    def report(self, name: str) -> str:
        return (self.folder / ".specverify" / name).read_text("utf-8")

    def result(self) -> Any:
        return json.loads(self.report("gate.json"))

    def lines(self) -> list[Any]:
        return [json.loads(line) for line in self.report("results.jsonl").splitlines()]

    def bundles(self) -> list[Path]:
        return sorted((self.folder / ".specverify").glob(BUNDLE))


@pytest.fixture
def sample(tmp_path: Path, monkeypatch: pytest.MonkeyPatch, capfd: pytest.CaptureFixture[str]) -> Sample:
    """A copy of the sample repository, which is the current folder."""
    folder = tmp_path / "sample"
    copy_sample(folder)
    settle(folder, monkeypatch)
    return Sample(folder, monkeypatch, capfd)


@pytest.fixture(scope="module")
def known_fault(tmp_path_factory: pytest.TempPathFactory) -> Path:
    """A sample repository whose ledger knows the fault `unverified`; it holds no memory and no reports."""
    folder = tmp_path_factory.mktemp("known") / "sample"
    copy_sample(folder)
    with pytest.MonkeyPatch.context() as patch:
        settle(folder, patch)
        patch.setenv("SMALL_ENGINE", "unverified")
        assert exit_code_of("gate", "--cases", "6") == 1
        (bundle,) = (folder / ".specverify").glob(BUNDLE)
        assert exit_code_of("ledger", "add", str(bundle), "--reason", "the lookup is new", "--until", "2999-12-31") == 0
    shutil.rmtree(folder / ".specverify")
    return folder
