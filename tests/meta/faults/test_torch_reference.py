"""Faults planted in the engine have the same verdict by torch on the CPU as by NumPy."""

from pathlib import Path
from typing import Any

import pytest

from specverify.backends import faults
from specverify.properties.invariants import ALL
from specverify.properties.strategies.cases import cases
from specverify.properties.strategies.settings import explore
from specverify.properties.verdict.finding import Verdict
from specverify.properties.verdict.invariant import Oracle, taking_turns
from specverify.properties.verdict.judge import judge
from specverify.reference.case import Case
from specverify.reference.oracle.decoder import Oracle as NumpyOracle
from specverify.references.certificate import Certificate
from specverify.references.torch_oracle import TorchOracle
from specverify.reports import bundle
from specverify.setup.subjects import open_planted, subject_of
from tests.tiers import gated

CORPUS = Path(__file__).resolve().parents[2] / "corpus"

EVERY = 8
"""One fault in so many of those on `cpu-eager`: some forty."""

DRAWN = 6
"""Drawn cases of each, beside its smallest one: 300 and more in all."""

CHOSEN = [fault.name for fault in faults.ALL if fault.on == "cpu-eager" and (CORPUS / f"{fault.name}.json").exists()][
    ::EVERY
]


def drawn_cases(number: int) -> list[Case]:
    """DRAWN cases of a seed."""
    drawn: list[Case] = []

    def take(case: Case) -> None:
        drawn.append(case)

    explore(number, DRAWN, cases(("float32", "float64")), take)
    return drawn


def facts(verdict: Verdict) -> Any:
    """What a run reports of a case: outcomes, and where findings lie; numbers differ in the last bits."""
    places = [(finding.invariant, finding.stage, finding.step, dict(finding.where)) for finding in verdict.findings]
    return verdict.outcomes, places, len(verdict.ties), verdict.unsupported


@pytest.mark.parametrize("name", gated(CHOSEN, lambda index: False))
def test_a_fault_has_the_same_verdict(name: str) -> None:
    subject, torch_oracle = subject_of(open_planted("cpu-eager", name)), TorchOracle("cpu")
    certificate = Certificate("torch:cpu", torch_oracle, CHOSEN.index(name))
    smallest = bundle.load(CORPUS / f"{name}.json").case
    some_differ = False
    for case in [smallest, *drawn_cases(CHOSEN.index(name))]:
        turns = taking_turns(case, ALL)
        by_numpy, by_torch = (judge(case, turns, oracle, subject) for oracle in oracles(torch_oracle))
        assert facts(by_torch) == facts(by_numpy)
        counted = certificate.certify(by_torch).reference_rows
        print(name, case.id, len(by_torch.findings), counted)  # noqa: T201 - the measured figures, with -s
        some_differ |= bool(by_numpy.findings)
    assert some_differ


def oracles(torch_oracle: TorchOracle) -> tuple[Oracle, Oracle]:
    return NumpyOracle(), torch_oracle
