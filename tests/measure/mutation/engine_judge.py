"""Mutants of the engine, judged: each in a process of its own, by the invariants, on cases that reach its line."""

import json
from collections.abc import Callable, Iterable
from dataclasses import dataclass
from pathlib import Path
from typing import Any

from specverify.properties.invariants import ALL
from specverify.properties.invariants.acceptance import law
from specverify.properties.invariants.lossless import distribution
from specverify.properties.run_statistics import excess_ties
from specverify.properties.tally import Tally, excess_evidence
from specverify.properties.verdict.invariant import Invariant, taking_turns
from specverify.properties.verdict.judge import judge
from specverify.properties.verdict.subject import Subject
from specverify.reference.case import Case
from specverify.reference.case_json import case_from_json, case_to_json
from specverify.reference.oracle.decoder import Oracle
from tests.measure.mutation.generate import Mutant
from tests.measure.mutation.loader import forget, install_mutant, install_notes

ON_TABLES = {invariant.name for invariant in (*law.INVARIANTS, *distribution.INVARIANTS)}
"""Invariants that ask the backend's sampling on tables of their own, of which a run of the case shows little."""

SAMPLING = "specverify.backends.engine.sampling"
"""What runs on tables."""

COMPLETES = "lossless.completes"
"""The invariant that a run which breaks does not keep."""

Tell = Callable[[str], None]
"""Says that something goes on, and what."""


@dataclass(frozen=True)
class Posed:
    """One case, and what the clean engine did when it was judged on it.

    Attributes:
        case: The case.
        name: The file of the corpus that it comes from; empty for a drawn one.
        reached: Statements that ran, as `module:line`.
        digest: Of the bits of its own run.
        declined: Why the clean engine does not take it, or None.
    """

    case: Case
    name: str
    reached: frozenset[str]
    digest: str
    declined: str | None


@dataclass(frozen=True)
class Survey:
    """What the clean engine does on some cases of one backend.

    Attributes:
        always: Statements that run before any case: of modules, classes, and the backend's opening.
        posed: The cases.
        findings: Invariants that do not hold on the clean engine, with the case, which is left out.
    """

    always: frozenset[str]
    posed: tuple[Posed, ...]
    findings: tuple[str, ...] = ()


def survey_engine(backend: str, modules: list[str], cases: Iterable[tuple[str, Case]], how: str, tell: Tell) -> Any:
    """Judge the clean engine, in this process, which imports it for that; returns what `survey_of` reads.

    `how` is as `judge_mutant` takes it, or `tables` for what `sieved` asks where nothing differs.
    """
    forget("specverify.backends")
    reached = install_notes(modules)
    subject = _subject(backend)
    always = _words(reached)
    posed, findings, oracle = [], [], Oracle()
    from specverify.selftest.clean_runs import digest

    for name, case in cases:
        reached.clear()
        clean_digest = digest(subject, case)
        verdict = judge(case, _invariants_for(case, subject, how), oracle, subject)
        if verdict.findings:
            findings += [f"{backend}: {finding.invariant} on {case.id}" for finding in verdict.findings]
        else:
            posed.append([case_to_json(case), name, sorted(_words(reached)), clean_digest, verdict.unsupported])
        tell(case.id)
    return {"always": sorted(always), "posed": posed, "findings": findings}


def survey_of(content: dict[str, Any]) -> Survey:
    """The survey that `survey_engine` returned, read back."""
    posed = [
        Posed(case_from_json(case), name, frozenset(reached), digest, declined)
        for case, name, reached, digest, declined in content["posed"]
    ]
    return Survey(frozenset(content["always"]), tuple(posed), tuple(content["findings"]))


def reaching(mutant: Mutant, survey: Survey) -> tuple[Posed, ...]:
    """The cases on which the mutant's statement runs: on the others it is the engine itself."""
    statement = f"{mutant.module}:{mutant.statement}"
    noted = any(statement.startswith(mutant.module + ":") for statement in survey.always)
    if not noted or statement in survey.always:
        return survey.posed
    return tuple(posed_case for posed_case in survey.posed if statement in posed_case.reached)


def judge_mutant(mutant: Mutant, backend: str, posed: tuple[Posed, ...], how: str, tell: Tell) -> dict[str, Any]:
    """Judge the mutant in this process, which imports it for that, until a case differs.

    Args:
        mutant: What to plant.
        backend: The backend to open, or one and ` in mode ` one of its modes.
        posed: Cases, with what the clean engine does on them.
        how: `sieved` judges a case only where its own run differs in a bit from the clean engine's, but mutants of
            sampling on tables everywhere; `kept` does so too, and asks every invariant; `turns` as `diff` does.
        tell: Called with each case's id before it is judged.
    """
    forget("specverify.backends")
    install_mutant(mutant)
    try:
        subject = _subject(backend)
    except Exception as why:
        return _caught("import", f"{type(why).__name__}: {why}", 0)
    from specverify.selftest.clean_runs import digest

    oracle, differing = Oracle(), 0
    tally = Tally(backend)
    for count, posed_case in enumerate(posed, 1):
        tell(posed_case.case.id)
        differs = how == "turns" or digest(subject, posed_case.case) != posed_case.digest
        differing += differs
        if not differs and not mutant.module.startswith(SAMPLING):
            continue
        invariants = _invariants_for(posed_case.case, subject, how if differs else "tables")
        verdict = judge(posed_case.case, invariants, oracle, subject)
        if verdict.first is not None:
            broke = any(finding.invariant == COMPLETES for finding in verdict.findings)
            return _caught("crash" if broke else "finding", verdict.first.invariant, count) | {
                "case": posed_case.case.id
            }
        if verdict.unsupported is not None and posed_case.declined is None:
            return _caught("refusal", verdict.unsupported, count) | {"case": posed_case.case.id}
        tally.add(verdict)
    # What only a whole run can say, as in `diff`: samples or ties that cannot be chance.
    excess = excess_evidence(tally) or excess_ties(tally)
    if excess is not None:
        return _caught("evidence", excess, len(posed))
    return {"outcome": "survived", "judged": len(posed), "differing": differing}


def _caught(how: str, by: str, count: int) -> dict[str, Any]:
    return {"outcome": "caught", "how": how, "by": " ".join(by.split())[:200], "judged": count}


IN_MODE = " in mode "
"""Stands between a backend and the mode in which it is to be opened."""


def _subject(backend: str) -> Subject:
    from specverify.setup.subjects import open_planted, subject_of

    name, _, mode = backend.partition(IN_MODE)
    return subject_of(open_planted(name, None, mode or None))


def _invariants_for(case: Case, subject: Subject, how: str) -> tuple[Invariant, ...]:
    if how == "kept":
        return ALL if subject.variant_interval == 1 else tuple(invariant for invariant in ALL if invariant.every == 1)
    invariants = taking_turns(case, ALL, subject.pace)
    return (
        invariants if how != "tables" else tuple(invariant for invariant in invariants if invariant.name in ON_TABLES)
    )


def _words(reached: set[tuple[str, int]]) -> frozenset[str]:
    return frozenset(f"{module}:{line}" for module, line in reached)


def corpus(folder: Path) -> list[tuple[str, Case, str | None]]:
    """The kept cases, of faults and of mutants: name of the file, case, and the backend that it was found on."""
    cases = []
    for file in sorted((*folder.glob("*.json"), *folder.glob("cases/*.json"))):
        content = json.loads(file.read_text(encoding="utf-8"))
        cases.append((file.stem, case_from_json(content["case"]), content.get("backend")))
    return cases
