"""MiniMax-M2: the width of rotary embedding in three forms, norms over all heads, fields that must agree."""

import json
from pathlib import Path
from typing import Any

import numpy as np
import pytest

from specverify.reference.architecture import Architecture, Seeded
from specverify.reference.files.fields import UnreadableCheckpoint
from specverify.reference.oracle.configuration import read_architecture
from specverify.reference.oracle.parameters import load
from tests.drawn_families import listed_architectures
from tests.published import CONFIGS


def reading(folder: Path, **changed: Any) -> Architecture:
    content = {name: value for name, value in {**CONFIGS["minimax-m2"], **changed}.items() if value is not ...}
    (folder / "config.json").write_text(json.dumps(content))
    return read_architecture(folder / "config.json")


@pytest.mark.parametrize(
    ("changed", "width"),
    [
        ({}, 8),
        ({"rotary_dim": ...}, 16),
        ({"rotary_dim": None}, 16),
        ({"partial_rotary_factor": 0.25}, 4),
        ({"rope_parameters": {"rope_type": "default", "rope_theta": 1e4, "partial_rotary_factor": 0.75}}, 12),
    ],
)
def test_the_width_of_rotary_embedding(changed: dict[str, Any], width: int, tmp_path: Path) -> None:
    assert reading(tmp_path, **changed).rotary_dim == width


@pytest.mark.parametrize(
    ("changed", "line"),
    [
        ({"use_qk_norm": False}, "use_qk_norm is False; the oracle computes True alone"),
        ({"scoring_func": "softmax"}, "scoring_func is 'softmax'"),
        ({"shared_intermediate_size": 64}, "shared_intermediate_size is 64"),
        ({"attn_type_list": [1, 0, 1, 1]}, "attn_type_list names layers without attention"),
        ({"sliding_window": 8}, "minimax_m2 has no sliding_window"),
        ({"rotary_dim": 0}, "partial_rotary_factor is 0.0"),
    ],
    ids=lambda value: next(iter(value)) if isinstance(value, dict) else "",
)
def test_what_cannot_be_computed_is_refused(changed: dict[str, Any], line: str, tmp_path: Path) -> None:
    with pytest.raises(UnreadableCheckpoint, match=line):
        reading(tmp_path, **changed)


def test_a_norm_runs_over_all_heads_of_a_row() -> None:
    """All heads together have the root mean square 1 behind the norm, and a single head has another one."""
    arch = listed_architectures("minimax_m2")[1]
    parameters = load(Seeded(arch, 0), "float64")
    rows = np.random.default_rng(0).normal(size=(6, arch.hidden_size))
    gain = parameters.state["model.layers.0.self_attn.q_norm.weight"]
    queries = parameters.project(0, "q", rows).reshape(6, -1) / gain
    assert np.allclose(np.square(queries).mean(axis=1), 1, atol=1e-4)
    assert np.abs(np.square(queries.reshape(6, arch.heads, -1)).mean(axis=2) - 1).max() > 0.2
