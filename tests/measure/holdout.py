"""The measure `holdout`: faults from patch files outside the repository, looked for by default draws.

The self-test plants faults that the draws were tuned on, so that its figures are those of a regression test. How soon
an unknown fault is found is measured by faults that nobody tuned on: each is a git diff against the engine. It is
applied to a copy of this checkout, and `diff` runs on the copy with its defaults. What this checkout itself fails on is
no find: the case of a finding is run once more without the patch.
"""

import json
import os
import re
import shutil
import subprocess
import sys
import tempfile
import time
from collections.abc import Callable, Sequence
from contextlib import suppress
from dataclasses import dataclass
from pathlib import Path
from statistics import median
from typing import Any

from specverify.reference.case import Case
from specverify.reference.case_json import case_from_json
from specverify.reports.bundle import save_case
from specverify.reports.case_diff import case_summary
from specverify.setup.errors import MissingInput
from tests.measure.child import run_child

ROOT = Path(__file__).resolve().parents[2]

ENGINE_FOLDER = "backends/"
"""The only folder that a patch may change: a fault is one of the engine, and not of its judge."""

NOT_ENGINE = ("backends/faults/", "backends/admission/", "backends/interception/", "backends/base.py")
"""What lies in that folder and is no engine: planted faults, checks of traces, records of draws, the contract."""

CHANGED_FILE = re.compile(r"^(?:\+\+\+|---) (?:[ab]/)?(\S+)", re.MULTILINE)
"""The names of files in a git diff."""


@dataclass(frozen=True)
class Hunted:
    """The outcome of one patch and one seed.

    Attributes:
        patch: The file's name without its ending.
        seed: The seed of the draws.
        outcome: `found`, `not found`, or `not judged`.
        case: Number of cases drawn up to the first one that differed; 0 where none did.
        invariant: The invariant that failed, or empty.
        stage: The stage that it named, or empty.
        shrunk: The shrunk case in words, or why nothing was judged.
        seconds: Wall time of the run.
    """

    patch: str
    seed: int
    outcome: str
    case: int
    invariant: str
    stage: str
    shrunk: str
    seconds: float

    @property
    def line(self) -> str:
        """The outcome in one line, as it is told while others are sought."""
        where = f" at case {self.case} by {self.invariant or 'the run as a whole'}" if self.case else f": {self.shrunk}"
        return f"{self.patch}, seed {self.seed}: {self.outcome}{where}"


def measure(
    patches: Sequence[Path],
    backend: str,
    cases: int,
    seeds: Sequence[int],
    tell: Callable[[str], None] = lambda line: None,
) -> dict[str, Any]:
    """Look for the fault of each patch with each seed; `tell` hears each outcome as soon as there is one.

    Ctrl-C ends the measure with the outcomes so far, and `unfinished` is true.

    Raises:
        MissingInput: A patch cannot be read, changes what is no engine, or does not apply.
    """
    for patch in patches:
        check_patch(patch)
    rows: list[Hunted] = []
    with suppress(KeyboardInterrupt):
        for patch in patches:
            with tempfile.TemporaryDirectory(prefix="specverify-holdout-") as folder:
                copy = Path(folder) / "checkout"
                copy_checkout(copy)
                apply_patch(patch, copy)
                for seed in seeds:
                    rows.append(hunt(patch.stem, copy, backend, cases, seed))
                    tell(rows[-1].line)
    is_cut = len(rows) < len(patches) * len(seeds)
    found_rows = [row for row in rows if row.outcome == "found"]
    return {
        "backend": backend,
        "cases": cases,
        "seeds": list(seeds),
        "hunts": len(rows),
        "found": len(found_rows),
        "median_case": median(row.case for row in found_rows) if found_rows else None,
        "rows": [vars(row) for row in rows],
        "unfinished": is_cut or any(row.outcome == "not judged" for row in rows),
    }


