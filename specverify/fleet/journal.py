"""The journal of a gate: JSON lines from which its reports can be made again.

The journals of several shards make the reports of the whole. Each line is written when its message arrives, so that a
killed gate keeps all that was judged.
"""

import json
from collections.abc import Iterator
from dataclasses import dataclass, field, is_dataclass, replace
from pathlib import Path
from typing import Any

import numpy as np

from specverify.campaign.messages import Broken, Done, Ended, Found, Located, Opened, Passed, Trouble
from specverify.fleet.facts import from_json, to_json
from specverify.properties.residue import Residue
from specverify.properties.tally import Failure, Tally
from specverify.properties.verdict.finding import Verdict
from specverify.reference.files.regular import read_whole
from specverify.reference.malformed import Malformed
from specverify.reference.trace import Step, Trace
from specverify.reports.format import cut
from specverify.reports.record import Lines
from specverify.setup.errors import UnusableInput

FILE = "journal.jsonl"
"""The file of a report folder."""

VERSION = 2
"""The version of the format; a reader refuses others."""

LARGEST = 1 << 31
"""The largest file that is read, in bytes."""


@dataclass(frozen=True)
class Counted:
    """The counts of a run that has ended: a merge takes them in place of the run's verdicts.

    Attributes:
        tally: What the run's verdicts add up to (`Tally.counted`).
        met: The pairs that its cases had, as bits in hexadecimal digits; empty where no pairs are counted.
    """

    tally: Tally
    met: str = ""


def counted(tally: Tally) -> Counted:
    """The message that stands for the verdicts of a run."""
    return Counted(tally.counted(), "" if tally.pairs is None else f"{tally.pairs.met:x}")


KINDS: dict[str, type] = {
    "opened": Opened,
    "verdict": Verdict,
    "found": Found,
    "located": Located,
    "passed": Passed,
    "trouble": Trouble,
    "residue": Residue,
    "broken": Broken,
    "done": Done,
    "ended": Ended,
    "counted": Counted,
}
"""The messages that a journal keeps, by the key of their lines."""

GATE = ""
"""The run of the line that ends the whole gate."""

MOST_ENTRIES = 20_000
"""Most entries of the arrays of a step that a journal keeps whole; a page draws small cases."""

NAMES = {kind: name for name, kind in KINDS.items()}


@dataclass(frozen=True)
class Head:
    """The first line: what the gate was to judge.

    Attributes:
        version: Version of specverify.
        seeds: Seeds of the draws.
        fresh: The new one of them, or None.
        shard: The number of the shard, from 1, and the number of shards.
        settings: Digest of all else that decides on the cases.
        slices: For each run its slices on a cluster; empty on one machine.
        saved: Ids of the saved cases for every backend: a memory may have grown when a killed gate goes on.
    """

    version: str
    seeds: tuple[int, ...]
    fresh: int | None
    shard: tuple[int, int]
    settings: str
    slices: tuple[int, ...] = ()
    saved: tuple[str, ...] = field(default=(), compare=False)


@dataclass
class RunMessages:
    """The messages of one run, on one backend and one model.

    Attributes:
        messages: Place and message, in the order of their arrival.
        ended: The end of the run, or None if it was cut off.
    """

    messages: list[tuple[int, object]] = field(default_factory=list)
    ended: Ended | None = None

    @property
    def verdicts(self) -> list[Verdict]:
        """The verdicts among the messages."""
        return [message for _, message in self.messages if isinstance(message, Verdict)]


class Writer:
    """Writes a journal.

    Args:
        folder: The folder of reports.
        head: The first line.
        goes_on: Whether the lines that are there stay, and new ones follow them.

    Raises:
        Unwritable: The system refuses.
    """

    def __init__(self, folder: Path, head: Head, goes_on: bool = False) -> None:
        path = folder / FILE
        if not goes_on:
            path.unlink(missing_ok=True)
        self._lines = Lines(path)
        self._lines.__enter__()
        if not goes_on:
            self._lines.append({"journal": VERSION, **to_json(head)})

    def add(self, run: str, place: int, message: object) -> None:
        """Append a message of the worker at `place`; messages of other kinds than KINDS are passed over."""
        name = NAMES.get(type(message))
        if name is not None:
            self._lines.append({"run": run, "place": place, name: to_json(_bound(message))})

    def close(self) -> None:
        """Close the file."""
        self._lines.__exit__(None, None, None)


@dataclass(frozen=True)
class Journal:
    """A journal that was read: its head, and the messages of each run, by the run's name."""

    path: Path
    head: Head
    runs: dict[str, RunMessages]


