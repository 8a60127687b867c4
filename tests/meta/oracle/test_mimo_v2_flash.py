"""MiMo-V2-Flash: layers with other numbers of heads, and the fields of its first release, which are refused by name."""

import json
from dataclasses import replace
from pathlib import Path
from typing import Any

import pytest

from specverify.backends.base import Unsupported
from specverify.backends.compositions import open_cpu
from specverify.reference.architecture import Architecture, Rope, Seeded
from specverify.reference.case import Case
from specverify.reference.draft import Scripted
from specverify.reference.family.mimo_v2_flash import MiMoV2FlashSettings
from specverify.reference.family.settings import LayerHeads
from specverify.reference.files.fields import UnreadableCheckpoint
from specverify.reference.oracle.configuration import read_architecture
from specverify.reference.weights import shapes
from tests.drawn_families import listed_architectures
from tests.published import CONFIGS

PUBLISHED = CONFIGS["mimo-v2-flash"]


def reading(folder: Path, **changed: Any) -> Architecture:
    content = {name: value for name, value in {**PUBLISHED, **changed}.items() if value is not ...}
    (folder / "config.json").write_text(json.dumps(content))
    return read_architecture(folder / "config.json")


def test_layers_with_a_window_have_twice_the_heads_of_keys_and_sinks(tmp_path: Path) -> None:
    arch = reading(tmp_path)
    assert [arch.layer_heads(layer) for layer in (0, 1)] == [LayerHeads(1, 24, 16), LayerHeads(2, 24, 16)]
    table = shapes(arch)
    assert table["model.layers.0.self_attn.v_proj.weight"] == (16, 64)
    assert table["model.layers.1.self_attn.v_proj.weight"] == (32, 64)
    assert table["model.layers.1.self_attn.o_proj.weight"] == (64, 64)
    assert "model.layers.0.self_attn.sinks" not in table
    assert table["model.layers.1.self_attn.sinks"] == (4,)


def test_the_settings_are_those_of_the_fields(tmp_path: Path) -> None:
    arch = reading(tmp_path)
    settings = MiMoV2FlashSettings.of(arch)
    assert (arch.rope.theta, settings.local_theta, settings.rotary_dim) == (5e6, 1e4, 8)
    assert (settings.value_scale, settings.dense_layers) == (0.707, 1)
    assert MiMoV2FlashSettings.of(reading(tmp_path, attention_value_scale=None)).value_scale == 1.0
    assert MiMoV2FlashSettings.of(reading(tmp_path, mlp_layer_types=["sparse"] * 4)).dense_layers == 0
    assert reading(tmp_path, layer_types=...).windows == (0, 9, 9, 9)


@pytest.mark.parametrize(
    ("changed", "line"),
    [
        ({"hybrid_layer_pattern": [0, 1, 1, 1]}, "hybrid_layer_pattern is a field of the first release"),
        ({"sliding_window_size": 8}, "sliding_window_size is a field of the first release"),
        ({"swa_rope_theta": 1e4}, "swa_rope_theta is a field of the first release"),
        ({"rope_parameters": ..., "rope_theta": 1e4}, "rope_theta is a field of the first release"),
        ({"mlp_layer_types": ["sparse", "dense", "sparse", "sparse"]}, "computes dense layers first alone"),
        ({"add_full_attention_sink_bias": True}, "add_full_attention_sink_bias is True"),
        ({"rope_scaling": None}, "rope_scaling beside rope_parameters"),
    ],
    ids=lambda value: next(iter(value)) if isinstance(value, dict) else "",
)
def test_what_cannot_be_computed_is_refused(changed: dict[str, Any], line: str, tmp_path: Path) -> None:
    with pytest.raises(UnreadableCheckpoint, match=line):
        reading(tmp_path, **changed)


def test_transformers_has_no_variant_of_its_rotary_embedding() -> None:
    arch = listed_architectures("mimo_v2_flash")[0]
    stretched = replace(arch, rope=Rope(kind="linear", factor=2.0))
    with pytest.raises(Unsupported, match="a variant of rotary embedding"):
        open_cpu().run(Case(Seeded(stretched, 0), (1, 2), Scripted()))
