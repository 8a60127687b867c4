"""The measure `checkpoints`: cases on published configs by the right engine, which must not differ.

Beside the differences it tells how far plain decode lay off, over its ceiling and over the movement of its rows: the
figures from which `specverify.properties.tolerance` takes its factors.
"""

import tempfile
import time
from collections import defaultdict
from collections.abc import Iterable
from pathlib import Path
from typing import Any

import numpy as np

from specverify.backends.compositions import open_cpu
from specverify.campaign.against import TransformersOracle
from specverify.checkpoints.cases import prepare
from specverify.plan import Plan
from specverify.properties.invariants import ALL
from specverify.properties.tolerance.bounds import UNIT
from specverify.properties.tolerance.closeness import Noise, noise
from specverify.properties.verdict.finding import Verdict
from specverify.properties.verdict.invariant import Oracle
from specverify.properties.verdict.judge import judge
from specverify.properties.verdict.subject import Subject
from specverify.reference.case import Case
from specverify.reference.oracle.decoder import Oracle as NumpyOracle
from specverify.setup.subjects import subject_of
from tests.published import CONFIGS, save_model

DTYPES = ("float32", "bfloat16", "float16")
NEW_TOKENS = 12
"""Tokens of each text."""


def measure(
    prompts: int,
    names: Iterable[str] = (),
    dtypes: tuple[str, ...] = DTYPES,
    seed: int = 0,
    trained: bool = False,
    against: bool = False,
    budget_s: float = np.inf,
) -> dict[str, Any]:
    """Judge the right engine on `prompts` drawn prompts of each config and dtype, three cases each.

    Args:
        prompts: Prompts of each config and dtype.
        names: The configs; all if empty.
        dtypes: Working dtypes.
        seed: Of weights and prompts.
        trained: Whether the weights are trained on a text first.
        against: Whether plain transformers is the reference.
        budget_s: Seconds after which no further config begins.

    Returns:
        configs, cases, seconds; findings: a line for each; control: by dtype the largest error of plain decode over
        its ceiling and over its movement, with the config; red: whether anything differed.
    """
    began = time.perf_counter()
    figures: dict[str, Any] = {"configs": 0, "cases": 0, "findings": [], "control": defaultdict(dict)}
    with tempfile.TemporaryDirectory() as folder:
        for name in names or CONFIGS:
            if time.perf_counter() - began > budget_s:
                figures["unfinished"] = True
                break
            model = str(save_model(name, Path(folder), seed, trained))
            figures["configs"] += 1
            for dtype in dtypes:
                plan = Plan(model=model, dtypes=(dtype,), cases=prompts, new_tokens=NEW_TOKENS, seed=seed)
                _judge_all(figures, name, plan, TransformersOracle() if against else NumpyOracle())
    figures["seconds"] = time.perf_counter() - began
    figures["red"] = bool(figures["findings"])
    return figures


def _judge_all(figures: dict[str, Any], name: str, plan: Plan, oracle: Oracle) -> None:
    """Judge the cases of `plan`, and add what they show to `figures`."""
    subject, dtype = subject_of(open_cpu()), plan.dtypes[0]
    for case, invariants in prepare(plan, subject, ALL).cases(oracle):
        verdict = judge(case, invariants, oracle, subject)
        figures["cases"] += 1
        figures["findings"] += [_line(name, dtype, verdict, finding) for finding in verdict.findings]
        _note_control(figures["control"][dtype], name, case, oracle, subject)


def _line(name: str, dtype: str, verdict: Verdict, finding: Any) -> str:
    return f"{name} {dtype} {finding.invariant} {finding.where} {finding.measure} case {verdict.case.id}"


def _note_control(worst: dict[str, Any], name: str, case: Case, oracle: Oracle, subject: Subject) -> None:
    """Raise the `worst` ratios of a dtype to those of the case's plain decode."""
    error = noise(case, oracle, subject)
    for kind, ratio in ratios(error).items():
        if ratio > worst.get(kind, (0.0, ""))[0]:
            worst[kind] = (ratio, name)


def ratios(error: Noise) -> dict[str, float]:
    """The error of plain decode over its ceiling, and over what a change of weights by the unit roundoff moves."""
    moved = error.amplification.control_movement()
    by_kind = {"ceiling": error.measured / error.ceiling}
    if moved is not None:
        by_kind["movement"] = error.measured / (UNIT[error.dtype] * float(np.sqrt(np.mean(np.square(moved.logits)))))
    return by_kind
