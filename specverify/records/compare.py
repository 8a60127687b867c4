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


def compare_records(first: Record, second: Record) -> Comparison:
    """Compare the finished turns of two records by their keys."""
    first_turns, second_turns = _turns_by_key(first), _turns_by_key(second)
    comparison = Comparison(
        only=(len(first_turns.keys() - second_turns.keys()), len(second_turns.keys() - first_turns.keys()))
    )
    for key in (key for key in first_turns if key in second_turns):
        first_turn, second_turn = first_turns[key], second_turns[key]
        apart = [name for name in COMPARED if first_turn.get(name) != second_turn.get(name)]
        if apart:
            comparison.differ[key] = apart
        else:
            comparison.same += 1
        before = comparison.seconds.get(key[2], (0.0, 0.0))
        comparison.seconds[key[2]] = before[0] + first_turn["seconds"], before[1] + second_turn["seconds"]
    first_options = first.manifest["asked"]
    second_options = second.manifest["asked"]
    for name in dict.fromkeys((*first_options, *second_options)):
        values = first_options.get(name), second_options.get(name)
        if values[0] != values[1]:
            comparison.settings[name] = values
    return comparison


def _turns_by_key(record: Record) -> dict[Key, Fact]:
    return {key_of(turn): turn for turn in record.finished_turns}
