"""Checkpoint directories are read exactly, rounded as torch rounds, and known by their content."""

import json
import re
from dataclasses import replace
from pathlib import Path
from typing import Any

import numpy as np
import pytest
import torch
from safetensors.torch import load_file, save_file
from transformers import AutoModelForCausalLM

from specverify.reference.architecture import Architecture, Checkpoint, Rope, Seeded
from specverify.reference.malformed import Malformed
from specverify.reference.oracle.checkpoint import UnreadableCheckpoint, identify, read_checkpoint
from specverify.reference.oracle.model import PathByPath
from specverify.reference.oracle.parameters import load, round_to
from specverify.reference.tree import Tree
from specverify.reference.weights import seeded_weights, shapes
from tests.models import TWO_LAYERS

DTYPES = {"bfloat16": torch.bfloat16, "float16": torch.float16, "float32": torch.float32, "float64": torch.float64}

LLAMA: dict[str, Any] = {
    "model_type": "llama",
    "vocab_size": 11,
    "hidden_size": 8,
    "intermediate_size": 12,
    "num_hidden_layers": 2,
    "num_attention_heads": 2,
    "num_key_value_heads": 1,
    "max_position_embeddings": 64,
    "rms_norm_eps": 1e-5,
}
QWEN3 = {**LLAMA, "model_type": "qwen3", "head_dim": 4}


def draw_weights(arch: Architecture, dtype: str = "float32") -> dict[str, torch.Tensor]:
    """Weights that need every bit of `dtype`."""
    rng = np.random.default_rng(5)
    return {name: torch.tensor(rng.normal(size=shape)).to(DTYPES[dtype]) for name, shape in shapes(arch).items()}


def write_checkpoint(
    root: Path,
    arch: Architecture = TWO_LAYERS,
    dtype: str = "float32",
    config: dict[str, Any] | None = None,
    shards: int = 1,
) -> dict[str, torch.Tensor]:
    """Writes a checkpoint directory with Hugging Face's own library; returns its tensors."""
    root.mkdir(exist_ok=True)
    (root / "config.json").write_text(json.dumps(LLAMA if config is None else config))
    state = draw_weights(arch, dtype)
    if shards == 1:
        save_file(state, root / "model.safetensors", metadata={"format": "pt"})
        return state
    placed = {name: f"model-{index % shards + 1:05}-of-{shards:05}.safetensors" for index, name in enumerate(state)}
    for shard in set(placed.values()):
        save_file({name: state[name] for name in state if placed[name] == shard}, root / shard)
    (root / "model.safetensors.index.json").write_text(json.dumps({"metadata": {}, "weight_map": placed}))
    return state


@pytest.mark.parametrize("shards", [1, 3])
@pytest.mark.parametrize("dtype", DTYPES)
def test_weights_come_back_exactly(tmp_path: Path, dtype: str, shards: int) -> None:
    state = write_checkpoint(tmp_path, dtype=dtype, shards=shards)
    arch, weights = read_checkpoint(str(tmp_path))
    assert arch == TWO_LAYERS
    assert weights.keys() == state.keys()
    for name, values in weights.items():
        assert values.dtype == np.float64
        np.testing.assert_array_equal(values, state[name].double().numpy())


def test_bfloat16_is_widened_bit_by_bit(tmp_path: Path) -> None:
    state = write_checkpoint(tmp_path, dtype="bfloat16")
    # Both signs of zero, subnormal numbers, and the largest; those from 0x7F80 on are infinite or not a number.
    bits = torch.arange(44, dtype=torch.int32) * 759
    assert bits[-1] < 0x7F80
    state["lm_head.weight"] = torch.cat([bits, bits + 0x8000]).to(torch.uint16).view(torch.bfloat16).reshape(11, 8)
    save_file(state, tmp_path / "model.safetensors")
    np.testing.assert_array_equal(
        read_checkpoint(tmp_path)[1]["lm_head.weight"].view(np.uint64),
        state["lm_head.weight"].double().numpy().view(np.uint64),
    )


@pytest.mark.parametrize("stored", [False, True])
def test_a_tied_head_is_the_embedding(tmp_path: Path, stored: bool) -> None:
    state = write_checkpoint(tmp_path, replace(TWO_LAYERS, tied=True), config={**LLAMA, "tie_word_embeddings": True})
    if stored:
        state["lm_head.weight"] = state["model.embed_tokens.weight"].clone()
        save_file(state, tmp_path / "model.safetensors")
    arch, weights = read_checkpoint(tmp_path)
    assert arch.tied
    assert "lm_head.weight" not in weights
    checkpoint = identify(tmp_path)
    assert load(checkpoint, "float32").head.shape == (11, 8)


def test_rotary_buffers_of_old_checkpoints_are_passed_over(tmp_path: Path) -> None:
    state = write_checkpoint(tmp_path)
    state["model.layers.1.self_attn.rotary_emb.inv_freq"] = torch.ones(2)
    save_file(state, tmp_path / "model.safetensors")
    assert read_checkpoint(tmp_path)[1].keys() == shapes(TWO_LAYERS).keys()


