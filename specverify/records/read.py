"""A run's record, each part checked as it is read against the shipped schema; two records compared."""

import json
from collections.abc import Hashable
from dataclasses import dataclass, field
from functools import cache
from importlib.resources import files
from pathlib import Path
from typing import Any

import jsonschema

from specverify.properties.paired_acceptance import (
    ALPHA,
    AcceptanceTest,
    AcceptCounts,
    compare_acceptance,
    counts_of_lengths,
)
from specverify.reference.case_json import Validator, dotted_path, shorten
from specverify.reference.files.regular import read_whole
from specverify.reference.malformed import Malformed
from specverify.setup.errors import UnusableInput

MANIFEST, TURNS, PROMPTS, FAILURES = "manifest.json", "turns.jsonl", "prompts.jsonl", "failures"
"""The names inside the folder of a record."""

VERSION = 1
"""Version of the format; a reader refuses others."""

BENCH, DIFF = "bench decode", "diff"
"""The kinds of run that write records."""

LARGEST = 1 << 31
"""The largest file that is read, in bytes."""

Fact = dict[str, Any]

Key = tuple[int | str, int, str, int, int]
"""Prompt or dialogue, repeat, way, turn of the dialogue, and size of the batch: each turn of a run has its own key."""


@dataclass
class Record:
    """A record as it was read.

    Attributes:
        folder: The folder.
        manifest: What ran.
        turns: The turns by their keys; of a turn that ran twice, the later one.
        prompts: Lines of finished prompts, by number.
        torn: Lines that a killed run left unfinished, and that were left out.
    """

    folder: Path
    manifest: Fact
    turns: dict[Key, Fact]
    prompts: dict[int, Fact]
    torn: int = 0

    @property
    def finished_turns(self) -> list[Fact]:
        """The turns of finished prompts, in order; for diff all turns."""
        if self.manifest["kind"] == DIFF:
            return list(self.turns.values())
        return [turn for (prompt, *_), turn in self.turns.items() if prompt in self.prompts]

    @property
    def shard(self) -> tuple[int, int]:
        """Rank and number of ranks; (0, 1) for a whole run."""
        rank, world = self.manifest.get("shard", (0, 1))
        return rank, world

    @property
    def unfinished_prompts(self) -> list[int]:
        """Numbers of the prompts that this shard still has to run."""
        rank, world = self.shard
        return [
            number for number in range(rank, len(self.manifest.get("prompts", ())), world) if number not in self.prompts
        ]


@cache
def schema() -> Fact:
    """The JSON Schema of records, as the package ships it."""
    content: Fact = json.loads((files("specverify.records") / "record.schema.json").read_text())
    return content


@cache
def _validator(part: str) -> Any:
    return Validator({"$defs": schema()["$defs"], "$ref": f"#/$defs/{part}"})


def key_of(turn: Fact) -> Key:
    """The key of a line of `turns.jsonl`."""
    return turn["prompt"], turn.get("repeat", 0), turn["way"], turn.get("place", 0), turn.get("batch", 0)


def check(part: str, fact: Any, where: str) -> None:
    """Refuse a fact that is no such part of a record.

    Args:
        part: The name of a definition of the schema: manifest, turn, prompt or failure.
        fact: The decoded JSON.
        where: The place, for the message.

    Raises:
        UnusableInput: in one line with the place, the field and what is wrong with it.
    """
    complaint = jsonschema.exceptions.best_match(_validator(part).iter_errors(fact))
    if complaint is not None:
        field = dotted_path(complaint.absolute_path)
        raise UnusableInput(f"{where}: {field + ': ' if field else ''}{shorten(complaint.message)}")


def read(folder: Path) -> Record:
    """The record in `folder`.

    Raises:
        UnusableInput: There is none, or a part of it is damaged; the line names the file, the line and the field.
    """
    path = folder / MANIFEST
    manifest = _read_json(_text(path), str(path))
    if isinstance(manifest, dict) and manifest.get("record") != VERSION:
        raise UnusableInput(f"{path}: no record of version {VERSION}, the one known here")
    check("manifest", manifest, str(path))
    turns, torn = _lines(folder / TURNS, "turn")
    prompts, also = _lines(folder / PROMPTS, "prompt")
    keyed = {key_of(turn): turn for turn in turns}
    return Record(folder, manifest, keyed, {line["prompt"]: line for line in prompts}, torn + also)


