"""Shards of a gate: what a merge reads of their journals, line by line.

No run need fit into memory. The counts of a shard that ended stand in a line of its journal (`Counted`): its verdicts
are passed over, but for those of cases that someone asks for. Of a shard that was cut off every verdict is read.
"""

import json
import re
from collections.abc import Iterator
from dataclasses import dataclass, replace
from functools import cached_property
from pathlib import Path
from typing import TypeVar

from specverify.campaign.messages import Ended
from specverify.fleet.facts import from_json
from specverify.fleet.journal import FILE, KINDS, VERSION, Head
from specverify.reference.files.regular import open_regular
from specverify.reports.format import cut
from specverify.setup.errors import UnusableInput

LINE = re.compile(rb'\{"run": ("(?:[^"\\]|\\.)*"), "place": (\d+), "(\w+)": ')
"""The beginning of a line, as a journal's writer writes it."""

CASE_ID = re.compile(rb'"id": "([0-9a-f]{12})"')
"""The id of the case of a verdict: the first id in its line."""

VERDICT, ENDED, COUNTED = "verdict", "ended", "counted"

DECIDING = {
    "version": "versions of specverify",
    "seeds": "seeds",
    "fresh": "seeds",
    "shards": "numbers of shards",
    "settings": "profiles or options",
}
"""The facts that the shards of one gate have in common, in words."""

Message = TypeVar("Message")


@dataclass(frozen=True)
class Line:
    """A line of a journal that holds a message.

    Attributes:
        number: Its number in the file, from 1.
        run: The name of the run.
        place: The place of the worker.
        kind: The key of the message, of `journal.KINDS`.
        text: The line.
    """

    number: int
    run: str
    place: int
    kind: str
    text: bytes

    def message(self) -> object:
        """The message; raises ValueError, KeyError or TypeError where the line holds none."""
        return from_json(KINDS[self.kind], json.loads(self.text)[self.kind])

    @property
    def case_id(self) -> str:
        """The id of the case of a verdict; raises ValueError where there is none."""
        case_id = CASE_ID.search(self.text)
        if case_id is None:
            raise ValueError("a verdict without the id of its case")
        return case_id[1].decode()


@dataclass(frozen=True)
class Outline:
    """A run of a shard in outline.

    Attributes:
        places: The number of places of workers.
        ended: The end of the run, or None if it was cut off.
        has_counts: Whether its counts follow its end.
    """

    places: int = 0
    ended: Ended | None = None
    has_counts: bool = False


@dataclass(frozen=True)
class Shard:
    """The journal of a shard: its file, and its head."""

    path: Path
    head: Head

    @property
    def name(self) -> str:
        """`2/4`: the number of the shard, and of how many."""
        return "/".join(map(str, self.head.shard))

    def lines(self) -> Iterator[Line]:
        """The lines behind the head; a part of a line, which a killed writer leaves, is passed over.

        Raises:
            UnusableInput: The file cannot be read, or a line is no line of a journal.
        """
        try:
            with open_regular(self.path) as file:
                for number, text in enumerate(file, 1):
                    text = text.rstrip(b"\n")
                    if number > 1 and text.startswith(b"{") and text.endswith(b"}"):
                        yield _line(self.path, number, text)
        except OSError as why:
            raise UnusableInput(f"{self.path}: {why.strerror or why}") from None

    @cached_property
    def outlines(self) -> dict[str, Outline]:
        """Every run in outline, by its name."""
        outlines: dict[str, Outline] = {}
        for line in self.lines():
            before = outlines.get(line.run, Outline())
            places = max(before.places, 1 + line.place)
            if line.kind == COUNTED:
                outlines[line.run] = replace(before, has_counts=before.ended is not None)
            elif line.kind == ENDED:
                outlines[line.run] = Outline(places, self.message(line, Ended))
            else:  # a run that went on has not ended there
                outlines[line.run] = Outline(places)
        return outlines

    def message(self, line: Line, kind: type[Message]) -> Message:
        """The message of a line, of a known kind.

        Raises:
            UnusableInput: The line is damaged.
        """
        try:
            message = line.message()
            if isinstance(message, kind):
                return message
            why = f"no {kind.__name__}"
        except (ValueError, KeyError, TypeError) as error:
            why = str(error)
        raise UnusableInput(f"{self.path}: line {line.number} is damaged: {cut(why, 160)}")


