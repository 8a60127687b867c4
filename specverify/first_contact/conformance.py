"""The shipped conformance tests in miniature: one invariant of each stage, under pytest."""

import re
import subprocess
import sys
from importlib.util import find_spec
from typing import Any

from specverify.setup.errors import MissingInput

INVARIANTS = (
    "structure.mask-is-ancestry",
    "attention.context-exact",
    "acceptance.greedy-walk",
    "cache.commit-equivalence",
    "draft.fidelity",
    "lossless.greedy-match",
    "lossless.deterministic",
)
"""The invariants that are tested, at least one of each stage."""

LIMIT_S = 180
"""Seconds after which the tests are ended."""


def conformance_figures(backend: str) -> tuple[bool, dict[str, Any]]:
    """Whether a test fails; how many passed, failed and were skipped, and the lines of those that failed.

    Raises:
        MissingInput: pytest is missing.
    """
    if find_spec("pytest") is None:
        raise MissingInput("pytest is not installed")
    command = [sys.executable, "-m", "pytest", "-q", "-rf", "--tb=line", "-p", "no:cacheprovider", "-p", "specverify"]
    command += ["--pyargs", "specverify.conformance", "--specverify-backend", backend]
    command += ["-k", " or ".join(INVARIANTS)]
    try:
        ended = subprocess.run(command, capture_output=True, text=True, timeout=LIMIT_S)
    except subprocess.TimeoutExpired:
        return True, {"backend": backend, "failed": [f"the tests took more than {LIMIT_S} s"]}
    counts = {word: int(number) for number, word in re.findall(r"(\d+) (passed|failed|skipped|error)", ended.stdout)}
    failed = [line[:300] for line in ended.stdout.splitlines() if line.startswith(("FAILED", "ERROR"))]
    if ended.returncode and not failed:
        failed = [" ".join((ended.stderr or ended.stdout).split())[-300:]]
    return ended.returncode != 0, {"backend": backend, **counts, "failed": failed}
