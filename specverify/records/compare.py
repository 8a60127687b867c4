"""Two records side by side: tokens and paths, turn by turn, and times."""

from dataclasses import dataclass, field

from specverify.records.read import Fact, Key, Record, key_of

COMPARED = ("tokens", "paths", "nodes", "accepted")
"""The fields of a turn that must be equal: all but times, memory and counts of fallbacks."""


@dataclass
class Comparison:
    """The result of comparing two records.

    Attributes:
        same: Number of turns that are equal in COMPARED.
        differ: Each other turn of both, with the names of the fields that differ.
        only: Turns of the first record alone, and of the second.
        seconds: For each way of both, the seconds of the compared turns in the first record and in the second.
        settings: The options that differ, with their values in the two manifests.
    """

    same: int = 0
    differ: dict[Key, list[str]] = field(default_factory=dict)
    only: tuple[int, int] = (0, 0)
    seconds: dict[str, tuple[float, float]] = field(default_factory=dict)
    settings: dict[str, tuple[object, object]] = field(default_factory=dict)

    @property
    def exit_code(self) -> int:
        """0 where all that both have is equal, 1 where a turn differs, 3 where nothing could be compared."""
        return 1 if self.differ else 0 if self.same else 3


def compared(one: Record, other: Record) -> Comparison:
    """Compare the finished turns of two records by their keys."""
    mine, theirs = _keyed(one), _keyed(other)
    found = Comparison(only=(len(mine.keys() - theirs.keys()), len(theirs.keys() - mine.keys())))
    for key in (key for key in mine if key in theirs):
        left, right = mine[key], theirs[key]
        apart = [name for name in COMPARED if left.get(name) != right.get(name)]
        if apart:
            found.differ[key] = apart
        else:
            found.same += 1
        before = found.seconds.get(key[2], (0.0, 0.0))
        found.seconds[key[2]] = before[0] + left["seconds"], before[1] + right["seconds"]
    asked = one.manifest["asked"], other.manifest["asked"]
    for name in dict.fromkeys((*asked[0], *asked[1])):
        values = asked[0].get(name), asked[1].get(name)
        if values[0] != values[1]:
            found.settings[name] = values
    return found


def _keyed(record: Record) -> dict[Key, Fact]:
    return {key_of(turn): turn for turn in record.finished}
