"""The failures of a gate as CI services read them: annotations, code quality report, SARIF 2.1.0.

A service shows a failure at a line of a file: the innermost frame of a broken run in the engine's repository.
"""

import hashlib
import os
import re
import secrets
from collections.abc import Iterator
from pathlib import Path
from typing import Any
from urllib.parse import quote

from specverify.properties.gate_result import RED, GateResult
from specverify.properties.known import signature
from specverify.properties.tally import Failure
from specverify.reports.format import cut, escape
from specverify.reports.gate import words

MOST = 10
"""Annotations of one kind that GitHub shows for a step."""

MOST_PLACED = 100
"""Most entries of a code quality report, and most results of a SARIF one."""

FRAME = re.compile(r"(?P<file>[^:*?\"<>|\n]{1,400}):(?P<line>\d{1,7}) in ")
"""A frame of a traceback, as a finding's `said` holds it: the last two parts of the path, and the line."""

MOST_FOLDERS = 5000
"""Folders of the repository that are looked through."""

FOREIGN = frozenset({"site-packages", "node_modules", "__pycache__"})
"""Folders whose files are not the repository's own."""

SCHEMA = "https://docs.oasis-open.org/sarif/sarif/v2.1.0/errata01/os/schemas/sarif-schema-2.1.0.json"
"""The address of the JSON Schema of SARIF."""


def annotations(result: GateResult, root: Path) -> str:
    """One line for each failure, stale or expired known failure, and reason why the gate could not judge.

    `root` is the folder of the repository; a failure with a line of the engine's code below it is shown there.
    """
    lines = []
    for run, failure in words.failures(result):
        place = _place_of(failure, root)
        where = "" if place is None else f"file={_escape_property(place[0])},line={place[1]},"
        title = _escape_property(f"{run.title}: {failure.finding.invariant}")
        bundle = "" if failure.file is None else f"; bundle {failure.file}"
        lines.append(f"::error {where}title={title}::{_escape_data(words.sentence(failure) + bundle)}")
    lines += [
        f"::error title=known failure {known_failure.state}::{_escape_data(words.known_line(known_failure))}"
        for known_failure in result.known
        if known_failure.state in RED
    ]
    lines += [f"::error title=could not judge::{_escape_data(reason)}" for reason in words.reasons(result)]
    shown_lines = lines[:MOST]
    if len(lines) > MOST:
        shown_lines[-1] = f"::error title=and more::{len(lines) - MOST + 1} further problems are in the summary"
    return "".join(f"{line}\n" for line in shown_lines)


def wall_off(text: str) -> str:
    """`text` between two commands that make GitHub take no line of it for a command."""
    word = secrets.token_hex(16)
    return f"::stop-commands::{word}\n{text}\n::{word}::\n"


def _escape_data(text: str) -> str:
    return escape(cut(text, 900)).replace("%", "%25").replace("\r", "%0D").replace("\n", "%0A")


def _escape_property(text: str) -> str:
    return _escape_data(cut(text, 200)).replace(":", "%3A").replace(",", "%2C")


def code_quality(result: GateResult, root: Path) -> list[dict[str, Any]]:
    """The entries of GitLab's code quality report."""
    return [
        {
            "description": words.sentence(failure),
            "check_name": failure.finding.invariant,
            "fingerprint": fingerprint,
            "severity": "critical",
            "location": {"path": path, "lines": {"begin": line}},
        }
        for failure, path, line, fingerprint in _placed_failures(result, root)
    ]


def sarif(result: GateResult, root: Path) -> dict[str, Any]:
    """The report in SARIF, for code scanning services."""
    entries: list[dict[str, Any]] = []
    rules: dict[str, None] = {}
    for failure, path, line, fingerprint in _placed_failures(result, root):
        rule = cut(failure.finding.invariant, 200)
        rules.setdefault(rule)
        where = {"artifactLocation": {"uri": quote(path), "uriBaseId": "%SRCROOT%"}, "region": {"startLine": line}}
        entries.append(
            {
                "ruleId": rule,
                "ruleIndex": list(rules).index(rule),
                "level": "error",
                "message": {"text": words.sentence(failure)},
                "locations": [{"physicalLocation": where}],
                "partialFingerprints": {"specverify/v1": fingerprint},
            }
        )
    described = [{"id": rule, "shortDescription": {"text": f"The invariant {rule} of SpecVerify."}} for rule in rules]
    driver = {"name": "SpecVerify", "rules": described}
    return {"$schema": SCHEMA, "version": "2.1.0", "runs": [{"tool": {"driver": driver}, "results": entries}]}


def _placed_failures(result: GateResult, root: Path) -> list[tuple[Failure, str, int, str]]:
    """The failures with a line below `root`, since services show none without: failure, path, line, fingerprint.

    The fingerprint is that of backend, signature and file, so that a moved line is the same problem.
    """
    placed: list[tuple[Failure, str, int, str]] = []
    for run, failure in words.failures(result):
        place = _place_of(failure, root)
        if place is not None and len(placed) < MOST_PLACED:
            name = f"{run.title}\n{signature(failure.finding)}\n{place[0]}"
            fingerprint = hashlib.sha256(name.encode("utf-8", "backslashreplace")).hexdigest()
            placed.append((failure, *place, fingerprint))
    return placed


def _place_of(failure: Failure, root: Path) -> tuple[str, int] | None:
    """The innermost frame of a broken run whose file lies below `root`: its path from there, and its line."""
    for line in reversed(failure.finding.said):
        frame = FRAME.match(line.strip())
        if frame is None or "\0" in frame["file"]:
            continue
        named_parts = Path(frame["file"]).parts
        # A frame of a file at the root begins with the root's own name.
        resolved_root = root.resolve()
        inner_path = next(
            (
                file
                for file in _find_files(root, named_parts[-1])
                if (resolved_root / file).parts[-len(named_parts) :] == named_parts
            ),
            None,
        )
        if inner_path is not None and int(frame["line"]):
            return inner_path.as_posix(), int(frame["line"])
    return None


def _find_files(root: Path, name: str) -> Iterator[Path]:
    """Files called `name` below `root`, as paths from there, without those of hidden and foreign folders."""
    for num_folders, (folder, subfolders, names) in enumerate(os.walk(root)):
        if num_folders == MOST_FOLDERS:
            return
        subfolders[:] = sorted(
            subfolder for subfolder in subfolders if not subfolder.startswith(".") and subfolder not in FOREIGN
        )
        if name in names:
            yield Path(folder, name).relative_to(root)
