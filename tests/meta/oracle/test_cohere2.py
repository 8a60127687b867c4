"""Cohere 2: its fields, and norms that subtract the mean, which the transparent probe sees through all the same."""

import json
from dataclasses import replace
from pathlib import Path
from typing import Any

import numpy as np
import pytest

from specverify.backends.base import Unsupported
from specverify.backends.compositions import open_cpu
from specverify.reference.architecture import Architecture, Seeded
from specverify.reference.case import Case
from specverify.reference.draft import Scripted
from specverify.reference.family.cohere2 import Cohere2Settings
from specverify.reference.files.fields import UnreadableCheckpoint
from specverify.reference.oracle.configuration import read_architecture
from specverify.reference.oracle.parameters import load
from specverify.reference.weights import probe_architecture
from tests.drawn_families import listed_architectures
from tests.published import CONFIGS


def reading(folder: Path, **changed: Any) -> Architecture:
    content = {name: value for name, value in {**CONFIGS["command-r7b"], **changed}.items() if value is not ...}
    (folder / "config.json").write_text(json.dumps(content))
    return read_architecture(folder / "config.json")


def test_the_published_config_is_read(tmp_path: Path) -> None:
    arch = reading(tmp_path)
    assert (arch.windows, arch.unrotated) == ((8, 8, 8, 0), (3,))
    assert (arch.norm_eps, arch.tied, arch.rope.theta) == (1e-5, True, 50000.0)
    assert Cohere2Settings.of(arch).logit_scale == 0.25
    assert reading(tmp_path, sliding_window_pattern=2).unrotated == (1, 3)
    named = reading(tmp_path, layer_types=["full_attention", *["sliding_attention"] * 3])
    assert (named.windows, named.unrotated) == ((0, 8, 8, 8), (0,))
    assert Cohere2Settings.of(reading(tmp_path, logit_scale=...)).logit_scale == 0.0625


@pytest.mark.parametrize(
    ("changed", "line"),
    [
        ({"use_qk_norm": True}, "use_qk_norm is True; the oracle computes False alone"),
        ({"use_parallel_block": False}, "use_parallel_block is False"),
        ({"rotary_pct": 0.5}, "rotary_pct is 0.5"),
        ({"logit_scale": 0.0}, "logit_scale is 0.0, not positive"),
        ({"sliding_window": None}, "sliding_window"),
        ({"sliding_window_pattern": 0}, "sliding_window_pattern is 0"),
    ],
    ids=lambda value: next(iter(value)) if isinstance(value, dict) else "",
)
def test_what_cannot_be_computed_is_refused(changed: dict[str, Any], line: str, tmp_path: Path) -> None:
    with pytest.raises(UnreadableCheckpoint, match=line):
        reading(tmp_path, **changed)


def test_the_rows_of_the_probe_have_no_mean() -> None:
    """A mean other than zero would be subtracted from every code of a row, and no logit would be zero."""
    arch = listed_architectures("cohere2")[0]
    state = load(Seeded(probe_architecture(arch), 0, "transparent", 1), "float64").state
    assert not state["model.embed_tokens.weight"].mean(axis=1).any()
    assert np.abs(state["model.layers.1.self_attn.o_proj.weight"].sum(axis=0)).max() == 0


def test_a_window_and_rotary_embedding_belong_together() -> None:
    arch = replace(listed_architectures("cohere2")[0], unrotated=())
    with pytest.raises(Unsupported, match="exactly the layers without a window lack rotary embedding"):
        open_cpu().run(Case(Seeded(arch, 0), (1, 2), Scripted()))
