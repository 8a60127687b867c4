"""NumPy's certificate for a reference on a device: what it samples, what it refuses, and what it explains."""

from dataclasses import replace
from pathlib import Path
from typing import Any

import numpy as np
import pytest
import torch

from specverify.checkpoints.cases import branches
from specverify.properties.verdict.finding import Finding, Verdict
from specverify.reference.case import Case
from specverify.reference.draft import Ngram
from specverify.reference.oracle.amplification import RowMovements
from specverify.reference.oracle.model import Nodes
from specverify.reference.oracle.parameters import Parameters
from specverify.reference.oracle.parameters import load as load_by_numpy
from specverify.reference.sampling import Stops
from specverify.reference.trace import Stage
from specverify.references import certificate, device_array, torch_oracle
from specverify.references.certificate import (
    CASES_IN_DOUBT,
    ROWS,
    ROWS_IN_DOUBT,
    ROWS_ON_CHECKPOINT,
    Certificate,
    ReferenceDisagrees,
    Row,
    dot_bound,
    rows_of,
)
from specverify.references.torch_oracle import TorchOracle
from tests.drawn_families import draw_architecture
from tests.meta.oracle.test_rare_families import case_for
from tests.meta.oracle.test_reference_memory import saved_llama

FAMILIES = ("cohere2", "mixtral", "deepseek_v32", "falcon_h1", "gemma4")
FINDING = Finding("attention.context-exact", Stage.SCORED, 0, {}, 0.0, 1.0)


def judged(oracle: TorchOracle, case: Case, seed: int = 0, *findings: Finding) -> Verdict:
    oracle(case)
    return Certificate("torch:cpu", oracle, seed).certify(Verdict(case, "an engine", {}, findings))


@pytest.mark.parametrize("family", FAMILIES)
def test_rows_of_a_case_are_certified_by_the_seed(family: str) -> None:
    case, oracle = case_for(draw_architecture(family, 1)), TorchOracle("cpu")
    rows = judged(oracle, case).reference_rows
    num_rows = sum(len(step.drafted.tree) for step in oracle(case).steps if step.drafted is not None)
    assert (rows.judged, rows.certified) == (num_rows, min(ROWS, len(rows_of(oracle(case)))))
    assert rows.widest < 1e-13
    chosen = [
        {row.text for row in Certificate("torch:cpu", oracle, seed)._choose(rows_of(oracle(case)), ROWS)}
        for seed in (1, 1, 2, 3)
    ]
    assert chosen[0] == chosen[1]
    near = sorted(rows_of(oracle(case)), key=lambda row: row.doubt)[: ROWS // 2]
    assert all({row.text for row in near} <= texts for texts in chosen)


def test_a_case_with_a_finding_is_certified_at_length() -> None:
    case, oracle = case_for(draw_architecture("cohere2", 1)), TorchOracle("cpu")
    longer_cases = [replace(case, prompt=(*case.prompt, token)) for token in range(CASES_IN_DOUBT + 1)]
    for longer_case in longer_cases:
        oracle(longer_case)
    rows = judged(oracle, case, 0, FINDING).reference_rows
    assert rows.judged > rows.certified > ROWS * CASES_IN_DOUBT
    assert len(rows_of(oracle(case))) <= ROWS_IN_DOUBT
    again = judged(oracle, case, 0, FINDING).reference_rows  # the reference remembers the run
    assert (again.judged, again.certified) == (0, len(rows_of(oracle(case))))
    assert judged(oracle, case).reference_rows.certified == 0


@pytest.mark.parametrize("family", FAMILIES)
def test_a_reference_of_single_precision_is_refused(family: str, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setitem(device_array.UFUNCS, np.exp, lambda x: torch.exp(x.float()).double())
    case = case_for(draw_architecture(family, 2))
    with pytest.raises(ReferenceDisagrees, match=f"torch:cpu: NumPy computes other numbers in .* {case.id}"):
        judged(TorchOracle("cpu"), case)


def test_a_reference_without_numbers_is_refused(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setitem(device_array.UFUNCS, np.exp, lambda x: torch.exp(x) * float("nan"))
    with pytest.raises(ReferenceDisagrees):
        judged(TorchOracle("cpu"), case_for(draw_architecture("cohere2", 2)))


def with_equal_experts(model: Any, dtype: str) -> Parameters:
    """Parameters in whose layers the first two experts have the same scores, and other weights."""
    parameters = load_by_numpy(model, dtype)
    state = dict(parameters.state)
    for name in [name for name in state if name.endswith("mlp.gate.weight")]:
        state[name] = np.concatenate([state[name][:1], state[name][:1], state[name][2:]])
    return replace(parameters, state=state)


def last_first(scores: Any) -> Any:
    """The order of `np.argsort`, of equal numbers the last first."""
    order = np.argsort(scores[..., ::-1], axis=-1, kind="stable")
    return scores.shape[-1] - 1 - order


def test_experts_at_a_tie_may_be_chosen_otherwise(monkeypatch: pytest.MonkeyPatch) -> None:
    for module in (certificate, torch_oracle):
        monkeypatch.setattr(module, "load", with_equal_experts)
    # Of equal scores the reference takes the last one.
    monkeypatch.setitem(device_array.FUNCTIONS, np.argsort, lambda like, array, **options: last_first(array.on_host()))
    case, oracle = case_for(draw_architecture("mixtral", 2)), TorchOracle("cpu")
    assert judged(oracle, case).reference_rows.certified


def test_a_row_may_be_off_as_far_as_roundings_move_it() -> None:
    logits, attended = np.array([1.0, 2.0]), np.ones((1, 1, 2))
    computed = Nodes(logits[None] + 1e-11, attended[:, :, None] + 0.0)
    row = Row((1,), logits, attended)
    change = 2 * dot_bound(100)
    assert row.difference(computed, 0) == pytest.approx(5e-12, rel=1e-3)
    for movement, explained in ((1.0, False), (1e4, True)):
        moved = RowMovements(np.array([movement]), np.ones((1, 1, 1)))
        assert row.is_explained(computed, moved, 0, change) is explained


def test_on_a_checkpoint_some_cases_are_certified_at_length_and_those_with_a_finding_always(tmp_path: Path) -> None:
    checkpoint = saved_llama(tmp_path, 1, 8, 24, 40)
    draft = Ngram(branches(8, 6, 4), 3)
    prompts = [(1, 2, 3, 1, 2, 3, number) for number in range(24)]
    cases = [Case(checkpoint, prompt, draft, stops=Stops(12), dtype="bfloat16") for prompt in prompts]
    oracle = TorchOracle("cpu")
    certificate_of_run = Certificate("torch:cpu", oracle, 0)
    certified = []
    for case in cases:
        oracle(case)
        certified.append(certificate_of_run.certify(Verdict(case, "an engine", {})).reference_rows.certified)
    lengths = [min(ROWS_ON_CHECKPOINT, len(rows_of(oracle(case)))) for case in cases]
    # Until so many rows are certified every case is, then some of them.
    first = next(number for number in range(len(cases)) if sum(lengths[: number + 1]) >= ROWS_ON_CHECKPOINT)
    assert certified[: first + 1] == lengths[: first + 1]
    assert all(count in (0, length) for count, length in zip(certified, lengths, strict=True))
    assert 2 <= sum(count > 0 for count in certified[first + 1 :]) <= 14
    rows = certificate_of_run.certify(Verdict(cases[-1], "an engine", {}, (FINDING,))).reference_rows
    assert rows.certified > 0