def check_patch(patch: Path) -> None:
    """Refuse a patch that changes anything but the engine.

    Raises:
        MissingInput: with the file that it may not change.
    """
    try:
        names = CHANGED_FILE.findall(patch.read_text())
    except (OSError, UnicodeDecodeError) as why:
        raise MissingInput(f"{patch}: cannot be read ({why})") from None
    changed = sorted({name for name in names if name != "/dev/null"})
    if not changed:
        raise MissingInput(f"{patch}: no git diff: it names no file")
    for name in changed:
        if not name.startswith(ENGINE_FOLDER) or name.startswith(NOT_ENGINE):
            raise MissingInput(f"{patch}: it changes {name}; a fault is planted in the engine alone ({ENGINE_FOLDER})")


def copy_checkout(copy: Path) -> None:
    """Copy the tracked files of this checkout, links as links.

    Raises:
        MissingInput: This is no git checkout.
    """
    listed = subprocess.run(["git", "ls-files", "-z"], cwd=ROOT, capture_output=True, check=False)
    if listed.returncode:
        raise MissingInput("holdout needs a git checkout, whose tracked files it copies")
    for name in filter(None, listed.stdout.decode().split("\0")):
        target = copy / name
        target.parent.mkdir(parents=True, exist_ok=True)
        shutil.copy2(ROOT / name, target, follow_symlinks=False)


def apply_patch(patch: Path, copy: Path) -> None:
    """Apply a patch to the copy.

    Raises:
        MissingInput: It does not apply; the line is git's own.
    """
    # Outside a repository `git apply` changes the files of the current folder.
    environment = {**os.environ, "GIT_CEILING_DIRECTORIES": str(copy.parent)}
    applied = subprocess.run(
        ["git", "apply", str(patch.resolve())], cwd=copy, env=environment, capture_output=True, text=True, check=False
    )
    if applied.returncode:
        raise MissingInput(f"{patch}: does not apply: {applied.stderr.strip().splitlines()[0]}")


def hunt(name: str, copy: Path, backend: str, cases: int, seed: int) -> Hunted:
    """Run `diff` of the copy with default draws in one worker, which ends at the first case that differs."""
    work = copy.parent / f"seed-{seed}"
    work.mkdir()
    command = [sys.executable, "-m", "specverify", "diff", "--backend", backend, "--cases", str(cases)]
    command += ["--seed", str(seed), "--jobs", "1", "--json", "run.json"]
    environment = {**os.environ, "PYTHONPATH": str(copy)}
    began = time.monotonic()
    ended = run_child(command, work, environment)
    seconds = time.monotonic() - began
    file = work / "run.json"
    if ended.returncode not in (0, 1) or not file.exists():
        why = (ended.stderr.strip().splitlines() or ["no output"])[-1]
        return Hunted(name, seed, "not judged", 0, "", "", f"exit code {ended.returncode}: {why}", seconds)
    run = json.loads(file.read_text())
    if ended.returncode == 0:
        return Hunted(name, seed, "not found", 0, "", "", f"{run['judged']} cases judged", seconds)
    if not run["findings"]:
        # A law, a share of ties or the exactness of the whole run differed: no case shows it by itself.
        why = run["excess_ties"] or run["excess_error"] or "the law of the whole run"
        return Hunted(name, seed, "found", run["cases"], "", "", why, seconds)
    finding = run["findings"][0]
    case = case_from_json(finding["case"])
    shrunk = case_summary(case)
    if not agrees_unchanged(case, backend, work):
        why = f"without the patch this checkout does not agree either, or not to the end: {shrunk}"
        return Hunted(name, seed, "not judged", 0, finding["invariant"], finding["stage"] or "", why, seconds)
    return Hunted(name, seed, "found", run["cases"], finding["invariant"], finding["stage"] or "", shrunk, seconds)


def agrees_unchanged(case: Case, backend: str, folder: Path) -> bool:
    """Whether this checkout, without a patch, is judged right on `case`; else a finding there says nothing of a patch.

    The case file and the results lie in `folder`.
    """
    file = folder / "case.json"
    save_case(file, case)
    command = [sys.executable, "-m", "specverify", "replay", str(file), "--backend", backend]
    return run_child(command, folder, {**os.environ, "PYTHONPATH": str(ROOT)}).returncode == 0
