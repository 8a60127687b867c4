"""Failures with a line to point at as SARIF 2.1.0, for code scanning services."""

import hashlib
from pathlib import Path
from typing import Any
from urllib.parse import quote

from specverify.properties.gate_result import GateResult
from specverify.properties.known import signature
from specverify.reports.format import cut
from specverify.reports.gate import words
from specverify.reports.gate.places import place_of

SCHEMA = "https://docs.oasis-open.org/sarif/sarif/v2.1.0/errata01/os/schemas/sarif-schema-2.1.0.json"
"""The address of the format's JSON Schema."""

MOST = 100
"""Most results of the report."""


def sarif(result: GateResult, root: Path) -> dict[str, Any]:
    """The report; a failure without a line below `root` is not in it, since services show none without a place.

    The fingerprint is that of backend, signature and file, so that a moved line is the same problem.
    """
    entries: list[dict[str, Any]] = []
    rules: dict[str, None] = {}
    for run, failure in words.failures(result):
        place = place_of(failure, root)
        if place is None or len(entries) == MOST:
            continue
        path, line = place
        rule = cut(failure.finding.invariant, 200)
        rules.setdefault(rule)
        name = f"{run.title}\n{signature(failure.finding)}\n{path}"
        where = {"artifactLocation": {"uri": quote(path), "uriBaseId": "%SRCROOT%"}, "region": {"startLine": line}}
        entries.append(
            {
                "ruleId": rule,
                "ruleIndex": list(rules).index(rule),
                "level": "error",
                "message": {"text": words.sentence(failure)},
                "locations": [{"physicalLocation": where}],
                "partialFingerprints": {
                    "specverify/v1": hashlib.sha256(name.encode("utf-8", "backslashreplace")).hexdigest()
                },
            }
        )
    described = [{"id": rule, "shortDescription": {"text": f"The invariant {rule} of SpecVerify."}} for rule in rules]
    driver = {"name": "SpecVerify", "rules": described}
    return {"$schema": SCHEMA, "version": "2.1.0", "runs": [{"tool": {"driver": driver}, "results": entries}]}
