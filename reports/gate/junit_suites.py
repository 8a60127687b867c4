"""A gate as JUnit XML: a suite for each run, and one for the gate itself."""

from junitparser import Error, TestCase, TestSuite
from junitparser import Failure as JUnitFailure

from specverify.properties.gate_result import RED, UNJUDGED, GateResult
from specverify.reports.format import cut
from specverify.reports.gate import words
from specverify.reports.junit import LONGEST_MESSAGE, LONGEST_NAME, document_of, suite_of

GATE = "specverify gate"
"""The name of the suite of the ledger and of the gate itself."""


def gate_junit(result: GateResult) -> bytes:
    """The result as a UTF-8 XML document.

    An invariant that failed only as the ledger knows is skipped with the reason. A known failure that passes now or has
    expired fails, as does in its own suite every reason why the gate could not judge.
    """
    suites = []
    for run in result.runs:
        reasons: dict[str, list[str]] = {}
        for known_failure in result.known:
            if run.tally.known[known_failure.known.name]:
                reasons.setdefault(known_failure.known.main.invariant, []).append(cut(known_failure.reason, 200))
        suite = suite_of(run.tally, title=run.title, known_failures=reasons)
        if run.short:
            suite.add_testcase(_error("floors", run.title, run.short))
        suites.append(suite)
    gate_suite = TestSuite(GATE)
    for known_failure in result.known:
        entry = TestCase(cut(f"known failure {known_failure.known.name}", LONGEST_NAME), classname=GATE)
        if known_failure.state in RED:
            entry.result = [JUnitFailure(cut(words.known_line(known_failure), LONGEST_MESSAGE), known_failure.state)]
        elif known_failure.state == UNJUDGED:
            entry.result = [Error(cut(words.known_line(known_failure), LONGEST_MESSAGE), "unjudged")]
        gate_suite.add_testcase(entry)
    if result.complaints:
        gate_suite.add_testcase(_error("gate", GATE, result.complaints))
    return document_of([*suites, *([gate_suite] if len(gate_suite) else [])], result.seconds)


def _error(name: str, suite: str, lines: list[str]) -> TestCase:
    entry = TestCase(name, classname=cut(suite, LONGEST_NAME))
    entry.result = [Error(cut(line, LONGEST_MESSAGE), "unjudged") for line in lines]
    return entry
