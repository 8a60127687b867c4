"""The engine's mutants, in stages: cheap rounds of drawn cases, the corpus, and dearer rounds for those at large."""

import hashlib
import json
from collections.abc import Callable
from dataclasses import dataclass
from functools import partial
from itertools import islice
from pathlib import Path
from typing import Any

from specverify.campaign.case_stream import stream
from specverify.plan import default_dtypes
from specverify.reference.case import Case
from tests.measure.mutation.engine_judge import (
    IN_MODE,
    Posed,
    Survey,
    corpus,
    judge_mutant,
    reaching,
    survey_engine,
    survey_of,
)
from tests.measure.mutation.generate import Mutant
from tests.measure.mutation.pool import Work, run

ROOT = Path(__file__).resolve().parents[3]

ADAPTERS = ("atb", "eager", "encodings", "fused", "operands", "writes", "device")
"""Modules of `specverify.backends.ascend` that belong to an engine; the others stand in for the device."""

FURTHER_BACKENDS: dict[str, tuple[str, ...]] = {
    "specverify.backends.engine.columns": ("cpu-eager", "cpu-split"),
    "specverify.backends.engine.attention.compact": ("cpu-split", "triton-interpreted"),
    "specverify.backends.engine.attention.flex": ("cpu-fused-flex",),
    "specverify.backends.engine.attention.gathered": (f"cpu-split{IN_MODE}reference",),
    "specverify.backends.engine.attention.sdpa": ("cpu-fused",),
    "specverify.backends.engine.attention.split": ("cpu-split",),
    "specverify.backends.engine.attention.triton_kernels": ("triton-interpreted",),
    "specverify.backends.engine.attention.triton_launch": ("triton-interpreted",),
    "specverify.backends.engine.server": ("cpu-eager", "ascend-fused-emulated"),
    "specverify.backends.ascend.atb": ("ascend-fused-atb-emulated",),
    "specverify.backends.ascend.eager": ("ascend-eager-emulated",),
    "specverify.backends.ascend.encodings": ("ascend-fused-emulated", "ascend-fused-atb-emulated"),
    "specverify.backends.ascend.fused": ("ascend-fused-emulated",),
    "specverify.backends.ascend.latent": ("ascend-fused-emulated",),
    "specverify.backends.ascend.operands": ("ascend-fused-emulated", "ascend-fused-atb-emulated"),
    "specverify.backends.ascend.writes": (
        "ascend-fused-emulated",
        "ascend-fused-atb-emulated",
        "ascend-eager-emulated",
    ),
}
"""Modules that another backend than `cpu-eager` runs."""

UNNOTED = ("specverify.backends.engine.attention.triton_kernels",)
"""Modules whose statements cannot be noted: Triton reads their source itself."""


@dataclass(frozen=True)
class Stage:
    """One pass over the mutants at large.

    Attributes:
        name: What it is called in results.
        how: As `judge_mutant` takes it.
        rounds: Rounds of drawn cases, by number; none for the corpus.
    """

    name: str
    how: str
    rounds: tuple[int, ...] = ()


STAGES = (
    Stage("draws", "sieved", (0,)),
    Stage("more draws", "sieved", (1,)),
    Stage("corpus", "kept"),
    Stage("draws and variants", "turns", (0, 1)),
    Stage("most draws", "sieved", (2,)),
)

ROUNDS = {"cpu-eager": (40, 160, 400), "triton-interpreted": (16, 32, 0), "cpu-fused-flex": (24, 24, 0)}
OTHER_ROUNDS = (40, 60, 0)
"""Cases of each round, by backend; a backend that only a few modules need is asked less."""

SILENCE_S = 40.0
"""Seconds of processor time that one case may take."""


def modules() -> list[str]:
    """Every module whose mutants are the engine's."""
    engine = [
        ".".join(("specverify", *file.relative_to(ROOT).with_suffix("").parts))
        for file in sorted((ROOT / "backends" / "engine").rglob("*.py"))
        if file.name != "__init__.py"
    ]
    return [*engine, *(f"specverify.backends.ascend.{name}" for name in ADAPTERS)]


