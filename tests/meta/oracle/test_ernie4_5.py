"""ERNIE 4.5 with experts: the fields that say which layers have them, and the bias that chooses and does not weigh."""

import json
from dataclasses import replace
from pathlib import Path
from typing import Any

import numpy as np
import pytest

from specverify.reference.architecture import Architecture, Seeded
from specverify.reference.family.ernie4_5 import Ernie45MoeSettings
from specverify.reference.files.fields import UnreadableCheckpoint
from specverify.reference.oracle.configuration import read_architecture
from specverify.reference.oracle.family.experts import EXPERTS
from specverify.reference.oracle.parameters import load
from tests.drawn_families import listed_architectures
from tests.published import CONFIGS


def reading(folder: Path, **changed: Any) -> Architecture:
    content = {name: value for name, value in {**CONFIGS["ernie-4.5-21b-a3b"], **changed}.items() if value is not ...}
    (folder / "config.json").write_text(json.dumps(content))
    return read_architecture(folder / "config.json")


def layers_with_experts(arch: Architecture) -> list[int]:
    settings = Ernie45MoeSettings.of(arch)
    return [layer for layer in range(arch.layers) if settings.has_experts(layer)]


@pytest.mark.parametrize(
    ("changed", "layers"),
    [
        ({}, [1, 2, 3]),
        ({"moe_layer_end_index": 2}, [1, 2]),
        ({"moe_layer_end_index": -1}, [1, 2, 3]),
        ({"moe_layer_end_index": 0, "moe_layer_start_index": 0}, [0]),
        ({"moe_layer_start_index": 0, "moe_layer_interval": 2}, [1, 3]),
        ({"moe_layer_start_index": 3, "moe_layer_end_index": 2}, []),
    ],
)
def test_the_layers_with_experts_are_those_of_the_fields(
    changed: dict[str, Any], layers: list[int], tmp_path: Path
) -> None:
    assert layers_with_experts(reading(tmp_path, **changed)) == layers


def test_a_field_may_have_either_of_two_names(tmp_path: Path) -> None:
    renamed = reading(tmp_path, moe_num_experts=..., moe_k=..., num_experts=16, num_experts_per_tok=4)
    assert renamed == reading(tmp_path)
    with pytest.raises(UnreadableCheckpoint, match="moe_k and num_experts_per_tok differ"):
        reading(tmp_path, num_experts_per_tok=2)


@pytest.mark.parametrize(
    ("changed", "line"),
    [
        ({"use_bias": True}, "use_bias is true"),
        ({"moe_gate": "top2_fused"}, "moe_gate is 'top2_fused'"),
        ({"moe_layer_interval": 0}, "moe_layer_interval or moe_layer_start_index names no layer"),
        ({"moe_layer_end_index": -2}, "moe_layer_end_index is -2"),
    ],
    ids=lambda value: next(iter(value)) if isinstance(value, dict) else "",
)
def test_what_cannot_be_computed_is_refused(changed: dict[str, Any], line: str, tmp_path: Path) -> None:
    with pytest.raises(UnreadableCheckpoint, match=line):
        reading(tmp_path, **changed)


def test_the_bias_chooses_and_does_not_weigh() -> None:
    arch = listed_architectures("ernie4_5_moe")[0]
    state = dict(load(Seeded(arch, 0), "float64").state)
    rows = np.random.default_rng(0).normal(size=(5, arch.hidden_size))
    state["model.layers.1.mlp.gate.e_score_correction_bias"] = np.array([0.0, 0.0, 9.0, 9.0])
    chosen = EXPERTS.router(arch, state, 1, rows)
    assert chosen is not None
    assert {*chosen.chosen.ravel().tolist()} == {2, 3}
    shares = np.exp(rows @ state["model.layers.1.mlp.gate.weight"].T)
    assert np.allclose(chosen.weights, shares / shares.sum(axis=1, keepdims=True), atol=1e-12)


def test_a_small_sum_of_weights_is_not_scaled_to_one() -> None:
    arch = listed_architectures("ernie4_5_moe")[1]
    assert Ernie45MoeSettings.of(arch).norm_min == 0.75
    state = load(Seeded(arch, 0), "float64").state
    rows = np.random.default_rng(0).normal(size=(40, arch.hidden_size))
    router = EXPERTS.router(arch, state, 0, rows)
    assert router is not None
    plain = replace(arch, settings=replace(Ernie45MoeSettings.of(arch), norm_min=1e-12))
    blocks = [EXPERTS.mix(model, state, 0, rows, router, router.chosen) for model in (arch, plain)]
    sums = np.take_along_axis(router.weights, router.chosen, axis=1).sum(axis=1)
    assert 0 < (sums < 0.75).sum() < len(sums)
    factors = np.minimum(1.0, sums / 0.75)
    assert np.allclose(blocks[0], blocks[1] * factors[:, None], atol=1e-12)
