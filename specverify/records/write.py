"""Writing of a run's record: a manifest, lines, and dumps of failures.

A line is on the disk when its call returns. The dump of a failure holds the step that went wrong: its tree, drafted
and lowered.
"""

import hashlib
import json
from datetime import datetime, timezone
from pathlib import Path
from types import TracebackType
from typing import Any

from specverify.records.read import FAILURES, MANIFEST, PROMPTS, TURNS, VERSION, Fact, Record, check, read
from specverify.reference.trace import Lowered, Step
from specverify.reports import writing
from specverify.reports.record import Lines
from specverify.setup.environment import environment
from specverify.setup.errors import UnusableInput
from specverify.setup.files import make_folder


def digest_of(content: Any) -> str:
    """The first 16 hex digits of the SHA-256 of a fact as JSON."""
    text = json.dumps(writing.jsonable(content), sort_keys=True)
    return hashlib.sha256(text.encode()).hexdigest()[:16]


def manifest_of(kind: str, options: Fact, deciding: Fact, **facts: Any) -> Fact:
    """A manifest.

    Args:
        kind: `specverify.records.read.BENCH` or `DIFF`.
        options: The options of the command.
        deciding: All that decides on the turns beside `options`, such as digests of weights.
        facts: Further fields of the schema.
    """
    versions = environment()
    deciding_options = {name: value for name, value in options.items() if name not in ("seed",) or kind != "diff"}
    settings = digest_of([kind, deciding_options, deciding, versions["specverify"]])
    head = {"record": VERSION, "kind": kind, "settings": settings}
    start = {
        "started": datetime.now(timezone.utc).isoformat(timespec="seconds"),
        "environment": versions,
        "asked": options,
    }
    manifest: Fact = writing.jsonable({**head, **start, **facts})
    check("manifest", manifest, MANIFEST)
    return manifest


class Writer:
    """Writes the record of a run into a folder, after the lines of the same run that are there already.

    Args:
        folder: The folder; it is made.
        manifest: What runs.

    Attributes:
        before: The record that was there; empty for a new run.

    Raises:
        UnusableInput: The folder holds the record of another run.
        Unwritable: The system refuses.
    """

    def __init__(self, folder: Path, manifest: Fact) -> None:
        self.folder = folder
        make_folder(folder)
        if (folder / MANIFEST).exists():
            self.before = read(folder)
            _check_same(self.before, manifest)
        elif (folder / TURNS).exists() or (folder / PROMPTS).exists():
            raise UnusableInput(f"{folder}: holds turns without a manifest; choose another folder")
        else:
            self.before = Record(folder, manifest, {}, {})
            writing.write_json(folder / MANIFEST, manifest)
        self._turns = Lines(folder / TURNS, durable=True)
        self._prompts = Lines(folder / PROMPTS, durable=True)

    def __enter__(self) -> "Writer":
        self._turns.__enter__()
        self._prompts.__enter__()
        return self

    def __exit__(
        self, kind: type[BaseException] | None, error: BaseException | None, trace: TracebackType | None
    ) -> None:
        self._turns.__exit__(kind, error, trace)
        self._prompts.__exit__(kind, error, trace)

    def turn(self, fact: Fact) -> None:
        """Append a turn; it is on the disk when this returns."""
        self._turns.append(fact)

    def prompt(self, fact: Fact) -> None:
        """Append that a prompt is finished; all of its turns have been appended."""
        self._prompts.append(fact)

    def failure(self, name: str, fact: Fact) -> Path:
        """Write a dump whole into the folder of failures."""
        folder = self.folder / FAILURES
        make_folder(folder)
        path = folder / f"{name}.json"
        writing.write_json(path, {**fact, "environment": {**environment(), **fact.get("environment", {})}})
        return path


def _check_same(before: Record, manifest: Fact) -> None:
    old = before.manifest
    if (old["kind"], old["settings"]) == (manifest["kind"], manifest["settings"]):
        return
    options = writing.jsonable(manifest["asked"])
    names = [name for name in options if old["asked"].get(name) != options[name]]
    what = f"its {names[0]} differs" if names else "its kind, weights, prompts or version differ"
    raise UnusableInput(f"{before.folder}: holds the record of another run ({what}); choose another folder")


def step_fact(step: Step) -> Fact:
    """The drafted tree, the lowered tree and the accepted path of a step; None where the step does not show them.

    Layers with one reach share a mask: `visible` holds each mask once. Arrays of more than
    `specverify.reports.writing.LARGEST_ARRAY` entries are described when they are written.
    """
    drafted, lowered, accepted = step.drafted, step.lowered, step.accepted
    return {
        "tree": None if drafted is None else {"parent": drafted.tree.parent, "token": drafted.tree.token},
        "lowered": None if lowered is None else _lowered_fact(lowered),
        "path": None if accepted is None else accepted.path,
    }


def _lowered_fact(lowered: Lowered) -> Fact:
    fact: Fact = {name: getattr(lowered, name) for name in lowered.array_names}
    if lowered.visible is not None:
        fact["visible"] = list({id(mask): mask for mask in lowered.visible}.values())
    return fact
