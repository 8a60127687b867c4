"""The pytest plugin: a runner does not go green on nothing, and plain runs say which tiers they leave out."""

import os
import subprocess
import sys
from pathlib import Path

import pytest

from specverify.backends.devices import why_no_device
from specverify.pytest_selection import Selection

ROOT = Path(__file__).resolve().parents[3]
TARGET = "tests/conformance/test_sessions.py"


@pytest.mark.parametrize(
    ("expression", "devices"),
    [
        ("", []),
        ("cuda", ["cuda"]),
        ("npu", ["npu"]),
        ("npu or cuda", ["cuda", "npu"]),
        ("npu and not slow", ["npu"]),
        ("not npu", []),
        ("cpu", []),
        ("cpu or npu", []),
        ("not slow", []),
    ],
)
def test_devices_that_an_expression_asks_for(expression: str, devices: list[str]) -> None:
    assert Selection().demanded_devices(expression) == devices


def run(*arguments: str) -> subprocess.CompletedProcess[str]:
    command = [sys.executable, "-m", "pytest", "-q", "-p", "no:cacheprovider", TARGET, *arguments]
    return subprocess.run(
        command, cwd=ROOT, capture_output=True, text=True, timeout=300, env={**os.environ, "CI": "true"}
    )


@pytest.mark.parametrize("device", [pytest.param("cuda", marks=pytest.mark.slow), "npu"])
def test_absent_device_is_not_green(device: str) -> None:
    why = why_no_device(device)
    if why is None:
        pytest.skip(f"this machine has a {device} device")
    refused = run("-m", device)
    assert refused.returncode == 3
    assert f"no such device: {why}" in refused.stdout + refused.stderr


@pytest.mark.slow
@pytest.mark.parametrize("device", ["cuda", "npu"])
def test_an_absent_device_may_be_allowed(device: str) -> None:
    why = why_no_device(device)
    if why is None:
        pytest.skip(f"this machine has a {device} device")
    allowed = run("-m", device, "--allow-absent-device", "-rs")
    assert allowed.returncode == 0
    if device == "cuda":
        assert f"cuda ({why})" in allowed.stdout
        assert " passed" not in allowed.stdout


@pytest.mark.slow
def test_a_failing_backend_fails_the_test_with_the_page() -> None:
    environment = {**os.environ, "PYTHONPATH": str(ROOT / "tests" / "strangers")}
    command = [
        sys.executable,
        "-m",
        "pytest",
        "-q",
        "-p",
        "no:cacheprovider",
        "--backend",
        "terse_engine:wrong",
        "-x",
        "tests/conformance/test_corpus.py",
    ]
    failed = subprocess.run(command, cwd=ROOT, capture_output=True, text=True, timeout=300, env=environment)
    assert failed.returncode == 1
    assert "DIFFER  terse" in failed.stdout
