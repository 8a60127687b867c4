"""Sentences on what an engine that reveals few stages leaves unjudged.

They also say what revealing more would buy, by the stages that invariants declare to need.
"""

from properties.invariants import ALL
from properties.speculation import by_own_count
from properties.tally import Tally
from reference.trace import Stage
from reports.format import clean, plural

NEEDS = {one.name: one.needs for one in ALL}
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
    left, known = list(needs), revealed
    while left:
        missing = sorted(frozenset().union(*left) - known)
        adds = {stage: sum(one <= known | {stage} for one in left) for stage in missing}
        # Where no stage alone adds any, the one that most invariants wait for comes next.
        best = max(missing, key=lambda stage: (adds[stage], sum(stage in one for one in left)))
        order.append((best, adds[best]))
        known = known | {best}
        left = [one for one in left if not one <= known]
    return order


def unrevealed_rows(tally: Tally) -> list[tuple[str, str]]:
    """The labelled facts on stages that the backend does not reveal; none where it reveals what invariants need."""
    unseen = hidden_invariants(tally)
    if not unseen:
        return []
    named = ", ".join(stage.word for stage in Stage if stage in tally.declared)
    steps = best_stages(list(unseen.values()), tally.declared)
    told = [f"{'revealing ' if not at else ''}{stage.word} adds {count}" for at, (stage, count) in enumerate(steps)]
    facts = [
        ("not revealed", f"{plural(len(unseen), 'invariant')} unobserved: {clean(tally.backend)} reveals {named}"),
        ("would add", ", then ".join(told)),
    ]
    quiet = {name: counts for name, counts in tally.invariants.items() if not counts.checked and name not in unseen}
    groups = (
        ("its cases do not hold what they speak of, or it does not promise it", False),
        ("the backend does not offer what they need beside stages", True),
    )
    for why, unobserved in groups:
        names = [clean(name) for name, counts in quiet.items() if bool(counts.unobserved) == unobserved]
        if names:
            facts.append(("not judged", f"{len(names)}, since {why}: {', '.join(names)}"))
    return facts


def speculation_rows(tally: Tally) -> list[tuple[str, str]]:
    """The speculation of an engine without visible acceptance, as its counts tell it."""
    counts = tally.speculation
    if not tally.opened or not by_own_count(tally.declared):
        return []
    if counts.untested() is not None:
        return [("SPECULATION", str(counts.untested()))]
    if counts.share is None:
        given = f"{plural(counts.drafted, 'case')} gave a draft, and" if counts.drafted else "no case gave a draft, and"
        return [("speculation", f"{given} the engine tells no counts: nothing says that a drafted token was accepted")]
    share = f"{counts.share:.0%} of {plural(counts.proposed, 'drafted token')} accepted"
    never = "; none was rejected, so that rejection was not tested" if counts.accepted == counts.proposed else ""
    return [("speculation", f"{share}, by the engine's own count in {plural(counts.told, 'case')}{never}")]
