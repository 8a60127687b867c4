"""A run, or a gate with a suite for each run, as JUnit XML.

A suite stands for one backend and has a test case for each invariant.
"""

from collections.abc import Mapping
from types import MappingProxyType

from junitparser import Error, JUnitXml, Skipped, TestCase, TestSuite
from junitparser import Failure as JUnitFailure

from specverify.properties.gate_result import RED, UNJUDGED, GateResult
from specverify.properties.reference_names import NUMPY
from specverify.properties.tally import Counts, Failure, InternalFailure, Tally
from specverify.reference.trace import Stage
from specverify.reports.bundle import replay_command
from specverify.reports.counts import rows_words, unjudged_reason, varied_rows
from specverify.reports.format import clean, cut, plural
from specverify.reports.gate import words
from specverify.reports.pages.summary import summary_page
from specverify.reports.pages.terminal import failure_page
from specverify.reports.record import reference_word
from specverify.reports.tree_scene import scene_of
from specverify.reports.vocabulary import account

RUN = "run"
"""The name of the test case of the run itself, which appears where the run could not judge."""

GATE = "specverify gate"
"""The name of the suite of the ledger and of the gate itself."""

LONGEST_TEXT = 20_000
"""Most characters of one failure's text."""

LONGEST_MESSAGE = 1000
"""Most characters of one failure's message."""

LONGEST_NAME = 200
"""Most characters of the name of a suite or a test case."""


def junit(tally: Tally, revealed: frozenset[Stage] | None = None) -> bytes:
    """The run as a UTF-8 XML document (`suite_of`)."""
    return document_of([suite_of(tally, revealed)], tally.seconds)


def suite_of(
    tally: Tally,
    revealed: frozenset[Stage] | None = None,
    title: str | None = None,
    known_failures: Mapping[str, list[str]] = MappingProxyType({}),
) -> TestSuite:
    """The run as a test suite.

    An invariant that failed carries the page of each failure that it located. An invariant that was never checked is
    skipped with the reason, because a check that did not run is no pass. A run that could not judge adds an erroneous
    test case `run`. `known_failures` has a line for each known failure that the run saw; an invariant that failed in no
    other way is skipped with these lines.
    """
    located: dict[str, list[Failure]] = {}
    for failure in tally.failures:
        located.setdefault(failure.finding.invariant, []).append(failure)
    name_of_suite = cut(title or tally.backend, LONGEST_NAME)
    suite = TestSuite(name_of_suite)
    # A failure may name an invariant that has no counts yet; the dict keeps the order and drops repeats.
    for name in dict.fromkeys((*tally.invariants, *located, *known_failures)):
        counts = tally.invariants.get(name, Counts())
        entry = _testcase(tally, name, counts, located.get(name, []), revealed)
        if known_failures.get(name) and not entry.result:
            entry.result = [Skipped(clean(f"known failure: {'; '.join(known_failures[name])}"))]
        entry.classname = name_of_suite
        suite.add_testcase(entry)
    if tally.outcome == "unjudged" or tally.reasons:
        suite.add_testcase(_run_testcase(tally))
    facts = {
        "emulated": str(tally.emulated).lower(),
        **({"excluded": "; ".join(tally.excluded)} if tally.excluded else {}),
        "reference": reference_word(tally),
        **({} if tally.reference == NUMPY else {"reference_rows": rows_words(tally.reference_rows)}),
        **dict(varied_rows(tally)),
        "tokens_alone": str(tally.tokens_alone).lower(),
        "cases": str(tally.cases),
        **tally.environment,
    }
    # XML refuses control characters, which `clean` escapes.
    for name, value in facts.items():
        suite.add_property(clean(name), clean(value))
    # junitparser would add up the times of the test cases, of which there are none.
    suite.time = round(tally.seconds, 3)
    return suite


def document_of(suites: list[TestSuite], seconds: float) -> bytes:
    """The UTF-8 XML document of several suites."""
    document = JUnitXml()
    for suite in suites:
        document.add_testsuite(suite)
    times = [suite.time for suite in suites]
    document.update_statistics()  # type: ignore[no-untyped-call]
    for suite, seconds_taken in zip(suites, times, strict=True):
        suite.time = seconds_taken
    document.time = round(seconds, 3)
    text: bytes = document.tostring()  # type: ignore[no-untyped-call]
    return text


def _testcase(
    tally: Tally, name: str, counts: Counts, failures: list[Failure], revealed: frozenset[Stage] | None
) -> TestCase:
    """The test case of one invariant."""
    entry = TestCase(cut(name, LONGEST_NAME), classname=cut(tally.backend, LONGEST_NAME))
    if failures:
        entry.result = [_failure_result(failure, revealed) for failure in failures]
        # GitLab and Jenkins attach the files that such lines name.
        files = [failure.file for failure in failures if failure.file is not None]
        if files:
            entry.system_out = "".join(f"[[ATTACHMENT|{clean(file)}]]\n" for file in files)
    elif counts.failed:
        # Its failures were traced to another invariant's finding, which holds the page.
        outcome = f"failed in {counts.failed} of {plural(counts.checked, 'case')}"
        entry.result = [JUnitFailure(f"{outcome}; the earliest difference is told under another invariant", "differ")]
    elif counts.internal:
        # An invariant that raised on one case is no pass, whatever it said of others.
        entry.result = [
            _internal_result(unanswered) for unanswered in tally.internal if unanswered.error.invariant == name
        ]
    elif reason := unjudged_reason(name, counts):
        entry.result = [Skipped(clean(f"not judged: {reason}"))]
    elif counts.unobserved:
        total = plural(counts.checked + counts.unobserved, "case")
        entry.system_out = f"holds where it was judged; unobserved in {counts.unobserved} of {total}"
    return entry


def _failure_result(failure: Failure, revealed: frozenset[Stage] | None) -> JUnitFailure:
    """One failure with its page."""
    sentence = account(failure.finding, scene_of(failure.verdict, failure.finding))
    result = JUnitFailure(cut(sentence, LONGEST_MESSAGE), failure.finding.stage.word)
    result.text = "\n" + failure_page(failure, revealed)[:LONGEST_TEXT]
    return result


def _internal_result(unanswered: InternalFailure) -> Error:
    """An exception inside the judge, with the last lines of its traceback and the command that replays its case."""
    result = Error(cut(unanswered.line, LONGEST_MESSAGE), "internal")
    command = None if unanswered.saved is None else replay_command(unanswered.saved)
    lines = [*map(clean, unanswered.error.said), *([] if command is None else [clean(command)])]
    result.text = "\n" + "\n".join(lines)[:LONGEST_TEXT]
    return result


def _run_testcase(tally: Tally) -> TestCase:
    """The erroneous test case of a run that could not judge."""
    entry = TestCase(RUN, classname=cut(tally.backend, LONGEST_NAME))
    reasons = tally.reasons or ([tally.stopped] if tally.stopped else ["nothing was judged"])
    for line in reasons:
        result = Error(cut(line, LONGEST_MESSAGE), "unjudged")
        result.text = "\n" + summary_page(tally, verbose=True)[:LONGEST_TEXT]
        entry.result = [*entry.result, result]
    return entry


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
