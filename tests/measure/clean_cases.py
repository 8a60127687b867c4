"""The measure `clean`: default cases of the right engine, judged over days and machines into one record.

The engine is ours and no fault is planted, so that each finding is a false alarm, or a fault of the engine that nobody
knew. The record is a file of JSON: one row for each slice, which is one run of `diff` with a seed that no row has. A
slice is written when it ends; one that is interrupted has the cases that it judged until then.
"""

import json
import secrets
import subprocess
import sys
import tempfile
from collections.abc import Callable, Iterator, Sequence
from dataclasses import asdict, dataclass, fields
from datetime import datetime, timezone
from pathlib import Path
from typing import Any

from scipy.stats import beta

from specverify.backends.registry import why_absent
from specverify.backends.shipped import ROWS
from specverify.reports.format import plural
from specverify.reports.writing import write_whole
from specverify.setup.errors import MissingInput
from tests.measure.child import run_child

ROOT = Path(__file__).resolve().parents[2]

RECORD = ROOT / "tests" / "clean_cases.json"
"""The project's own record."""

SLICE = 500
"""Cases of a slice at most: those of a default run, which draws its later cases for what its earlier ones lack.

They are minutes of work, which is what a kill loses.
"""

INTERRUPTED = "interrupted after "
"""How the line begins with which `diff` tells Ctrl-C."""

CONFIDENCE = 0.95
"""With this confidence the rate of findings lies below the bound (Clopper and Pearson 1934, one-sided)."""


@dataclass(frozen=True)
class Slice:
    """A run of `diff` on clean cases.

    Attributes:
        day: The day in UTC, as 2026-11-28.
        commit: The commit that was judged; its checkout had no changes.
        backend: The name of the backend.
        seed: The seed of the draws.
        cases: Cases that were judged to their end.
        findings: The case and the invariant of each finding.
        unfinished: What broke in the run, or empty. A run that was interrupted has judged the cases that it counts.
        seconds: Wall time of the run.
    """

    day: str
    commit: str
    backend: str
    seed: int
    cases: int
    findings: tuple[str, ...]
    unfinished: str
    seconds: float


class InterruptedSlice(KeyboardInterrupt):
    """An interrupt came while a slice was judged; `row` has the cases that were judged until then."""

    def __init__(self, row: Slice) -> None:
        super().__init__()
        self.row = row


def own_backends() -> tuple[str, ...]:
    """The backends of this project that run on the CPU here, emulated and interpreted ones too."""
    return tuple(row.name for row in ROWS if row.device == "cpu" and why_absent(row.name) is None)


def read_record(file: Path) -> list[Slice]:
    """The slices of a record; an absent file has none.

    Raises:
        MissingInput: The file is no record.
    """
    if not file.exists():
        return []
    try:
        return [_slice_of(row) for row in json.loads(file.read_text())["slices"]]
    except (OSError, ValueError, KeyError, TypeError) as why:
        raise MissingInput(f"{file}: no record of clean cases ({type(why).__name__}: {why})") from None


def _slice_of(row: dict[str, Any]) -> Slice:
    if {*row} != {field.name for field in fields(Slice)}:
        raise ValueError(f"a row has the fields {', '.join(row)}")
    return Slice(**(row | {"findings": tuple(row["findings"])}))


def progress(slices: Sequence[Slice], row: Slice) -> str:
    """The line after a slice: what it judged, and what the record has."""
    found = plural(len(row.findings), "finding") if row.findings else "no finding"
    total = sum(each.cases for each in slices)
    return f"{row.backend}, seed {row.seed}: {plural(row.cases, 'case')}, {found}; {total} in the record"


def write_record(file: Path, slices: Sequence[Slice]) -> None:
    """Write the slices, one a line, so that records of two branches merge line by line."""
    rows = ",\n".join(json.dumps(asdict(row)) for row in slices)
    write_whole(file, f'{{"slices": [\n{rows}\n]}}\n'.encode())


def merge(slices: Sequence[Slice], others: Sequence[Slice]) -> list[Slice]:
    """Both records' slices; a slice that both have, by backend and seed, counts once."""
    known = {(row.backend, row.seed) for row in slices}
    return [*slices, *(row for row in others if (row.backend, row.seed) not in known)]


def slice_of_result(file: Path) -> Slice:
    """The slice of a run that `diff --keep-going --json FILE` made of this checkout with its defaults.

    Raises:
        MissingInput: The file is no such result, or a fault was planted in its engine.
    """
    try:
        result = json.loads(file.read_text())
        if "fault" in result["environment"]:
            raise MissingInput(
                f"{file}: the fault {result['environment']['fault']} was planted; its cases are not clean"
            )
        written = datetime.fromtimestamp(file.stat().st_mtime, timezone.utc)
        return _slice(result["backend"], int(result["environment"]["seed"]), result, written)
    except (OSError, ValueError, KeyError, TypeError) as why:
        raise MissingInput(f"{file}: no result of diff --json ({type(why).__name__}: {why})") from None


