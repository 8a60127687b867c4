"""Causes: failures of several workers, grouped by the defect that they show."""

from dataclasses import replace

from properties.shrinking.cases import size
from properties.tally import Also, Failure
from properties.verdict.finding import FINISHED, of_draft_numbers, of_target_alone


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
        alike = [group for group in groups if any(_one(failure, other) for other in group)]
        groups = [group for group in groups if group not in alike] + [
            [failure, *(one for group in alike for one in group)]
        ]
    return [_told(group) for group in groups]


def _one(failure: Failure, other: Failure) -> bool:
    """Whether two failures show the same defect."""
    located, twin = failure.finding, other.finding
    if (located.invariant, located.stage) == (twin.invariant, twin.stage):
        return True
    return twin.invariant in _failing(failure) or located.invariant in _failing(other)


def _failing(failure: Failure) -> set[str]:
    return {finding.invariant for finding in failure.verdict.findings}


def _told(group: list[Failure]) -> Failure:
    shared = any(of_target_alone(failure.finding) for failure in group)
    first, *others = sorted(group, key=lambda failure: (shared and of_draft_numbers(failure.finding), *_rank(failure)))
    also = tuple(Also(one.finding.invariant, one.finding.stage, one.verdict.case.id) for one in others)
    return replace(first, also=first.also + also)


def _rank(failure: Failure) -> tuple[bool, int, tuple[float, ...]]:
    broke = failure.finding.expected == FINISHED
    # False sorts before True: a run that broke off comes last.
    return broke, int(failure.finding.stage), size(failure.verdict.case)
