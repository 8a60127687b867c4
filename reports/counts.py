"""The counts of a run: comparisons, outcomes, fallbacks, chosen ways, and what stays unrevealed.

Fallbacks are slower attention paths and slower commits, each with its reason. Of an engine that reveals few stages the
sentences say what is left unjudged, and what revealing more would buy.
"""

from collections import Counter
from collections.abc import Iterable, Mapping

from rich.table import Table
from rich.text import Text

from specverify.properties.invariants import ALL
from specverify.properties.reference_names import NUMPY
from specverify.properties.residue import Residue
from specverify.properties.speculation import by_own_count
from specverify.properties.tally import Counts, Tally
from specverify.properties.verdict.finding import CertifiedRows
from specverify.reference.trace import CHOSEN, Stage
from specverify.reports.format import clean, cut, plural
from specverify.reports.layout80 import MARGIN, WIDTH, plain_text

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
        # Rows of nothing but unobserved cases stand together in one row (`specverify.reports.counts`).
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


def judged_rows(tally: Tally) -> list[tuple[str, str]]:
    """Rows on the invariants whose evidence some cases did not hold."""
    return _partial_rows(tally, sum(1 for counts in tally.invariants.values() if counts.checked))


def _partial_rows(tally: Tally, most: int) -> list[tuple[str, str]]:
    """A row on the invariants whose evidence some cases did not hold."""
    partial_names = [
        f"{clean(name)} ({counts.unobserved} of {counts.unobserved + counts.checked} cases unobserved)"
        for name, counts in tally.invariants.items()
        if counts.checked and counts.unobserved
    ]
    return [("partly", _first_names(partial_names, most))] if partial_names else []


def unjudged_rows(tally: Tally) -> list[tuple[str, str]]:
    """A row for each invariant that compared nothing."""
    return [
        ("not judged", reason) for name, counts in tally.invariants.items() if (reason := unjudged_reason(name, counts))
    ]


def _first_names(names: list[str], most: int = MOST_NAMES) -> str:
    """The first `most` names, and the number of the others."""
    suffix = f" and {len(names) - most} more" if len(names) > most else ""
    return ", ".join(names[:most]) + suffix


def fallback_counts(fallbacks: Mapping[str, int]) -> list[tuple[str, int]]:
    """The reasons for which attention took a slower path, the most frequent first."""
    reasons = {reason: count for reason, count in fallbacks.items() if not reason.startswith(CHOSEN)}
    return sorted(reasons.items(), key=lambda item: (-item[1], item[0]))


def native_rows(tally: Tally) -> list[tuple[str, str]]:
    """A row with the attention calls that took the backend's own way, where a mode leaves some of them out."""
    if tally.native_calls is None or tally.own_kernel:
        return []
    mode = clean(tally.environment.get("mode", "unknown"))
    return [("native", f"{tally.native_calls} of {tally.attention_calls} attention calls, in mode {mode}")]


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


NEEDS = {invariant.name: invariant.needs for invariant in ALL}
"""The stages that each invariant of this project needs."""


def hidden_invariants(tally: Tally) -> dict[str, frozenset[Stage]]:
    """The invariants that were judged on no case since the backend declares too few stages, each with what it needs."""
    return {
        name: NEEDS[name]
        for name, counts in tally.invariants.items()
        if tally.declared and not counts.checked and name in NEEDS and not NEEDS[name] <= tally.declared
    }