def _line(path: Path, number: int, text: bytes) -> Line:
    begin = LINE.match(text)
    if begin is None or begin[3].decode() not in KINDS:
        raise UnusableInput(f"{path}: line {number} is damaged: no run, place and message")
    return Line(number, json.loads(begin[1]), int(begin[2]), begin[3].decode(), text)


def open_shard(place: Path) -> Shard:
    """The shard whose journal is in the folder or file `place`.

    Raises:
        UnusableInput: There is none.
    """
    path = place / FILE if place.is_dir() else place
    try:
        with open_regular(path) as file:
            first = file.readline()
    except OSError as why:
        raise UnusableInput(f"{path}: no journal of a gate: {why.strerror or why}") from None
    if not first.strip():
        raise UnusableInput(f"{path}: empty; was the gate killed before its first case?")
    try:
        content = json.loads(first)
        if not isinstance(content, dict) or content.pop("journal", None) != VERSION:
            raise UnusableInput(f"{path}: no journal of version {VERSION}, the one known here")
        return Shard(path, from_json(Head, content))
    except (ValueError, KeyError, TypeError) as why:
        raise UnusableInput(f"{path}: line 1 is damaged: {cut(str(why), 160)}") from None


def common_head(shards: list[Shard]) -> Head:
    """The head that all shards share, as that of a whole run.

    Raises:
        UnusableInput: Two journals belong to different gates, or hold the same shard.
    """
    first = shards[0]
    shard_of_number: dict[int, Shard] = {}
    for shard in shards:
        number, count = shard.head.shard
        if number in shard_of_number:
            raise UnusableInput(f"{shard_of_number[number].path} and {shard.path} are both shard {number}/{count}")
        shard_of_number[number] = shard
        strange = next((name for name in DECIDING if _fact_of(shard.head, name) != _fact_of(first.head, name)), None)
        if strange is not None:
            raise UnusableInput(
                f"{first.path} and {shard.path} are parts of different gates: their {DECIDING[strange]} differ"
            )
    return replace(first.head, shard=(1, 1), slices=())


def _fact_of(head: Head, name: str) -> object:
    return head.shard[1] if name == "shards" else getattr(head, name)


def missing(shards: list[Shard]) -> list[str]:
    """Lines of complaint, one for each shard without a journal."""
    count, there = shards[0].head.shard[1], {shard.head.shard[0] for shard in shards}
    return [f"shard {number}/{count} is missing" for number in range(1, count + 1) if number not in there]


def common_end(shards: list[Shard], run: str) -> Ended:
    """The end that the run of that name has in all shards together; a shard that was cut off is an error of it."""
    ends: list[Ended] = []
    for shard in shards:
        outline = shard.outlines.get(run)
        if outline is None or outline.ended is None:
            why = f"shard {shard.name} was cut off" if outline is not None else f"shard {shard.name} did not run"
            ends.append(Ended(0.0, 0, (f"{why}: {cut(str(shard.path), 120)}",)))
        else:
            ends.append(outline.ended)
    return Ended(
        seconds=max(end.seconds for end in ends),
        wanted=sum(end.wanted for end in ends),
        errors=tuple(dict.fromkeys(error for end in ends for error in end.errors)),
        code=next((end.code for end in ends if end.code is not None), None),
        replaced=sum(end.replaced for end in ends),
        interrupted=next((end.interrupted for end in ends if end.interrupted is not None), None),
        late=any(end.late for end in ends),
        exhausted=any(end.exhausted for end in ends),
    )
