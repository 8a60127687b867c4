"""Coverage by pairs in words and as JSON: which of what a request may have met, and which never did."""

from typing import Any

from specverify.properties.verdict.coverage.pair_coverage import PairCoverage
from specverify.reports.format import plural

NAMED = 6
"""Labels, and pairs, that a row of a page names."""

MOST_PAIRS = 1000
"""Pairs that were not met, of which JSON has the names."""


def coverage_rows(coverage: PairCoverage | None) -> list[tuple[str, str]]:
    """The labelled facts of a run about its pairs; none for a run that drew no cases."""
    if coverage is None:
        return []
    share = f"{coverage.num_met:,} of {plural(coverage.num_possible, 'pair')} of what a request may have and reach"
    rows = [("pairs", f"{share} were judged ({100 * coverage.share:.0f} %)")]
    absent = [str(label) for label in coverage.absent]
    if absent:
        rows.append(("never", _some(absent)))
    missing = [str(pair) for pair in coverage.missing_of_present]
    if missing:
        rows.append(("apart", _some(missing)))
    return rows


def _some(names: list[str]) -> str:
    """The first of these names, and how many there are beside them."""
    more = f"; and {len(names) - NAMED:,} more" if len(names) > NAMED else ""
    return f"{'; '.join(names[:NAMED])}{more}"


def coverage_fact(coverage: PairCoverage | None) -> dict[str, Any] | None:
    """The coverage as a JSON object: counts, labels that no request had, and the first of the other missing pairs."""
    if coverage is None:
        return None
    missing = coverage.missing_of_present
    return {
        "possible": coverage.num_possible,
        "met": coverage.num_met,
        "absent": [str(label) for label in coverage.absent],
        "missing": [[str(pair.first), str(pair.second)] for pair in missing[:MOST_PAIRS]],
        "more_missing": max(0, len(missing) - MOST_PAIRS),
    }