def backends_of(module: str) -> tuple[str, ...]:
    """The backends that run a module."""
    split = (
        ("cpu-split",) if module.startswith("specverify.backends.engine.kv.") else ()
    )  # it reads pages, and where prefixes begin
    return FURTHER_BACKENDS.get(module, ("cpu-eager", *split))


class Engine:
    """The stages of the engine's mutants, and the surveys of the clean engine that they are judged by."""

    stages = STAGES
    silence_s = SILENCE_S

    def __init__(self, folder: Path, seed: int) -> None:
        self._folder, self._seed = folder, seed
        self._surveys: dict[tuple[str, str], Survey] = {}
        self.digest = _digest()
        self.differing: list[str] = []

    def modules(self) -> list[str]:
        """See `modules`."""
        return modules()

    def work(self, mutant: Mutant, stage: Stage) -> Work:
        """What a child does with the mutant at a stage; surveys the clean engine first where that was not done."""
        grounds = [
            (
                backend,
                tuple(
                    posed_case for survey in self._surveys_of(backend, stage) for posed_case in reaching(mutant, survey)
                ),
            )
            for backend in backends_of(mutant.module)
        ]
        return partial(_work, mutant, grounds, stage.how)

    def _surveys_of(self, backend: str, stage: Stage) -> list[Survey]:
        if not stage.rounds:
            return [self._survey(backend, "corpus", "tables", partial(_corpus_cases, backend))]
        return [
            self._survey(
                backend,
                f"round-{number}",
                "tables" if number == 2 else "turns",
                partial(self._draw_cases, backend, number),
            )
            for number in stage.rounds
        ]

    def _draw_cases(self, backend: str, number: int) -> list[tuple[str, Case]]:
        count = ROUNDS.get(backend, OTHER_ROUNDS)[number]
        cases = stream(self._seed + 7_919 * number, default_dtypes(backend.partition(IN_MODE)[0]))
        return [("", case) for case in islice(cases, count)]

    def _survey(self, backend: str, name: str, how: str, cases: Callable[[], list[tuple[str, Case]]]) -> Survey:
        key = (backend, name)
        if key not in self._surveys:
            posed = cases()
            named = backend.replace(IN_MODE, "-")
            file = self._folder / f"survey-{named}-{name}-{len(posed)}-{self._seed}-{self.digest}.json"
            if not file.exists():
                work = partial(
                    survey_engine, backend, [module for module in modules() if module not in UNNOTED], posed, how
                )
                ((_, outcome),) = run([(None, work)], 1, SILENCE_S * 3, lambda: False)
                if "returned" not in outcome:
                    raise RuntimeError(f"{backend} could not be surveyed on {name}: {outcome}")
                file.write_text(json.dumps(outcome["returned"]), encoding="utf-8")
            survey = survey_of(json.loads(file.read_text(encoding="utf-8")))
            self.differing += survey.findings
            self._surveys[key] = survey
        return self._surveys[key]


def _corpus_cases(backend: str) -> list[tuple[str, Case]]:
    """The corpus; to an interpreted kernel only the cases found on it."""
    cases = corpus(ROOT / "tests" / "corpus")
    few = ROUNDS.get(backend, OTHER_ROUNDS)[1] < 40
    return [(name, case) for name, case, on in cases if not few or on == backend]


def _work(
    mutant: Mutant, grounds: list[tuple[str, tuple[Posed, ...]]], how: str, tell: Callable[[str], None]
) -> dict[str, Any]:
    """Judge on one backend after the other until one differs."""
    total: dict[str, Any] = {"outcome": "survived", "judged": 0, "differing": 0}
    for backend, posed in grounds:
        if not posed:
            continue
        report = judge_mutant(mutant, backend, posed, how, tell)
        if report["outcome"] == "caught":
            return {**report, "backend": backend}
        total = {
            **total,
            "judged": total["judged"] + report["judged"],
            "differing": total["differing"] + report["differing"],
        }
    return total


def _digest() -> str:
    """Of all source that a verdict depends on."""
    content = hashlib.blake2b(digest_size=6)
    for room in ("backends", "reference", "properties", "tests/corpus"):
        for file in sorted((ROOT / room).rglob("*.py" if room != "tests/corpus" else "*.json")):
            content.update(file.read_bytes())
    return content.hexdigest()
