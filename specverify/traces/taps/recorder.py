"""The file of a tap: whole runs, each appended at once, by any number of processes."""

import fcntl
import json
import os
import zlib
from collections import Counter
from collections.abc import Sequence
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any

VARIABLE = "SPECVERIFY_TAP"
"""The environment variable that tells a process what to record: TapSettings as JSON."""

LEFT_OUT = ".left-out"
"""The ending of the file beside the trace with a line for each request that was not recorded: the reason."""

UNWRITABLE = {float("inf"): "Infinity", float("-inf"): "-Infinity"}
"""Numbers that JSON does not have, in the words of the format; NaN is null."""


@dataclass(frozen=True)
class TapSettings:
    """What a tap records.

    Attributes:
        engine: The engine, one of `specverify.traces.taps.tapping.ENGINES`.
        file: The path of the trace, which is appended to.
        stages: Whether the target's logits and the proposals of drafts are written, beside tokens, trees and paths.
        share: The share of the requests that is recorded, chosen by their ids.
    """

    engine: str
    file: str
    stages: bool = False
    share: float = 1.0

    def takes(self, name: str) -> bool:
        """Whether the request of this name is recorded; every process answers alike."""
        return zlib.crc32(name.encode()) < self.share * 2**32

    def to_environment(self) -> str:
        """The value of VARIABLE."""
        return json.dumps(vars(self))


def settings_in_environment() -> TapSettings | None:
    """The settings that this process has inherited, or None."""
    text = os.environ.get(VARIABLE)
    return None if text is None else TapSettings(**json.loads(text))


@dataclass
class RecordedRequest:
    """A request that runs: its line `run` and the lines of its steps so far.

    Attributes:
        run: The content of the line `run`.
        tokens: The prompt and all tokens so far.
        steps: The content of each line `step`.
        counts: Drafted and accepted tokens of each step.
    """

    run: dict[str, Any]
    tokens: list[int]
    steps: list[dict[str, Any]] = field(default_factory=list)
    counts: list[tuple[int, int]] = field(default_factory=list)

    def add(
        self,
        emitted: Sequence[int],
        drafted: Sequence[int] | None,
        chosen: Sequence[int] | None,
        stages: dict[str, Any],
    ) -> None:
        """Add a step.

        Args:
            emitted: The tokens that it added to the text.
            drafted: The drafted chain; None where it was not seen.
            chosen: The accepted tokens and the one behind them, before any stop; None where they were not seen.
            stages: Further fields by their paths, such as `scored.logits`.
        """
        step: dict[str, Any] = {}
        if drafted is not None:
            nodes = 1 + len(drafted)
            parents = [max(0, node - 1) for node in range(nodes)]
            step["drafted"] = {"tree": {"parent": parents, "token": [self.tokens[-1], *drafted]}}
            if chosen:
                step["accepted"] = {"path": list(range(len(chosen))), "bonus": chosen[-1]}
                self.counts.append((len(drafted), len(chosen) - 1))
        step["emitted"] = {"tokens": list(emitted)}
        for path, value in stages.items():
            stage, _, name = path.partition(".")
            if value is not None and (stage != "drafted" or stage in step):
                step.setdefault(stage, {})[name] = value
        self.steps.append(step)
        self.tokens += emitted

    def lines(self, finish: str) -> list[dict[str, Any]]:
        """All lines of the run, with its end.

        Counts are those of verifications: steps with drafted tokens. They are left out where a step was not seen.
        """
        end: dict[str, Any] = {"finish": finish}
        return [{"run": self.run}, *({"step": step} for step in self.steps), {"end": end}]


class Recorder:
    """What is recorded in this process.

    Attributes:
        settings: What is recorded.
        runs: Runs that this process wrote.
        left_out: Requests of this process that were not recorded, by reason.
    """

    def __init__(self, settings: TapSettings) -> None:
        self.settings = settings
        self.runs = 0
        self.left_out: Counter[str] = Counter()

    def write(self, request: RecordedRequest, finish: str) -> None:
        """Append a run that has ended; `finish` is eos, stop or length."""
        lines = (json.dumps(line, separators=(",", ":"), allow_nan=False) for line in request.lines(finish))
        self._append(self.settings.file, "".join(line + "\n" for line in lines))
        self.runs += 1

    def leave_out(self, reason: str) -> None:
        """Note a request that is not recorded, with the reason in a few words."""
        self.left_out[reason] += 1
        self._append(self.settings.file + LEFT_OUT, reason + "\n")

    def _append(self, file: str, text: str) -> None:
        with Path(file).open("a") as stream:
            fcntl.flock(stream, fcntl.LOCK_EX)
            stream.write(text)


def rows_of(tensor: Any) -> list[list[Any]]:
    """A tensor [rows, columns] as lists of the format."""
    rows: list[list[Any]] = tensor.detach().to(device="cpu").double().tolist()
    if tensor.isfinite().all():
        return rows
    return [[None if number != number else UNWRITABLE.get(number, number) for number in row] for row in rows]


def one_hot_rows(tokens: Sequence[int], vocabulary: int) -> list[list[float]]:
    """The proposals of tokens that were drafted for sure: a row for the root, which is not used, and one for each."""
    rows = [[0.0] * vocabulary for _ in range(1 + len(tokens))]
    for row, token in zip(rows[1:], tokens, strict=True):
        row[token] = 1.0
    return rows