def _slice(backend: str, seed: int, result: dict[str, Any], written: datetime) -> Slice:
    findings = tuple(f"{finding['case']['id']} {finding['invariant']}" for finding in result["findings"])
    return Slice(
        day=written.date().isoformat(),
        commit=clean_commit(),
        backend=backend,
        seed=seed,
        cases=result["judged"],
        findings=findings,
        unfinished="; ".join(error for error in result["errors"] if not error.startswith(INTERRUPTED)),
        seconds=round(result["seconds"], 1),
    )


def clean_commit() -> str:
    """The short hash of the commit of this checkout.

    Raises:
        MissingInput: Files of the checkout were changed: no commit stands for what is judged.
    """
    changed = _git("status", "--porcelain", "--untracked-files=no", "--", ".", f":!{RECORD.relative_to(ROOT)}")
    if changed:
        raise MissingInput(f"clean cases are those of a commit, and {changed.split()[-1]} was changed; commit it first")
    return _git("rev-parse", "--short", "HEAD")


def _git(*words: str) -> str:
    ended = subprocess.run(["git", *words], cwd=ROOT, capture_output=True, text=True, check=False)
    if ended.returncode:
        raise MissingInput(f"clean needs a git checkout: {ended.stderr.strip()}")
    return ended.stdout.strip()


def judge_slices(
    slices: Sequence[Slice], cases: int, backends: Sequence[str], jobs: int, judge: Callable[..., Slice]
) -> Iterator[Slice]:
    """Judge slices until the record has `cases` cases; the next backend is the one on which least time was spent."""
    rows = list(slices)
    while (missing := cases - sum(row.cases for row in rows)) > 0:
        backend = min(backends, key=lambda name: sum(row.seconds for row in rows if row.backend == name))
        rows.append(judge(backend, unused_seed(rows), min(SLICE, missing), jobs))
        yield rows[-1]
        if not rows[-1].cases:
            return  # what kept this slice from judging would keep the next one too


def unused_seed(slices: Sequence[Slice]) -> int:
    """A seed at random that no slice has, so that two machines draw other cases without knowing of each other."""
    used = {row.seed for row in slices}
    return next(seed for seed in iter(lambda: secrets.randbits(32), None) if seed not in used)


def judge_slice(backend: str, seed: int, cases: int, jobs: int) -> Slice:
    """Run `diff` on default cases of a seed.

    Raises:
        MissingInput: It wrote no result; its last line says why.
        InterruptedSlice: An interrupt came, and some cases were judged.
    """
    with tempfile.TemporaryDirectory(prefix="specverify-clean-") as folder:
        words = ["--backend", backend, "--cases", str(cases), "--seed", str(seed), "--jobs", str(jobs)]
        command = [sys.executable, "-m", "specverify", "diff", *words, "--keep-going", "--json", "result.json"]
        file = Path(folder) / "result.json"
        try:
            ended = run_child(command, Path(folder))
        except KeyboardInterrupt:
            if file.exists():
                raise InterruptedSlice(slice_of_result(file)) from None
            raise
        if not file.exists():
            lines = ended.stderr.strip().splitlines() or [f"it ended with {ended.returncode}"]
            raise MissingInput(f"diff --backend {backend} wrote no result: {lines[-1]}")
        return slice_of_result(file)


def figures_of(slices: Sequence[Slice]) -> dict[str, Any]:
    """The figures of a record.

    Returns:
        cases, findings (case and invariant), bound (of the rate of findings, at CONFIDENCE; None without cases),
        by_backend (cases and seconds), unfinished (a slice in which something broke), red.
    """
    cases = sum(row.cases for row in slices)
    findings = [finding for row in slices for finding in row.findings]
    by_backend = {
        name: {
            "cases": sum(row.cases for row in slices if row.backend == name),
            "seconds": round(sum(row.seconds for row in slices if row.backend == name), 1),
        }
        for name in dict.fromkeys(row.backend for row in slices)
    }
    return {
        "cases": cases,
        "findings": findings,
        "bound": upper_bound(len(findings), cases) if cases else None,
        "confidence": CONFIDENCE,
        "commits": len({row.commit for row in slices}),
        "by_backend": by_backend,
        "unfinished": [f"{row.backend}, seed {row.seed}: {row.unfinished}" for row in slices if row.unfinished],
        "red": bool(findings),
    }


def upper_bound(findings: int, cases: int) -> float:
    """The largest rate under which so few findings in so many independent cases have a chance of 1 - CONFIDENCE."""
    return 1.0 if findings >= cases else float(beta.ppf(CONFIDENCE, findings + 1, cases - findings))
