"""The counts of a run: comparisons, outcomes, fallbacks and chosen ways.

Fallbacks are slower attention paths and slower commits, each with its reason.
"""

from collections import Counter
from collections.abc import Iterable, Mapping

from rich.table import Table
from rich.text import Text

from specverify.properties.residue import Residue
from specverify.properties.tally import Counts, Tally
from specverify.reference.trace import CHOSEN
from specverify.reports.format import clean, cut, plural
from specverify.reports.layout80 import MARGIN, WIDTH, plain_text
from specverify.reports.unrevealed import hidden_invariants

THIN = 3
"""The cases below which an invariant that compared something is called thin."""

MOST_NAMES = 9
"""The most invariants that a row of a page names."""


def invariant_table(tally: Tally, width: int = WIDTH) -> str:
    """A row for each invariant: its cases by outcome, and the comparisons in the cases that were checked."""
    rows = Table(box=None, pad_edge=False, padding=(0, 1, 0, 0), header_style="")
    rows.add_column(Text("invariant"), overflow="fold", min_width=36)
    has_internal = any(counts.internal for counts in tally.invariants.values())
    for name in ("checked", "compared", "failed", "unobserved", "n/a", *(("internal",) if has_internal else ())):
        rows.add_column(Text(name), justify="right")
    unrevealed = hidden_invariants(tally)
    for name, counts in tally.invariants.items():
        # Rows of nothing but unobserved cases stand together in one row (`specverify.reports.unrevealed`).
        if name in unrevealed:
            continue
        cells = [counts.checked, counts.compared, counts.failed, counts.unobserved, counts.not_applicable]
        cells += [counts.internal] if has_internal else []
        rows.add_row(Text(clean(name)), *(Text(short_count(cell) if cell else "-") for cell in cells))
    return plain_text(rows, width=width - MARGIN)


def short_count(count: int) -> str:
    """A count in at most six characters.

    >>> short_count(12345), short_count(1234567), short_count(123456789)
    ('12345', '1235k', '123M')
    """
    return str(count) if count < 100_000 else f"{count / 1e3:.0f}k" if count < 10_000_000 else f"{count / 1e6:.0f}M"


def unjudged_reason(name: str, counts: Counts) -> str | None:
    """The reason why an invariant was judged on no case, or None if it was judged on some case."""
    if counts.checked:
        return None
    reasons = []
    if counts.internal:
        reasons.append(f"internal error in {plural(counts.internal, 'case')}")
    if counts.unobserved:
        reasons.append(f"unobserved in {plural(counts.unobserved, 'case')}")
    if counts.not_applicable:
        reasons.append(f"not applicable to {plural(counts.not_applicable, 'case')}")
    return f"{clean(name)} ({', '.join(reasons) or 'never reached'})"


def judged_rows(tally: Tally, verbose: bool) -> list[tuple[str, str]]:
    """Rows on the invariants that compared something: how many, which failed, and which in few cases only."""
    judged = {name: counts for name, counts in tally.invariants.items() if counts.checked}
    if verbose or not tally.invariants:
        return _partial_rows(tally, len(judged))
    thin_names = [f"{clean(name)} {counts.checked}" for name, counts in judged.items() if counts.checked < THIN]
    qualifier = f", each in fewer than {THIN} cases" if thin_names and len(thin_names) == len(judged) else ""
    facts = [("invariants", f"{len(judged)} of {len(tally.invariants)} compared something{qualifier}")]
    failed_names = [
        f"{clean(name)} in {counts.failed} of {plural(counts.checked, 'case')}"
        for name, counts in judged.items()
        if counts.failed
    ]
    if failed_names:
        facts.append(("failed", _first_names(failed_names)))
    if thin_names and not qualifier:
        facts.append(("thin", f"{len(thin_names)} in fewer than {THIN} cases{_name_suffix(tally, thin_names)}"))
    return facts + _partial_rows(tally, MOST_NAMES)


def _partial_rows(tally: Tally, most: int) -> list[tuple[str, str]]:
    """A row on the invariants whose evidence some cases did not hold."""
    partial_names = [
        f"{clean(name)} ({counts.unobserved} of {counts.unobserved + counts.checked} cases unobserved)"
        for name, counts in tally.invariants.items()
        if counts.checked and counts.unobserved
    ]
    return [("partly", _first_names(partial_names, most))] if partial_names else []


def unjudged_rows(tally: Tally, verbose: bool) -> list[tuple[str, str]]:
    """Rows on the invariants that compared nothing: one for each reason, or with `verbose` one for each invariant."""
    if verbose:
        return [
            ("not judged", reason)
            for name, counts in tally.invariants.items()
            if (reason := unjudged_reason(name, counts))
        ]
    groups: dict[str, list[str]] = {}
    for name, counts in tally.invariants.items():
        if counts.checked:
            continue
        reason = "whose turn did not come in so few cases"
        if counts.internal:
            reason = "since they raised an exception"
        elif counts.unobserved:
            reason = "whose evidence the backend does not show"
        elif counts.not_applicable:
            reason = "since no case was of their kind"
        groups.setdefault(reason, []).append(clean(name))
    return [("not judged", f"{len(names)}, {reason}{_name_suffix(tally, names)}") for reason, names in groups.items()]


def _name_suffix(tally: Tally, names: list[str]) -> str:
    """A colon and names; nothing in a run that differs, in which they matter less than the failure."""
    return "" if tally.outcome == "differ" else f": {_first_names(names)}"


def _first_names(names: list[str], most: int = MOST_NAMES) -> str:
    """The first `most` names, and the number of the others."""
    suffix = f" and {len(names) - most} more" if len(names) > most else ""
    return ", ".join(names[:most]) + suffix


def fallback_counts(fallbacks: Mapping[str, int]) -> list[tuple[str, int]]:
    """The reasons for which attention took a slower path, the most frequent first."""
    reasons = {reason: count for reason, count in fallbacks.items() if not reason.startswith(CHOSEN)}
    return sorted(reasons.items(), key=lambda item: (-item[1], item[0]))


def way_rows(fallbacks: Mapping[str, int]) -> list[tuple[str, str]]:
    """A row with the ways that attention chose, the most frequent first; none where attention chooses no way."""
    ways = Counter({way[len(CHOSEN) :]: count for way, count in fallbacks.items() if way.startswith(CHOSEN)})
    counts_of_ways = ", ".join(f"{clean(way)} {count}" for way, count in ways.most_common())
    return [("ways", f"chosen by measured times, with the calls of each: {counts_of_ways}")] if ways else []


def commit_rows(tally: Tally) -> list[tuple[str, str]]:
    """A row for each reason for which commits took another way than the layout asks for."""
    facts = []
    for way, num_asked in tally.commits.items():
        fallbacks = {reason: count for reason, count in tally.commit_fallbacks.items() if reason.startswith(f"{way}: ")}
        # If every commit fell back, the way that the layout asks for was never tested.
        suffix = "; none was committed so" if sum(fallbacks.values()) >= num_asked else ""
        facts += [
            ("fell back", f"{count} of {num_asked} commits by {clean(reason)}{suffix if i == 0 else ''}")
            for i, (reason, count) in enumerate(fallback_counts(fallbacks))
        ]
    return facts


def residue_rows(residue: Iterable[Residue]) -> list[tuple[str, str]]:
    """A row for each thing that runs left in the backend's process, with the first case that left it."""
    rows = []
    for leftover in residue:
        case = f" (first by case {clean(leftover.case)})" if leftover.case else ""
        rows.append(("left behind", f"a run {cut(leftover.what, 200)}{case}"))
    return rows
