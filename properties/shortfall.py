"""Shortfall: why a run without a difference is no pass.

Too little of what the run was asked for was compared.
"""

from collections.abc import Iterator

from specverify.properties.speculation import by_own_count
from specverify.properties.tally import Tally
from specverify.reference.oracle.choices import COLUMNS, EXPERTS
from specverify.reference.trace import Stage

SHOWN_BY = {EXPERTS: "routed", COLUMNS: "indexed"}
"""By kind of choice, the field of `specverify.reference.trace.Scored` that shows it."""

DECLINED_FLOOR = 0.5
"""Largest share of the cases that a backend may decline."""

JUDGED_FLOOR = 0.5
"""Smallest share of the cases that a run was to judge, whatever ended it."""

LEAST_JUDGED = 10
"""Number of cases that a run must have judged which a time budget alone was to end."""

LEAST_EACH = 3
"""Cases in which an invariant must have compared something to count as compared in such a run."""


def shortfalls(tally: Tally) -> list[str]:
    """Every reason why `tally` is no pass, one line each; empty for a run that compared enough."""
    # A backend that never opened is an error of its own, which the campaign records.
    if not tally.opened:
        return []
    untested_speculation = tally.speculation.why_untested() if by_own_count(tally.declared) else None
    reasons = (
        *_missing_cases(tally),
        *_declined_cases(tally),
        *_cut_short(tally),
        *_without_turn(tally),
        *_never_revealed(tally),
    )
    reasons += () if untested_speculation is None else (untested_speculation,)
    reasons += tuple(_excused_alone(tally))
    return list(reasons)


def _missing_cases(tally: Tally) -> Iterator[str]:
    # A run that was stopped gives its own reason in `stopped`.
    if tally.stopped is not None or tally.cases >= tally.wanted:
        return
    declined = sum(tally.unsupported.values())
    # The further cases of a prompt are made from the run that comes first, so that one declined run leaves none.
    why = ", and nothing says why"
    if declined == tally.cases > 0:
        why = f": they need a run like those that were declined ({_most_often(tally)})"
    elif declined:
        why = f"; {declined} of the {tally.cases} before them were declined (most often: {_most_often(tally)})"
    yield f"{tally.wanted - tally.cases} of {tally.wanted} cases were not judged{why}"


def _declined_cases(tally: Tally) -> Iterator[str]:
    declined = sum(tally.unsupported.values())
    if declined > DECLINED_FLOOR * tally.cases:
        reason = f"(most often: {_most_often(tally)}): what is left is no run"
        yield f"{declined} of {tally.cases} cases were declined {reason}"
    elif tally.cases - declined - tally.judged > DECLINED_FLOOR * tally.cases:
        num_silent = tally.cases - declined - tally.judged
        yield f"no invariant could be judged in {num_silent} of {tally.cases} cases: the traces reveal too little"


def _most_often(tally: Tally) -> str:
    """The reason for which most of the declined cases were declined."""
    return max(tally.unsupported.items(), key=lambda item: item[1])[0]


def _cut_short(tally: Tally) -> Iterator[str]:
    """A line if what ended the run left too little of it."""
    if tally.stopped is None or tally.cases >= tally.wanted:
        return
    if tally.open_ended:
        yield from _below_floors(tally)
    elif tally.judged < JUDGED_FLOOR * tally.wanted:
        yield f"{tally.stopped} after {tally.judged} of {tally.wanted} cases, less than half of them"


def _below_floors(tally: Tally) -> Iterator[str]:
    """A line if a run that a time budget was to end, and no number of cases, compared too little."""
    if tally.judged < LEAST_JUDGED:
        yield f"{tally.stopped} after {tally.judged} cases, and {LEAST_JUDGED} are the least: give it more time"
        return
    apply = [counts for counts in tally.invariants.values() if counts.checked or not counts.not_applicable]
    compared = [counts for counts in apply if counts.checked >= LEAST_EACH]
    if 2 * len(compared) < len(apply):
        yield (
            f"{tally.stopped} when {len(compared)} of {len(apply)} invariants that apply had compared something in "
            f"{LEAST_EACH} cases: give it more time"
        )


def _without_turn(tally: Tally) -> Iterator[str]:
    """A line if most of the invariants that apply had no turn in any case."""
    waiting = [name for name, counts in tally.invariants.items() if not counts.turns]
    apply = [name for name, counts in tally.invariants.items() if counts.turns > counts.not_applicable]
    if tally.cases and len(waiting) > len(apply):
        yield (
            f"{len(waiting)} of {len(waiting) + len(apply)} invariants that may apply had no turn in "
            f"{tally.cases} cases: give it more cases"
        )


def _excused_alone(tally: Tally) -> Iterator[str]:
    """A line for the invariants that met differences at ties between experts or columns, and no case without one."""
    names = [
        name
        for name, cases in sorted(tally.excused.items())
        if cases and tally.invariants[name].checked <= tally.excused_checked[name]
    ]
    if names:
        kinds = sorted({tie.kind for tie in tally.routing_ties if tie.invariant in names}, reverse=True)
        fields = " and ".join(f"`Scored.{SHOWN_BY[kind]}`" for kind in kinds)
        yield (
            f"{', '.join(names)}: ties between {' and '.join(kinds)} explain a difference in every case, and no case "
            f"agrees without; show the {' and '.join(kinds)} of each row ({fields}), or run in float32"
        )


def _never_revealed(tally: Tally) -> Iterator[str]:
    """Stages that the backend declares and that no trace holds."""
    hidden_stages = sorted(tally.declared - tally.revealed)
    if tally.traces and hidden_stages:
        words = ", ".join(Stage(stage).word for stage in hidden_stages)
        yield (
            f"{tally.backend} declares that it reveals {words}, and none of {tally.traces} traces holds "
            f"{'it' if len(hidden_stages) == 1 else 'them'}: declare what the traces hold"
        )
