"""The measure `mutants`: mutants of the engine judged by the invariants, or of the oracle by its tests."""

import importlib
import json
import random
import time
from collections import Counter
from collections.abc import Iterable
from contextlib import suppress
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any, Protocol

from specverify.reports.progress import Progress
from specverify.reports.record import Lines
from specverify.setup.errors import MissingInput
from tests.measure.mutation.generate import Mutant, mutants_of
from tests.measure.mutation.known import FILE, MutantRecords, read_records
from tests.measure.mutation.loader import forget, source_of
from tests.measure.mutation.pool import Work, run

GOALS = {"engine": 0.95, "reference": 0.98}
"""Scores below which the command ends with exit code 1."""

SAMPLE = 400


class Stage(Protocol):
    """One pass over the mutants at large."""

    @property
    def name(self) -> str:
        """What results call it."""
        ...


class Scope(Protocol):
    """What is mutated, and how mutants of it are judged.

    Attributes:
        stages: In order; a mutant that survives one goes on to the next.
        digest: Of all that a verdict depends on: survivors of another are judged again.
        silence_s: Seconds of processor time after which a child that says nothing hangs.
        differing: What the clean source was blamed for, which nothing should be.
    """

    stages: tuple[Any, ...]
    digest: str
    silence_s: float
    differing: list[str]

    def modules(self) -> list[str]:
        """Modules that are mutated."""
        ...

    def work(self, mutant: Mutant, stage: Any) -> Work:
        """What a child does with a mutant at a stage."""
        ...


@dataclass(frozen=True)
class Options:
    """What was typed."""

    scope_name: str = "engine"
    sample: int = SAMPLE
    seed: int = 0
    jobs: int = 1
    budget_s: float | None = None
    folder: Path = Path(".specverify")


@dataclass
class Fate:
    """What became of one mutant.

    Attributes:
        mutant: It.
        stage: The last stage that it went through, or None.
        outcome: caught or survived, of that stage.
        facts: What the stage said.
        seconds: Over all its stages.
    """

    mutant: Mutant
    stage: str | None = None
    outcome: str = "unjudged"
    facts: dict[str, Any] = field(default_factory=dict)
    seconds: float = 0.0


def draw_mutants(modules: Iterable[str], count: int, seed: int) -> tuple[list[Mutant], list[Mutant], Counter[str]]:
    """All mutants of `modules`, `count` of them drawn by `seed` (all for 0), and how many rules leave out."""
    every: list[Mutant] = []
    skipped: Counter[str] = Counter()
    for module in modules:
        mutants, skips = mutants_of(module, source_of(module)[1])
        every += mutants
        skipped += skips
    drawn = every if not count or count >= len(every) else random.Random(seed).sample(every, count)
    return every, drawn, skipped


def bench(options: Options, scope: Scope, known_file: Path = FILE) -> dict[str, Any]:
    """Judge a sample of mutants; results are appended to a file in the folder as they arrive, and taken from it.

    Returns:
        The figures of `figures_of`.
    """
    began = time.time()
    until = began + (options.budget_s or float("inf"))
    records = read_records(known_file).within(scope.modules())
    every, drawn, skipped = draw_mutants(scope.modules(), options.sample, options.seed)
    fates = [Fate(mutant) for mutant in drawn if not records.why_not_run(mutant) and not records.why_equivalent(mutant)]
    options.folder.mkdir(parents=True, exist_ok=True)
    file = options.folder / f"mutants-{options.scope_name}.jsonl"
    _resume(fates, file, scope)
    # What was judged is in the file: Ctrl-C ends the judging, and the page says how far it came.
    with suppress(KeyboardInterrupt), Lines(file) as lines, Progress(None) as progress:
        for index, stage in enumerate(scope.stages):
            large = [fate for fate in fates if fate.outcome != "caught" and _is_due(fate, scope, index)]
            tasks = ((fate, scope.work(fate.mutant, stage)) for fate in large)
            for fate, report in run(tasks, options.jobs, scope.silence_s, lambda: time.time() > until):
                _note(fate, stage.name, report)
                lines.append(_line(fate, scope.digest))
                progress.advance(1, failures=int(fate.outcome != "caught"))
    figures = figures_of(options.scope_name, drawn, fates, records, skipped, scope)
    idle = records.idle(every)
    figures["red"] |= bool(idle or scope.differing)
    return figures | {
        "idle_records": idle,
        "clean_findings": scope.differing,
        "population": len(every),
        "seed": options.seed,
        "took_s": round(time.time() - began),
    }


def _is_due(fate: Fate, scope: Scope, stage_index: int) -> bool:
    """Whether the fate has been through all stages before number `stage_index`, and not through that one."""
    names = [stage.name for stage in scope.stages]
    return (names.index(fate.stage) if fate.stage is not None else -1) == stage_index - 1


