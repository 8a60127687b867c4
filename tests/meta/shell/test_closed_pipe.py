"""A pipe whose reader has gone, as in `specverify diff | head -1`, does not change the exit code."""

import io
import json
import os
import subprocess
import sys
from pathlib import Path

import pytest

from specverify.cli import main
from tests.cases import CORPUS
from tests.inprocess import in_this_process
from tests.tiers import first


def unread_pipe() -> io.TextIOWrapper:
    """A line-buffered stream into a pipe without a reader."""
    reader, writer = os.pipe()
    os.close(reader)
    return open(writer, "w", buffering=1)


def exit_code(arguments: list[str], name: str, monkeypatch: pytest.MonkeyPatch) -> object:
    """The exit code of a command whose stream `name` is such a pipe."""
    with unread_pipe() as pipe, monkeypatch.context() as patch:
        patch.setattr(sys, name, pipe)
        with pytest.raises(SystemExit) as ended:
            main(arguments)
    return ended.value.code


@pytest.mark.parametrize("name", first(["stdout", "stderr"], 1))
def test_the_exit_code_of_diff_is_that_of_its_verdict(
    name: str, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    in_this_process(monkeypatch)
    file = tmp_path / "result.json"
    arguments = ["diff", "--cases", "2", "--jobs", "1", "--report", str(tmp_path), "--json", str(file)]
    assert exit_code(arguments, name, monkeypatch) == 0
    assert json.loads(file.read_text())["outcome"] == "agree"


@pytest.mark.parametrize(("fault", "code"), [([], 0), (["--fault", "softmax-twice"], 1)])
def test_the_exit_code_of_replay_is_that_of_its_verdict(
    fault: list[str], code: int, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    in_this_process(monkeypatch)
    case = CORPUS / "softmax-twice.json"
    file = tmp_path / "result.json"
    assert exit_code(["replay", str(case), *fault, "--json", str(file)], "stdout", monkeypatch) == code
    assert json.loads(file.read_text())


@pytest.mark.parametrize("arguments", first([["list", "rules"], ["--help"], ["diff", "--help"]], 1))
def test_a_list_or_a_help_without_a_reader_ends_with_0(arguments: list[str]) -> None:
    with unread_pipe() as pipe:
        ended = subprocess.run(
            [sys.executable, "-m", "specverify", *arguments], stdout=pipe, stderr=subprocess.PIPE, check=False
        )
    assert (ended.returncode, ended.stderr) == (0, b"")
