"""GitLab's code quality report: failures with a line to point at."""

import hashlib
from pathlib import Path
from typing import Any

from specverify.properties.gate_result import GateResult
from specverify.properties.known import signature
from specverify.reports.gate import words
from specverify.reports.gate.places import place_of

MOST = 100
"""Most entries of the report."""


def code_quality(result: GateResult, root: Path) -> list[dict[str, Any]]:
    """The entries of the report; a failure without a line below `root` has none.

    The fingerprint is that of backend, signature and file, so that a moved line is the same problem.
    """
    entries = []
    for run, failure in words.failures(result):
        place = place_of(failure, root)
        if place is None:
            continue
        name = f"{run.title}\n{signature(failure.finding)}\n{place[0]}"
        entries.append(
            {
                "description": words.sentence(failure),
                "check_name": failure.finding.invariant,
                "fingerprint": hashlib.sha256(name.encode("utf-8", "backslashreplace")).hexdigest(),
                "severity": "critical",
                "location": {"path": place[0], "lines": {"begin": place[1]}},
            }
        )
    return entries[:MOST]
