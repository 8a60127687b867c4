"""Causes: failures of several workers, grouped by the defect that they show."""

from dataclasses import replace

from specverify.properties.shrinking.cases import size
from specverify.properties.tally import Failure, SameDefect
from specverify.properties.verdict.finding import FINISHED, is_about_draft_numbers, is_about_target_alone


def by_cause(failures: list[Failure]) -> list[Failure]:
    """One failure for each cause, with the others in its `also`.

    Two failures have one cause where the same invariant located both at the same stage, or where the smallest case of
    one also fails the invariant that located the other: every invariant judged each of those cases. Of one cause, the
    failure with the earliest stage is reported, then the one with the smallest case. A variant whose run broke off says
    least about where the fault lies, and gives way to any other. Wrong numbers of a draft model give way to a finding
    about the target alone, as in `Verdict.first`.
    """
    groups: list[list[Failure]] = []
    for failure in failures:
        # One failure may join groups that were apart so far: all of them become one.
        alike = [group for group in groups if any(_show_same_defect(failure, member) for member in group)]
        groups = [group for group in groups if group not in alike] + [
            [failure, *(member for group in alike for member in group)]
        ]
    return [_merge(group) for group in groups]


def _show_same_defect(first: Failure, second: Failure) -> bool:
    """Whether two failures show the same defect."""
    first_finding = first.finding
    second_finding = second.finding
    if (first_finding.invariant, first_finding.stage) == (second_finding.invariant, second_finding.stage):
        return True
    return second_finding.invariant in _failing_invariants(first) or first_finding.invariant in _failing_invariants(
        second
    )


def _failing_invariants(failure: Failure) -> set[str]:
    return {finding.invariant for finding in failure.verdict.findings}


def _merge(group: list[Failure]) -> Failure:
    target_alone = any(is_about_target_alone(failure.finding) for failure in group)
    first, *further_failures = sorted(
        group, key=lambda failure: (target_alone and is_about_draft_numbers(failure.finding), *_rank(failure))
    )
    also = tuple(
        SameDefect(failure.finding.invariant, failure.finding.stage, failure.verdict.case.id, failure.file)
        for failure in further_failures
    )
    return replace(first, also=first.also + also)


def _rank(failure: Failure) -> tuple[bool, int, tuple[float, ...]]:
    broke = failure.finding.expected == FINISHED
    # False sorts before True: a run that broke off comes last.
    return broke, int(failure.finding.stage), size(failure.verdict.case)
