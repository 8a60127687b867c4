"""A run as JUnit XML for a merge gate.

The document has one suite for the backend and one test case for each invariant.
"""

from junitparser import Error, JUnitXml, Skipped, TestCase, TestSuite
from junitparser import Failure as JUnitFailure

from properties.tally import Counts, Failure, Tally
from reference.trace import Stage
from reports.counts import not_judged
from reports.format import clean, plural
from reports.pages.terminal import failure_page, summary_page
from reports.record import ORACLE
from reports.tree_scene import scene_of
from reports.vocabulary import account

RUN = "run"
"""The name of the test case of the run itself, which appears where the run could not judge."""


def junit(tally: Tally, revealed: frozenset[Stage] | None = None) -> bytes:
    """The run as a UTF-8 XML document.

    An invariant that failed carries the page of each failure that it located. An invariant that was never checked is
    skipped with the reason, because a check that did not run is no pass. A run that could not judge adds an erroneous
    test case `run`.

    Args:
        tally: The run.
        revealed: The stages that the backend declares to reveal; None for those that its traces show.
    """
    located: dict[str, list[Failure]] = {}
    for failure in tally.failures:
        located.setdefault(failure.finding.invariant, []).append(failure)
    suite = TestSuite(clean(tally.backend))
    # A failure may name an invariant that has no counts yet; the dict keeps the order and drops repeats.
    for name in dict.fromkeys((*tally.invariants, *located)):
        counts = tally.invariants.get(name, Counts())
        suite.add_testcase(_testcase(tally, name, counts, located.get(name, []), revealed))
    if tally.outcome == "unjudged" or tally.errors:
        suite.add_testcase(_run(tally))
    facts = {
        "emulated": str(tally.emulated).lower(),
        "reference": tally.against or ORACLE,
        "tokens_alone": str(tally.tokens_alone).lower(),
        "cases": str(tally.cases),
        **tally.environment,
    }
    # XML refuses control characters, which `clean` escapes.
    for name, value in facts.items():
        suite.add_property(clean(name), clean(value))
    document = JUnitXml()
    document.add_testsuite(suite)
    document.update_statistics()  # type: ignore[no-untyped-call]
    # junitparser adds up the times of the test cases, of which there are none.
    suite.time = document.time = round(tally.seconds, 3)
    text: bytes = document.tostring()  # type: ignore[no-untyped-call]
    return text


def _testcase(
    tally: Tally, name: str, counts: Counts, failures: list[Failure], revealed: frozenset[Stage] | None
) -> TestCase:
    """The test case of one invariant."""
    entry = TestCase(clean(name), classname=clean(tally.backend))
    if failures:
        entry.result = [_failed(failure, revealed) for failure in failures]
    elif counts.failed:
        # Its failures were traced to another invariant's finding, which holds the page.
        seen = f"failed in {counts.failed} of {plural(counts.checked, 'case')}"
        entry.result = [JUnitFailure(f"{seen}; the earliest difference is told under another invariant", "differ")]
    elif reason := not_judged(name, counts):
        entry.result = [Skipped(clean(f"not judged: {reason}"))]
    elif counts.unobserved:
        total = plural(counts.checked + counts.unobserved, "case")
        entry.system_out = f"holds where it was judged; unobserved in {counts.unobserved} of {total}"
    return entry


def _failed(failure: Failure, revealed: frozenset[Stage] | None) -> JUnitFailure:
    """One failure with its page."""
    told = account(failure.finding, scene_of(failure.verdict, failure.finding))
    result = JUnitFailure(clean(told), failure.finding.stage.word)
    result.text = "\n" + failure_page(failure, revealed)
    return result


def _run(tally: Tally) -> TestCase:
    """The erroneous test case of a run that could not judge."""
    entry = TestCase(RUN, classname=clean(tally.backend))
    why = tally.errors or ([tally.stopped] if tally.stopped else ["nothing was judged"])
    for line in why:
        result = Error(clean(line), "unjudged")
        result.text = "\n" + summary_page(tally)
        entry.result = [*entry.result, result]
    return entry
