"""`.ci/run` is red where any check is red, and shows what the checks said that ran beside the tests."""

import os
import subprocess
from pathlib import Path

import pytest

ROOT = Path(__file__).resolve().parents[3]

STAND_IN = """#!/bin/sh
name="$(basename "$0") $*"
if [ "$1 $2" = "-m venv" ]; then
  mkdir -p "$3/bin"
  for command in python pip ruff mypy lint-imports pytest; do cp "$0" "$3/bin/$command"; done
fi
case "$name" in "$RED"*) echo "$RED is red"; exit "$CODE" ;; esac
"""
"""A command that does nothing but what `python3 -m venv` does, and ends with CODE where its words begin with RED."""


def run(folder: Path, red: str, code: int) -> "subprocess.CompletedProcess[str]":
    (folder / "python3").write_text(STAND_IN)
    (folder / "python3").chmod(0o755)
    variables = {**os.environ, "PATH": f"{folder}{os.pathsep}{os.environ['PATH']}", "TMPDIR": str(folder)}
    variables |= {"RED": red, "CODE": str(code)}
    return subprocess.run([ROOT / ".ci" / "run"], env=variables, capture_output=True, text=True, timeout=100)


def test_all_green_is_green(tmp_path: Path) -> None:
    ended = run(tmp_path, "nothing", 1)
    assert ended.returncode == 0, ended.stdout + ended.stderr


@pytest.mark.parametrize(
    "red",
    [
        "pip",
        "ruff check",
        "ruff format",
        "lint-imports",
        "mypy",
        "pytest",
        "python -m build",
        "python .ci/installable.py",
        "python .ci/lowest_names.py",
    ],
)
def test_one_red_check_is_red_and_shown(red: str, tmp_path: Path) -> None:
    ended = run(tmp_path, red, 1)
    assert ended.returncode == 1, ended.stdout + ended.stderr
    assert f"{red} is red" in ended.stdout


@pytest.mark.parametrize(
    ("red", "code"), [("python .ci/installable.py", 0), ("python .ci/lowest_names.py", 0), ("mypy", 1), ("pytest", 3)]
)
def test_an_index_out_of_reach_is_no_change_of_ours(red: str, code: int, tmp_path: Path) -> None:
    ended = run(tmp_path, red, 3)
    assert ended.returncode == code, ended.stdout + ended.stderr
    assert f"{red} is red" in ended.stdout
