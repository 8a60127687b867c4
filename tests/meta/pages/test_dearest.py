"""The cases of a run that took the most time: kept by the tally, named by page and JSON."""

from dataclasses import replace

from specverify.properties.tally import NUM_DEAREST, Tally
from specverify.properties.verdict.finding import Verdict
from specverify.reference.case import Case
from specverify.reports.pages.summary import summary_page
from specverify.reports.record import summary, verdict_line
from tests.models import LLAMA


def test_the_cases_that_took_the_most_time_are_named_in_order() -> None:
    tally = Tally("cpu-eager")
    cases = [Case(LLAMA, (1, token)) for token in range(NUM_DEAREST + 2)]
    for case, seconds in zip(cases, (3.0, 1.0, 7.0, 2.0, 0.5, 6.0, 4.0), strict=True):
        tally.add(Verdict(case, "cpu-eager", {"lossless.greedy-match": "checked"}, seconds=seconds))
    assert [seconds for seconds, _ in tally.dearest] == [7.0, 6.0, 4.0, 3.0, 2.0]
    assert summary(tally)["dearest"][0] == {"case": cases[2].id, "seconds": 7.0}
    page = summary_page(tally, verbose=True)
    assert page.index(f"7 s, case {cases[2].id}") < page.index(f"2 s, case {cases[3].id}")
    assert cases[1].id not in page
    assert page.count("dearest") == 1


def test_a_case_without_a_time_is_not_among_them() -> None:
    tally = Tally("cpu-eager")
    verdict = Verdict(Case(LLAMA, (1, 2)), "cpu-eager", {"lossless.greedy-match": "checked"})
    tally.add(verdict)
    assert tally.dearest == ()
    assert verdict_line(replace(verdict, seconds=1.5))["judged_seconds"] == 1.5
