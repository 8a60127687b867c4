"""GitHub's workflow commands: annotations, and a wall around foreign output."""

import secrets
from pathlib import Path

from specverify.properties.gate_result import RED, GateResult
from specverify.reports.format import cut, escape
from specverify.reports.gate import words
from specverify.reports.gate.places import place_of

MOST = 10
"""Annotations of one kind that GitHub shows for a step."""


def annotations(result: GateResult, root: Path) -> str:
    """One line for each failure, stale or expired known failure, and reason why the gate could not judge.

    `root` is the folder of the repository; a failure with a line of the engine's code below it is shown there.
    """
    lines = []
    for run, failure in words.failures(result):
        place = place_of(failure, root)
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
