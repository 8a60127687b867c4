"""Llama 4 with experts: the temperature of a tree's rows, and what its config.json may say."""

import json
from dataclasses import replace
from pathlib import Path
from typing import Any

import pytest

from specverify.backends import faults
from specverify.backends.compositions import open_cpu
from specverify.backends.engine.model.family import FAMILIES
from specverify.campaign.against import TransformersOracle
from specverify.properties.invariants import ALL
from specverify.properties.verdict.judge import judge
from specverify.reference.architecture import Architecture, Seeded
from specverify.reference.case import Case
from specverify.reference.draft import Draft, Scripted
from specverify.reference.family.llama4 import Llama4TextSettings
from specverify.reference.oracle.configuration import UnreadableCheckpoint, read_architecture
from specverify.reference.oracle.decoder import Oracle
from specverify.reference.sampling import Stops
from specverify.reference.trace import Stage
from specverify.reference.tree import Tree
from specverify.setup.subjects import subject_of
from tests.checkpoints import save_checkpoint
from tests.drawn_families import listed_architectures
from tests.meta.oracle.test_against_transformers import case_of

CONTEXT = tuple(invariant for invariant in ALL if invariant.name == "attention.context-exact")
CHAIN, TREE = Scripted((Tree((0, 0, 1), (2, 5, 7)),)), Scripted((Tree((0, 0, 0, 1), (2, 5, 7, 3)),))


@pytest.mark.parametrize(("draft", "right"), [(CHAIN, True), (TREE, False)])
def test_transformers_own_temperature_is_right_for_a_chain_alone(
    draft: Draft, right: bool, monkeypatch: pytest.MonkeyPatch
) -> None:
    """The reference is transformers on whole sequences, where a row's index is its position."""
    arch = listed_architectures("llama4_text")[0]
    # The floor of 4 tokens lies between position and index of the second sibling.
    case = Case(Seeded(arch, 1), (1, 2, 3, 4, 9, 8, 7, 1, 0, 2), draft, stops=Stops(4))
    assert judge(case, CONTEXT, TransformersOracle(), subject_of(open_cpu())).findings == ()
    for name in ("llama4", "llama4_text"):  # what the engine mends stays as transformers has it
        monkeypatch.setitem(FAMILIES, name, replace(FAMILIES[name], prepare=lambda network: None))
    finding = judge(case, CONTEXT, TransformersOracle(), subject_of(open_cpu())).first
    assert (finding is None) == right
    assert finding is None or (finding.stage, finding.step) == (Stage.ATTENDED, 0)


def test_a_checkpoint_tempered_by_arrival_is_found_against_transformers(tmp_path: Path) -> None:
    backend = open_cpu()
    faults.plant(backend, faults.fault_named("query-temperature-by-arrival"))
    finding = judge(
        case_of(save_checkpoint("llama4", tmp_path)), CONTEXT, TransformersOracle(), subject_of(backend)
    ).first
    assert finding is not None
    assert (finding.invariant, finding.stage) == ("attention.context-exact", Stage.ATTENDED)


@pytest.mark.parametrize(
    "fault", ["expert-router-fed-sibling-row", "shared-expert-skipped-when-wide", "query-temperature-by-arrival"]
)
def test_faults_of_experts_and_temperatures_strike_here_too(fault: str) -> None:
    backend = open_cpu()
    faults.plant(backend, faults.fault_named(fault))
    case = Case(
        Seeded(listed_architectures("llama4_text")[0], 1),
        (1, 2, 3, 4, 9, 8, 7, 1, 0, 2),
        TREE,
        stops=Stops(4),
        dtype="float32",
    )
    assert judge(case, CONTEXT, Oracle(), subject_of(open_cpu())).findings == ()
    finding = judge(case, CONTEXT, Oracle(), subject_of(backend)).first
    assert finding is not None
    assert (finding.stage, finding.step) == (Stage.ATTENDED, 0)