def read(place: Path) -> Journal:
    """The journal in the folder or file `place`; a last line that was cut off is left out.

    Raises:
        UnusableInput: There is none, or a line is no line of a journal.
    """
    path = place / FILE if place.is_dir() else place
    try:
        text = read_whole(path, LARGEST).decode()
    except (OSError, Malformed, UnicodeDecodeError) as why:
        raise UnusableInput(f"{path}: no journal of a gate: {getattr(why, 'strerror', None) or why}") from None
    lines = [line for line in _whole_lines(text) if line.strip()]
    if not lines:
        raise UnusableInput(f"{path}: empty; was the gate killed before its first case?")
    number = 1
    try:
        first = json.loads(lines[0])
        if not isinstance(first, dict) or first.pop("journal", None) != VERSION:
            raise UnusableInput(f"{path}: no journal of version {VERSION}, the one known here")
        head = from_json(Head, first)
        runs = dict[str, RunMessages]()
        for line in lines[1:]:
            number += 1
            _take(runs, json.loads(line))
    except (ValueError, KeyError, TypeError) as why:
        raise UnusableInput(f"{path}: line {number} is damaged: {cut(str(why), 160)}") from None
    return Journal(path, head, runs)


def killed_journal(folder: Path) -> Journal | None:
    """The journal of a gate in `folder` that was killed, or None."""
    try:
        journal = read(folder)
    except UnusableInput:  # none was written, or nothing in it can be used
        return None
    over = journal.runs.get(GATE)
    return None if over is not None and over.ended is not None else journal


def _whole_lines(text: str) -> Iterator[str]:
    """The lines that end; a killed writer leaves a part of one, which may stand in the middle if it went on later."""
    *ended_lines, last = text.split("\n")
    for line in ended_lines:
        if line.startswith("{") and line.endswith("}"):
            yield line
    if last.startswith("{") and last.endswith("}"):
        yield last


def _take(runs: dict[str, RunMessages], line: dict[str, Any]) -> None:
    """Add the message of one line to its run."""
    run, place = runs.setdefault(line.pop("run"), RunMessages()), line.pop("place")
    ((name, content),) = line.items()
    message: object = from_json(KINDS[name], content)
    if isinstance(message, Ended):
        run.ended = message
    elif not isinstance(message, Counted):
        run.ended = None  # a run that went on has not ended there
        run.messages.append((place, message))


def _bound(message: object) -> object:
    """The message with no more of a failure's trace than pages draw."""
    if isinstance(message, (Found, Located)):
        return replace(message, failure=_bound_failure(message.failure))
    return message


def _bound_failure(failure: Failure) -> Failure:
    """The failure with hidden states, logits and caches of one step at most: the one of its finding."""
    trace = failure.verdict.trace
    if trace is None:
        return failure
    step, request = failure.finding.step, failure.finding.where.get("request", 0)
    light, shared = _lighten_trace(trace, -1 if request else step), trace.shared
    if request and shared is not None:  # pages draw the tree of the finding's request
        every = [
            _lighten_trace(trace_of_request, step) if trace_of_request and number == request else None
            for number, trace_of_request in enumerate(shared.requests)
        ]
        light = replace(light, shared=replace(shared, requests=tuple(every)))
    return replace(failure, verdict=replace(failure.verdict, trace=light))


def _lighten_trace(trace: Trace, step_number: int) -> Trace:
    """The trace with hidden states, logits and caches of step `step_number` alone, and of no other request."""
    steps = tuple(
        step if number == step_number and _entries(step) <= MOST_ENTRIES else _lighten_step(step)
        for number, step in enumerate(trace.steps)
    )
    return Trace(steps, trace.output, trace.finish, trace.accounting, fallbacks=trace.fallbacks)


def _entries(value: Any) -> int:
    """The number of entries of all arrays inside a step."""
    if isinstance(value, np.ndarray):
        return value.size
    if isinstance(value, tuple):
        return sum(map(_entries, value))
    return sum(map(_entries, vars(value).values())) if is_dataclass(value) else 0


def _lighten_step(step: Step) -> Step:
    """A step without hidden states, logits and caches."""
    committed, drafted = step.committed, step.drafted
    if committed is not None:
        committed = replace(committed, before=None, verified=None, after=None, draft=None)
    if drafted is not None:
        drafted = replace(drafted, logits=None, proposal=None, given=None)
    return replace(step, drafted=drafted, attended=None, scored=None, committed=committed)
