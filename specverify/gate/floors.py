"""The floors of a profile: the least that a run must have compared."""

from fnmatch import fnmatchcase

from specverify.gate.profile import Floors
from specverify.properties.tally import Tally


def below_floors(tally: Tally, floors: Floors) -> list[str]:
    """Reasons why a run that agrees compared less than the profile asks; empty for one that compared enough."""
    if tally.outcome != "agree":
        return []
    checked = [name for name, counts in tally.invariants.items() if counts.checked]
    share = tally.judged / tally.cases if tally.cases else 0.0
    short = []
    if share < floors.judged:
        short.append(f"{tally.judged} of {tally.cases} cases were judged, below the floor of {floors.judged:g}")
    if len(checked) < floors.invariants:
        short.append(f"{len(checked)} invariants compared something, below the floor of {floors.invariants}")
    short += [
        f"no invariant that matches {glob} compared anything, and the profile's floor asks for one"
        for glob in floors.reached
        if not any(fnmatchcase(name, glob) for name in checked)
    ]
    return short