CONFIG: dict[str, Any] = {
    "model_type": "llama4_text", "vocab_size": 11, "hidden_size": 8, "intermediate_size": 12,
    "intermediate_size_mlp": 20, "num_hidden_layers": 4, "num_attention_heads": 2, "num_key_value_heads": 1,
    "head_dim": 4, "num_local_experts": 2, "max_position_embeddings": 64,
}  # fmt: skip


def read(folder: Path, **fields: Any) -> Architecture:
    (folder / "config.json").write_text(json.dumps({**CONFIG, **fields}))
    return read_architecture(folder / "config.json")


def test_defaults_are_those_of_transformers(tmp_path: Path) -> None:
    arch = read(tmp_path)
    assert (arch.family, arch.intermediate_size) == ("llama4_text", 20)
    assert arch.settings == Llama4TextSettings(experts=2, experts_per_token=1, expert_size=12, sparse_step=1)
    assert (arch.chunks, arch.unrotated, arch.qk_norm) == ((8192, 8192, 8192, 0), (3,), True)
    assert (arch.floor_scale, arch.attn_scale, arch.rope.theta, arch.norm_eps) == (8192, 0.1, 500000.0, 1e-5)


@pytest.mark.parametrize(
    ("fields", "expected_fields"),
    [
        ({"no_rope_layers": []}, {"unrotated": (3,)}),
        ({"no_rope_layers": [0, 1, 1, 1], "attention_chunk_size": 6}, {"unrotated": (0,), "chunks": (0, 6, 6, 6)}),
        ({"layer_types": ["full_attention"] * 4, "attention_chunk_size": None}, {"chunks": ()}),
        ({"attn_temperature_tuning": False}, {"floor_scale": 0}),
        ({"no_rope_layers": [1, 1, 1, 1]}, {"unrotated": (), "floor_scale": 0}),
        ({"use_qk_norm": False, "attention_bias": True}, {"qk_norm": False, "qkv_bias": True, "output_bias": True}),
    ],
)
def test_fields_are_honoured(fields: dict[str, Any], expected_fields: dict[str, Any], tmp_path: Path) -> None:
    arch = read(tmp_path, **fields)
    assert {name: getattr(arch, name) for name in expected_fields} == expected_fields


@pytest.mark.parametrize(
    ("fields", "step"),
    [
        ({"interleave_moe_layer_step": 2}, 2),
        ({"moe_layers": [1, 3]}, 2),
        ({"moe_layers": []}, 0),
        ({"moe_layers": [0, 1, 2, 3], "interleave_moe_layer_step": 2}, 1),
    ],
)
def test_the_layers_with_experts_are_those_named(fields: dict[str, Any], step: int, tmp_path: Path) -> None:
    assert Llama4TextSettings.of(read(tmp_path, **fields)).sparse_step == step


@pytest.mark.parametrize(
    ("fields", "words"),
    [
        ({"moe_layers": [0, 3]}, r"moe_layers is \[0, 3\]; the oracle computes each so many layers alone"),
        ({"interleave_moe_layer_step": 0}, "interleave_moe_layer_step is 0"),
        ({"attention_chunk_size": None}, "attention_chunk_size is null, and layers have chunked attention"),
        ({"attention_chunk_size": 0}, "attention_chunk_size is 0"),
        ({"layer_types": ["sliding_attention"] * 4}, "layer_types must say full_attention or chunked_attention"),
        ({"sliding_window": 4}, "llama4_text has no sliding window"),
        ({"floor_scale": 0}, "floor_scale is 0"),
        ({"num_experts_per_tok": 3}, "experts_per_token of 3 with fewer experts"),
        ({"num_local_experts": 0}, "experts of 0.0 is not a whole number"),
    ],
)
def test_what_is_not_computed_is_refused_by_name(fields: dict[str, Any], words: str, tmp_path: Path) -> None:
    with pytest.raises(UnreadableCheckpoint, match=words):
        read(tmp_path, **fields)
