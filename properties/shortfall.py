"""Shortfall: why a run without a difference is no pass.

Too little of what the run was asked for was compared.
"""

from collections.abc import Iterator

from properties.speculation import by_own_count
from properties.tally import Tally
from reference.trace import Stage

DECLINED_FLOOR = 0.5
"""Largest share of the cases that a backend may decline."""

LEAST_JUDGED = 10
"""Number of cases that a run must have judged when a time budget ends it, or all cases where fewer were asked for."""


def shortfalls(tally: Tally) -> list[str]:
    """Every reason why `tally` is no pass, one line each; empty for a run that compared enough."""
    # A backend that never opened is an error of its own, which the campaign records.
    if not tally.opened:
        return []
    speculated = tally.speculation.untested() if by_own_count(tally.declared) else None
    found = (*_missing(tally), *_declined(tally), *_cut_short(tally), *_never_revealed(tally))
    found += () if speculated is None else (speculated,)
    found += tuple(_excused_alone(tally))
    return list(found)


def _missing(tally: Tally) -> Iterator[str]:
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


def _declined(tally: Tally) -> Iterator[str]:
    declined = sum(tally.unsupported.values())
    if declined > DECLINED_FLOOR * tally.cases:
        said = f"(most often: {_most_often(tally)}): what is left is no run"
        yield f"{declined} of {tally.cases} cases were declined {said}"
    elif tally.cases - declined - tally.judged > DECLINED_FLOOR * tally.cases:
        silent = tally.cases - declined - tally.judged
        yield f"no invariant could be judged in {silent} of {tally.cases} cases: the traces reveal too little"


def _most_often(tally: Tally) -> str:
    """The reason for which most of the declined cases were declined."""
    return max(tally.unsupported.items(), key=lambda item: item[1])[0]


def _cut_short(tally: Tally) -> Iterator[str]:
    """A line if a time budget ended the run before enough cases, or before half of the invariants had their turn."""
    if tally.stopped is None or not tally.stopped.startswith("time budget"):
        return
    if tally.judged < min(LEAST_JUDGED, tally.wanted):
        yield f"{tally.stopped} after {tally.judged} of {tally.wanted} cases: give it more time"
        return
    unasked = [name for name, counts in tally.invariants.items() if not counts.checked and not counts.unobserved]
    if 2 * len(unasked) > len(tally.invariants):
        yield f"{tally.stopped} before {len(unasked)} of {len(tally.invariants)} invariants had their turn"


def _excused_alone(tally: Tally) -> Iterator[str]:
    """A line for the invariants that met differences at ties between experts, and no case without one."""
    names = [
        name
        for name, cases in sorted(tally.excused.items())
        if cases and tally.invariants[name].checked <= tally.excused_checked[name]
    ]
    if names:
        yield (
            f"{', '.join(names)}: ties between experts explain a difference in every case, and no case agrees without; "
            "show the experts of each row (`Scored.routed`), or run in float32"
        )


def _never_revealed(tally: Tally) -> Iterator[str]:
    """Stages that the backend declares and that no trace holds."""
    never = sorted(tally.declared - tally.revealed)
    if tally.traces and never:
        words = ", ".join(Stage(one).word for one in never)
        yield (
            f"{tally.backend} declares that it reveals {words}, and none of {tally.traces} traces holds "
            f"{'it' if len(never) == 1 else 'them'}: declare what the traces hold"
        )