def best_stages(needs: list[frozenset[Stage]], revealed: frozenset[Stage]) -> list[tuple[Stage, int]]:
    """Further stages in the order that makes most invariants judgeable soonest, each with the number that it adds.

    >>> scored, drafted = frozenset({Stage.SCORED}), frozenset({Stage.DRAFTED})
    >>> [(stage.word, count) for stage, count in best_stages([scored, scored | drafted, scored], frozenset())]
    [('scored', 2), ('drafted', 1)]
    """
    order: list[tuple[Stage, int]] = []
    unmet, known_stages = list(needs), revealed
    while unmet:
        hidden_stages = sorted(frozenset().union(*unmet) - known_stages)
        gains = {stage: sum(need <= known_stages | {stage} for need in unmet) for stage in hidden_stages}
        # Where no stage alone adds any, the one that most invariants wait for comes next.
        best = max(hidden_stages, key=lambda stage: (gains[stage], sum(stage in need for need in unmet)))
        order.append((best, gains[best]))
        known_stages = known_stages | {best}
        unmet = [need for need in unmet if not need <= known_stages]
    return order


def unrevealed_rows(tally: Tally) -> list[tuple[str, str]]:
    """The labelled facts on stages that the backend does not reveal; none where it reveals what invariants need."""
    unobserved_invariants = hidden_invariants(tally)
    if not unobserved_invariants:
        return []
    revealed_words = ", ".join(stage.word for stage in Stage if stage in tally.declared)
    additions = best_stages(list(unobserved_invariants.values()), tally.declared)
    phrases = [
        f"{'revealing ' if not i else ''}{stage.word} adds {count}" for i, (stage, count) in enumerate(additions)
    ]
    headline = f"{plural(len(unobserved_invariants), 'invariant')} unobserved"
    facts = [
        ("not revealed", f"{headline}: {clean(tally.backend)} reveals {revealed_words}"),
        ("would add", ", then ".join(phrases)),
    ]
    quiet_invariants = {
        name: counts
        for name, counts in tally.invariants.items()
        if not counts.checked and name not in unobserved_invariants
    }
    groups = (
        ("its cases do not hold what they speak of, or it does not promise it", False),
        ("the backend does not offer what they need beside stages", True),
    )
    for reason, unobserved in groups:
        names = [clean(name) for name, counts in quiet_invariants.items() if bool(counts.unobserved) == unobserved]
        if names:
            facts.append(("not judged", f"{len(names)}, since {reason}: {', '.join(names)}"))
    return facts


def speculation_rows(tally: Tally) -> list[tuple[str, str]]:
    """The speculation of an engine without visible acceptance, as its counts tell it."""
    counts = tally.speculation
    if not tally.opened or not by_own_count(tally.declared):
        return []
    if counts.why_untested() is not None:
        return [("SPECULATION", str(counts.why_untested()))]
    if counts.share is None:
        subject = (
            f"{plural(counts.drafted, 'case')} gave a draft, and" if counts.drafted else "no case gave a draft, and"
        )
        return [
            ("speculation", f"{subject} the engine tells no counts: nothing says that a drafted token was accepted")
        ]
    share = f"{counts.share:.0%} of {plural(counts.proposed, 'drafted token')} accepted"
    suffix = "; none was rejected, so that rejection was not tested" if counts.accepted == counts.proposed else ""
    return [("speculation", f"{share}, by the engine's own count in {plural(counts.told, 'case')}{suffix}")]


def varied_rows(tally: Tally) -> list[tuple[str, str]]:
    """The prompts of which variants ran, where those are not all."""
    if tally.varied is None or tally.varied[0] >= tally.varied[1]:
        return []
    varied, prompts = tally.varied
    return [("variants", f"of {varied} of {prompts} prompts; the others were judged by their own runs (--variants)")]


def reference_rows(tally: Tally) -> list[tuple[str, str]]:
    """What computed the oracle's rows, and how many of them NumPy certified; nothing where NumPy computed all."""
    return [] if tally.reference == NUMPY else [("reference", f"{tally.reference}, {rows_words(tally.reference_rows)}")]


def rows_words(rows: CertifiedRows) -> str:
    """The rows that a reference on a device computed, and those that NumPy certified."""
    if not rows.judged:
        return "which computed no row"
    widest = f", at most {rows.widest:.2g} of a row's largest number apart" if rows.certified else ""
    return f"{plural(rows.judged, 'row')} by the oracle's formulas; NumPy certified {rows.certified} of them{widest}"
