"""`pytest -m cuda` where there is a device: marks, fixture and exit codes, tried on the pretended one."""

import os
import subprocess
import sys
from pathlib import Path

import pytest

ROOT = Path(__file__).parents[3]


def run(*words: str) -> tuple[int, str]:
    """The exit code and the output of pytest where there is the pretended device."""
    command = [sys.executable, "-m", "tests.pretended", "pytest", "-q", "-p", "no:cacheprovider", *words]
    ended = subprocess.run(command, cwd=ROOT, env={**os.environ}, capture_output=True, text=True, timeout=3600)
    return ended.returncode, ended.stdout + ended.stderr


@pytest.mark.slow
def test_marked_tests_run_and_a_backend_without_its_table_is_skipped() -> None:
    selection = "parent-range and (cuda-eager or cuda-measured or cpu-eager)"
    code, output = run("-m", "cuda", "-k", selection, "-rs", "tests/conformance/test_invariants.py")
    assert code == 0, output
    assert "1 passed, 1 skipped" in output
    assert "cuda-measured needs an NVIDIA device: " in output
    assert "SPECVERIFY_ATTENTION_TABLE" in output


@pytest.mark.slow
def test_every_invariant_holds_on_every_backend_of_the_device() -> None:
    code, output = run("-m", "cuda", "tests/conformance/test_invariants.py")
    assert code == 0, output
