"""Sentences on what an engine that reveals few stages leaves unjudged.

They also say what revealing more would buy, by the stages that invariants declare to need.
"""

from specverify.properties.invariants import ALL
from specverify.properties.speculation import by_own_count
from specverify.properties.tally import Tally
from specverify.reference.trace import Stage
from specverify.reports.format import clean, plural

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