def test_code_in_the_directory_is_never_run(tmp_path: Path) -> None:
    write_checkpoint(tmp_path, config={**LLAMA, "auto_map": {"AutoModelForCausalLM": "evil.Model"}})
    (tmp_path / "evil.py").write_text("raise SystemExit('ran')")
    assert read_checkpoint(tmp_path)[0] == TWO_LAYERS


def test_digest_is_of_config_and_weights_alone(tmp_path: Path) -> None:
    here, there = tmp_path / "here", tmp_path / "there"
    write_checkpoint(here)
    write_checkpoint(there)
    (there / "README.md").write_text("another file")
    checkpoint = identify(here)
    assert (checkpoint.vocab_size, checkpoint.max_positions, checkpoint.source) == (11, 64, str(here))
    assert re.fullmatch("sha256:[0-9a-f]{64}", checkpoint.digest)
    assert identify(there).digest == checkpoint.digest
    write_checkpoint(there, config={**LLAMA, "rms_norm_eps": 1e-4})
    assert identify(there).digest != checkpoint.digest
    write_checkpoint(there)
    state = load_file(there / "model.safetensors")
    save_file(
        {name: values * 2 if name == "model.norm.weight" else values for name, values in state.items()},
        there / "model.safetensors",
    )
    assert identify(there).digest != checkpoint.digest
    write_checkpoint(tmp_path / "sharded", shards=2)
    digest = identify(tmp_path / "sharded").digest
    shard = tmp_path / "sharded" / "model-00002-of-00002.safetensors"
    raw = bytearray(shard.read_bytes())
    raw[-1] ^= 1
    shard.write_bytes(raw)
    assert identify(tmp_path / "sharded").digest != digest


def test_another_checkpoint_than_the_cases_is_refused(tmp_path: Path) -> None:
    write_checkpoint(tmp_path)
    with pytest.raises(UnreadableCheckpoint, match="the case was made with sha256:0; point"):
        load(Checkpoint(str(tmp_path), "sha256:0", 11, 64), "float32")


@pytest.mark.parametrize("dtype", DTYPES)
def test_weights_are_rounded_as_torch_rounds(tmp_path: Path, dtype: str) -> None:
    state = write_checkpoint(tmp_path, dtype="float64")
    weights = load(identify(tmp_path), dtype).state
    for name, values in state.items():
        np.testing.assert_array_equal(weights[name], values.to(DTYPES[dtype]).double().numpy())
        assert not weights[name].flags.writeable


@pytest.mark.parametrize("dtype", DTYPES)
def test_rounding_goes_to_even(dtype: str) -> None:
    step = {"bfloat16": 2.0**-7, "float16": 2.0**-10, "float32": 2.0**-23, "float64": 2.0**-52}[dtype]
    values = np.array([1 + step / 2, 1 + step * 1.5, -1 - step / 2, 0.0, -0.0, 2.0**-24, 2.0**-25, 1e-30, 1e-42])
    expected = torch.tensor(values).to(DTYPES[dtype]).double().numpy()
    np.testing.assert_array_equal(round_to(values, dtype), expected)


@pytest.mark.parametrize(("dtype", "largest"), [("float16", 65504.0), ("bfloat16", 3.3895e38), ("float32", 3.4028e38)])
def test_a_weight_too_large_for_the_dtype_is_refused(dtype: str, largest: float) -> None:
    assert np.isfinite(round_to(np.array([largest]), dtype)).all()
    with pytest.raises(Malformed, match=f"too large for {dtype}"):
        round_to(np.array([1.0, largest * 1.01]), dtype)


def test_seeded_weights_are_exact_in_every_dtype() -> None:
    model = Seeded(TWO_LAYERS, 3)
    for name, values in seeded_weights(model).items():
        for dtype in DTYPES:
            np.testing.assert_array_equal(round_to(values, dtype), values, err_msg=name)
    assert load(model, "bfloat16").state is seeded_weights(model)
    assert load(model, "bfloat16") is load(Seeded(TWO_LAYERS, 3), "float16")


def test_from_pretrained_gives_the_same_logits(tmp_path: Path) -> None:
    arch = replace(TWO_LAYERS, family="qwen3", qk_norm=True, tied=True, windows=(0, 3), rope=Rope(500.0, "linear", 2.0))
    config = {
        **QWEN3, "tie_word_embeddings": True, "use_sliding_window": True, "sliding_window": 3, "max_window_layers": 1,
        "rope_theta": 500.0, "rope_scaling": {"type": "linear", "factor": 2.0},
    }  # fmt: skip
    write_checkpoint(tmp_path, arch, "bfloat16", config, shards=2)
    tokens = (1, 4, 9, 2, 2, 7, 10, 3)
    model = AutoModelForCausalLM.from_pretrained(tmp_path, dtype=torch.float64)
    with torch.no_grad():
        expected = model(torch.tensor([tokens])).logits[0, -1].numpy()
    parameters = load(identify(tmp_path), "bfloat16")
    assert parameters.architecture == arch
    actual = PathByPath(parameters).nodes(tokens[:-1], Tree((0,), tokens[-1:])).logits[0]
    # Hugging Face's norms and rotary tables stay in float32 here.
    np.testing.assert_allclose(actual, expected, rtol=0, atol=2e-5)