def _note(fate: Fate, stage: str, report: dict[str, Any]) -> None:
    """Take in what a child came to."""
    facts = report.get("returned")
    if facts is None:
        how = "hang" if report["ended"] == "silent" else "crash"
        facts = {"outcome": "caught", "how": how, "by": f"the process {report['ended']}", "case": report["said"]}
    fate.stage, fate.outcome, fate.facts = stage, facts["outcome"], facts
    fate.seconds += report["seconds"]


def _line(fate: Fate, digest: str) -> dict[str, Any]:
    mutant = fate.mutant
    return {
        "id": mutant.id,
        "key": mutant.key,
        "number": mutant.number,
        "stage": fate.stage,
        "seconds": round(fate.seconds, 2),
        "digest": digest,
        **fate.facts,
    }


def _resume(fates: list[Fate], file: Path, scope: Scope) -> None:
    """Take over what the file says: what was caught, and how far those at large came under the same digest."""
    if not file.exists():
        return
    fates_by_key = {(*fate.mutant.key, fate.mutant.id): fate for fate in fates}
    names = [stage.name for stage in scope.stages]
    for text in file.read_text(encoding="utf-8").splitlines():
        try:
            line = json.loads(text)
        except json.JSONDecodeError:  # a line of a run that was killed while it wrote
            continue
        fate = fates_by_key.get((*line["key"], line["id"]))
        if fate is None or line["stage"] not in names:
            continue
        if line["outcome"] == "caught" or line["digest"] == scope.digest:
            fate.stage, fate.outcome, fate.seconds = line["stage"], line["outcome"], line["seconds"]
            fate.facts = {name: line[name] for name in line if name not in ("id", "key", "number", "digest")}


def figures_of(
    scope_name: str, drawn: list[Mutant], fates: list[Fate], records: MutantRecords, skipped: Counter[str], scope: Scope
) -> dict[str, Any]:
    """Counts, the score over the mutants that were judged and could differ, and every survivor."""
    last = scope.stages[-1].name
    caught = [fate for fate in fates if fate.outcome == "caught"]
    large = [fate for fate in fates if fate.outcome == "survived"]
    judged = len(caught) + len(large)
    score = len(caught) / judged if judged else 0.0
    decided = sum(1 for fate in large if fate.stage == last)
    not_run = Counter(filter(None, (records.why_not_run(mutant) for mutant in drawn)))
    equivalent = [mutant for mutant in drawn if records.why_equivalent(mutant) and not records.why_not_run(mutant)]
    return {
        "of": scope_name,
        "sample": len(drawn),
        "score": score,
        "goal": GOALS[scope_name],
        # What was not judged to the end has not survived: the goal is missed where it is out of reach.
        "red": (len(fates) - decided) / len(fates) < GOALS[scope_name] if fates else True,
        "caught": len(caught),
        "caught_at": dict(Counter(str(fate.stage) for fate in caught)),
        "caught_how": dict(Counter(str(fate.facts.get("how")) for fate in caught)),
        "caught_by": dict(
            Counter(str(fate.facts.get("by")) for fate in caught if fate.facts.get("how") == "finding").most_common()
        ),
        "survived": len(large),
        "not_finished": sum(1 for fate in large if fate.stage != last),
        "not_judged": len(fates) - judged,
        "unfinished": any(fate.outcome != "caught" and fate.stage != last for fate in fates),
        "equivalent": len(equivalent),
        "not_run": dict(not_run),
        "skipped": dict(skipped),
        "seconds": round(sum(fate.seconds for fate in fates)),
        "survivors": [_survivor(fate) for fate in sorted(large, key=lambda fate: fate.mutant)],
    }


def _survivor(fate: Fate) -> dict[str, Any]:
    mutant = fate.mutant
    return {
        "id": mutant.id,
        "within": mutant.within,
        "marker": mutant.marker,
        "before": mutant.before,
        "after": mutant.after,
        "stage": fate.stage,
        "judged": fate.facts.get("judged", 0),
        "differing": fate.facts.get("differing", 0),
    }


def scope_of(options: Options) -> Scope:
    """The engine or the reference; processes that judge are forked from this one, which so imports all it can.

    Raises:
        MissingInput: where pytest is not installed, which tests of the reference need.
    """
    _preload()
    if options.scope_name == "engine":
        from tests.measure.mutation.engine_scope import Engine

        return Engine(options.folder, options.seed)
    try:
        from tests.measure.mutation.oracle_scope import Reference
    except ImportError as why:
        raise MissingInput(f"--of reference runs the tests (pip install -e '.[test]'): {why}") from why

    return Reference(options.folder)


def _preload() -> None:
    """Import what every child needs, then forget what it must import by itself."""
    import torch

    importlib.import_module("specverify.setup.subjects")

    torch.set_num_threads(1)
    forget("specverify.backends")