def _lines(path: Path, part: str) -> tuple[list[Fact], int]:
    """The lines of a file that may not be there, and the number of torn ones.

    A killed writer leaves a line without its end. The next writer begins a line of its own, so that a torn line may
    stand in the middle too.
    """
    if not path.exists():
        return [], 0
    facts = []
    torn = 0
    for number, line in enumerate(_text(path).split("\n"), 1):
        if not line:
            continue
        try:
            fact = json.loads(line)
        except ValueError:
            if line.startswith("{") and not line.endswith("}"):
                torn += 1
                continue
            raise UnusableInput(f"{path}:{number}: no JSON object") from None
        check(part, fact, f"{path}:{number}")
        facts.append(fact)
    return facts, torn


def _text(path: Path) -> str:
    try:
        # A torn last line may end inside a character.
        return read_whole(path, LARGEST).decode("utf-8", "replace")
    except (OSError, Malformed) as why:
        raise UnusableInput(f"{path}: no record of a run: {getattr(why, 'strerror', None) or why}") from None


def _read_json(text: str, where: str) -> Any:
    try:
        return json.loads(text)
    except (ValueError, RecursionError) as why:
        raise UnusableInput(f"{where}: not JSON ({shorten(str(why))})") from None


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
        acceptance: For each way of both that drafts, the test of its accepted tokens by position.
        is_same_run: Whether model, drafts, prompts and seeds of the two manifests are the same.
    """

    same: int = 0
    differ: dict[Key, list[str]] = field(default_factory=dict)
    only: tuple[int, int] = (0, 0)
    seconds: dict[str, tuple[float, float]] = field(default_factory=dict)
    settings: dict[str, tuple[object, object]] = field(default_factory=dict)
    acceptance: dict[str, AcceptanceTest] = field(default_factory=dict)
    is_same_run: bool = False

    @property
    def exit_code(self) -> int:
        """0 where all that both have is equal, 1 where a turn differs, 3 where nothing could be compared."""
        return 1 if self.differ else 0 if self.same else 3


def compare_records(first: Record, second: Record, alpha: float = ALPHA) -> Comparison:
    """Compare the finished turns of two records by their keys, and accepted tokens at the error rate `alpha`.

    Where each record has batches of one size, a turn is compared with that of the same prompt whatever the size.
    """
    first_turns, second_turns = _turns_by_key(first), _turns_by_key(second)
    if len(_batches(first_turns)) == len(_batches(second_turns)) == 1:
        first_turns, second_turns = (
            {(*key[:4], 0): turn for key, turn in turns.items()} for turns in (first_turns, second_turns)
        )
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

    counts = [_accept_counts(turns) for turns in (first_turns, second_turns)]
    ways = [way for way in counts[0] if way in counts[1]]
    comparison.acceptance = {
        # One error rate for all ways together.
        way: compare_acceptance(counts[0][way], counts[1][way], alpha / len(ways))
        for way in ways
    }
    comparison.is_same_run = all(
        first.manifest.get(name) == second.manifest.get(name) for name in ("model", "drafts", "prompts", "seed")
    )
    return comparison


def _batches(turns: dict[Key, Fact]) -> set[int]:
    """The sizes of the batches."""
    return {key[4] for key in turns}


def _accept_counts(turns: dict[Key, Fact]) -> dict[str, dict[Hashable, AcceptCounts]]:
    """For each way that drafts, the counts of each prompt over all of its rounds and turns."""
    lengths: dict[str, dict[Hashable, list[int]]] = {}
    for (prompt, _, way, *_), turn in turns.items():
        if any(turn.get("nodes", ())):
            lengths.setdefault(way, {}).setdefault(prompt, []).extend(turn.get("accepted", ()))
    return {
        way: {prompt: counts_of_lengths(accepted) for prompt, accepted in prompts.items()}
        for way, prompts in lengths.items()
    }


def _turns_by_key(record: Record) -> dict[Key, Fact]:
    return {key_of(turn): turn for turn in record.finished_turns}
