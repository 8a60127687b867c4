"""`--layers a:b` on targets with experts and with indexed columns: outputs and choices, in 32 and 16 bits."""

from collections.abc import Callable
from pathlib import Path
from typing import Any

import pytest
import torch

from specverify.checkpoints.cases import prepare
from specverify.checkpoints.tapped_layers import tapped_run
from specverify.plan import Plan
from specverify.properties.invariants import layers
from specverify.properties.verdict.finding import Verdict
from specverify.properties.verdict.judge import judge
from specverify.reference.oracle.checkpoint import identify
from specverify.setup.subjects import open_planted, subject_of
from tests.checkpoints import save_checkpoint

TAPS, EXPERTS, COLUMNS = layers.NAME, layers.EXPERTS_BEST, layers.COLUMNS_BEST
FOUR: dict[str, dict[str, Any]] = {
    "mixtral": {},
    "minimax-m2": {},
    "deepseek-v3.2": {},
    "glm-5": {"indexer_types": ["full", "shared"] * 2},
}
SPARSE = ("deepseek-v3.2", "glm-5")
Plant = Callable[[Any], Any]


@pytest.fixture(scope="module")
def folder(tmp_path_factory: pytest.TempPathFactory) -> Callable[[str], Path]:
    place = tmp_path_factory.mktemp("targets")

    def saved(family: str) -> Path:
        if not (place / family).exists():
            save_checkpoint(family, place, num_hidden_layers=4, **FOUR[family])
        return place / family

    return saved


@pytest.fixture(autouse=True)
def _in_a_folder_of_its_own(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.chdir(tmp_path)


def judged(
    model: Path, span: tuple[int, int], dtype: str = "float32", plant: Plant | None = None, layer: int = 1
) -> list[Verdict]:
    """The verdicts on prompts by the invariants of a span; `plant` puts a fault into one layer of the engine."""
    backend: Any = open_planted("cpu-eager", None)
    engine = subject_of(backend)
    assert engine.abilities is not None
    if plant is not None:
        plant(backend.models.open(identify(str(model)), dtype).model.model.layers[layer])
    plan = Plan(model=str(model), cases=1, new_tokens=4, dtypes=(dtype,), layers=span)
    run = tapped_run(plan, engine.abilities, engine.reveals)
    cases = prepare(run.plan, engine, layers.INVARIANTS).cases(run.oracle)
    return [judge(case, invariants, run.oracle, engine) for case, invariants in cases if invariants]


def failed(verdicts: list[Verdict]) -> set[str]:
    return {finding.invariant for verdict in verdicts for finding in verdict.findings}


def other_experts(layer: Any) -> None:
    """Each row goes through the experts behind those with its best scores."""
    experts = layer.mlp.experts

    def move(_: Any, arguments: tuple[Any, ...]) -> tuple[Any, ...]:
        return tuple(
            (argument + 1) % 4 if isinstance(argument, torch.Tensor) and not argument.is_floating_point() else argument
            for argument in arguments
        )

    experts.register_forward_pre_hook(move, prepend=True)


def heavier_experts(layer: Any) -> None:
    """The sum of the experts of a row is a tenth too large."""
    layer.mlp.experts.register_forward_hook(lambda _, __, output: output * 1.1)


def oldest_columns(layer: Any) -> None:
    """Each row attends to the oldest columns."""

    def choose(_: Any, __: Any, indices: torch.Tensor) -> torch.Tensor:
        return torch.arange(indices.shape[-1], dtype=indices.dtype).expand_as(indices).contiguous()

    layer.self_attn.indexer.register_forward_hook(choose)


@pytest.mark.parametrize("dtype", ["float32", "bfloat16"])
@pytest.mark.parametrize("family", FOUR)
def test_a_right_engine_agrees(family: str, dtype: str, folder: Callable[[str], Path]) -> None:
    for span in ((0, 2), (2, 4)):
        (verdict, *_) = judged(folder(family), span, dtype)
        assert not verdict.findings
        assert verdict.outcomes[TAPS] == "checked"
        assert verdict.outcomes[EXPERTS] == "checked"
        assert verdict.outcomes[COLUMNS] == ("checked" if family in SPARSE else "not_applicable")
        assert verdict.routed.judged > 20
        assert verdict.indexed.judged > 20 or family not in SPARSE


@pytest.mark.parametrize("dtype", ["float32", "bfloat16"])
@pytest.mark.parametrize(
    ("plant", "family", "invariant"),
    [
        (other_experts, "mixtral", EXPERTS),
        (heavier_experts, "mixtral", TAPS),
        (other_experts, "deepseek-v3.2", EXPERTS),
        (oldest_columns, "deepseek-v3.2", COLUMNS),
    ],
)
def test_a_fault_is_found_in_the_part_that_holds_it_alone(
    plant: Plant, family: str, invariant: str, dtype: str, folder: Callable[[str], Path]
) -> None:
    model = folder(family)
    assert invariant in failed(judged(model, (1, 2), dtype, plant))
    for span in ((0, 1), (2, 4)):
        assert not failed(judged(model, span, dtype, plant))
