"""The weights that a seed denotes: drawn anew by their definition, and held by a digest for every version."""

import hashlib
import math
from dataclasses import replace

import numpy as np
import pytest

from specverify.reference.architecture import Architecture, Seeded
from specverify.reference.malformed import Malformed
from specverify.reference.weights import (
    PROBE_CODES,
    permutation,
    probe_architecture,
    representable,
    seeded_weights,
    shapes,
)

LLAMA = Architecture("llama", 11, 8, 12, 2, 1, 4, (0, 0))
QWEN3 = Architecture("qwen3", 11, 8, 12, 2, 1, 4, (0,), tied=True, qk_norm=True)
PANGU = Architecture("pangu", 11, 8, 12, 2, 2, 4, (3,), qkv_bias=True, output_bias=True, mlp_bias=True)
LLAMA4 = Architecture("llama4", 11, 8, 12, 4, 2, 4, (0, 0), qk_norm=True, chunks=(4, 0), unrotated=(1,), floor_scale=3)

MODELS = {
    "llama": Seeded(LLAMA, 1),
    "qwen3": Seeded(QWEN3, 2),
    "pangu": Seeded(PANGU, 3),
    "llama4": Seeded(LLAMA4, 4),
    "renamed": Seeded(LLAMA, 1, relabel=5),
    "renamed and tied": Seeded(QWEN3, 2, relabel=5),
    "probe": Seeded(probe_architecture(LLAMA4), 0, "transparent", 1),
}

DIGESTS = {
    "llama": "7490a33391b7a598",
    "qwen3": "ed7b2a8c1c63bcb0",
    "pangu": "588f6db490d28d9e",
    "llama4": "4bab243edabba763",
    "renamed": "81e37088b7711db2",
    "renamed and tied": "45067bc51af263e6",
    "probe": "d223a793cba71f9a",
}
"""SHA-256, cut short, of every tensor in order of names: a saved case means these weights on every machine."""


def digest(model: Seeded) -> str:
    hasher = hashlib.sha256()
    for name, array in sorted(seeded_weights(model).items()):
        hasher.update(f"{name} {array.shape} {array.dtype}".encode())
        hasher.update(np.ascontiguousarray(array).astype("<f8").tobytes())
    return hasher.hexdigest()[:16]


def spread(arch: Architecture, name: str, width: int) -> float:
    """Standard deviation of a tensor's numbers: norms 0.1, biases 0.3; what it makes of unit rows has 1, logits 3."""
    if name.endswith("norm.weight"):
        return 0.1
    if name.endswith("bias"):
        return 0.3
    if "embed_tokens" in name:
        return 3 / math.sqrt(width) if arch.tied else 1.0
    return (3 if name == "lm_head.weight" else 1) / math.sqrt(width)


@pytest.mark.parametrize("name", MODELS)
def test_a_seed_denotes_the_same_weights_for_ever(name: str) -> None:
    assert digest(MODELS[name]) == DIGESTS[name]


@pytest.mark.parametrize("arch", [LLAMA, QWEN3, PANGU, LLAMA4], ids=lambda arch: arch.family)
def test_weights_are_drawn_one_tensor_after_the_other(arch: Architecture) -> None:
    draw = np.random.default_rng(7)
    state = seeded_weights(Seeded(arch, 7))
    assert list(state) == list(shapes(arch))
    for name, array in state.items():
        noise = draw.normal(size=array.shape)
        expected = noise * spread(arch, name, array.shape[-1]) + name.endswith("norm.weight")
        np.testing.assert_allclose(array, expected, rtol=2.0**-8, atol=2.0**-16)
        np.testing.assert_array_equal(array, representable(array))
        assert not array.flags.writeable


def test_a_relabelled_model_is_the_same_under_other_names() -> None:
    for arch in (LLAMA, QWEN3):
        plain, renamed = seeded_weights(Seeded(arch, 1)), seeded_weights(Seeded(arch, 1, relabel=9))
        names = permutation(9, 11)
        assert sorted(names) == list(range(11)) != names.tolist()
        assert renamed.keys() == plain.keys()
        for name in plain:
            moved = renamed[name][names] if "embed_tokens" in name or "lm_head" in name else renamed[name]
            np.testing.assert_array_equal(moved, plain[name])
    assert permutation(0, 4).tolist() == [0, 1, 2, 3]


def test_the_probe_keeps_what_decides_who_is_seen() -> None:
    for arch in (LLAMA4, replace(PANGU, tied=True, norm_eps=0.5, max_positions=77), replace(LLAMA4, attn_scale=0.5)):
        probe = probe_architecture(arch)
        for name in (
            *("family", "heads", "kv_heads", "windows", "norm_eps", "max_positions", "qkv_bias", "output_bias"),
            *("mlp_bias", "qk_norm", "chunks", "unrotated", "floor_scale", "attn_scale"),
        ):
            assert getattr(probe, name) == getattr(arch, name), name
        assert PROBE_CODES == probe.head_dim == 32
        assert probe.vocab_size == 32 * arch.heads + 1
        blocks = 32 * (arch.heads + 1)
        assert blocks <= probe.hidden_size < blocks + arch.heads
        assert probe.hidden_size % arch.heads == 0
        assert (probe.intermediate_size, probe.tied) == (2, False)


def test_the_probe_copies_codes_of_one_layer_into_the_block_of_each_head() -> None:
    """Token c is unit vector c - 1; values read it, and head h hands it on to block h + 1, which logits read."""
    probe = probe_architecture(replace(LLAMA4, qkv_bias=True))
    state = seeded_weights(Seeded(probe, 0, "transparent", 1))
    codes = np.zeros((probe.vocab_size, probe.hidden_size))
    codes[1:33, :32] = np.eye(32)
    np.testing.assert_array_equal(state["model.embed_tokens.weight"], codes)
    unit = np.zeros((2 * 32, probe.hidden_size))
    unit[:32, :32] = unit[32:, :32] = np.eye(32)
    np.testing.assert_array_equal(state["model.layers.1.self_attn.v_proj.weight"], unit)
    block = np.zeros((probe.hidden_size, 4 * 32))
    block[32:160] = np.eye(128)
    np.testing.assert_array_equal(state["model.layers.1.self_attn.o_proj.weight"], block)
    head = np.zeros((probe.vocab_size, probe.hidden_size))
    head[:128, 32:160] = np.eye(128)
    np.testing.assert_array_equal(state["lm_head.weight"], head)
    name_parts = ("embed_tokens", "layers.1.self_attn.v_proj.weight", "layers.1.self_attn.o_proj.weight", "lm_head")
    for name, array in state.items():
        if not any(part in name for part in name_parts):
            assert (array == float(name.endswith("norm.weight"))).all(), name


def test_noise_moves_each_weight_by_its_share_and_leaves_norms_and_the_clean_model() -> None:
    clean, noisy, noise_alone = (seeded_weights(Seeded(LLAMA, 1, noise=noise)) for noise in (0.0, 0.1, 1.0))
    assert all(np.array_equal(clean[name], array) for name, array in seeded_weights(MODELS["llama"]).items())
    for name, array in noisy.items():
        if name.endswith("norm.weight"):
            assert np.array_equal(array, clean[name])
            continue
        mixed = representable(math.sqrt(1 - 0.1**2) * clean[name] + 0.1 * noise_alone[name])
        np.testing.assert_array_equal(array, mixed)
        assert not np.array_equal(noise_alone[name], clean[name])


@pytest.mark.parametrize("noise", [-0.1, 1.1, math.nan])
def test_noise_is_a_share_of_margin_weights(noise: float) -> None:
    with pytest.raises(Malformed, match="is no share from 0 to 1 of margin weights"):
        Seeded(LLAMA, 1, noise=noise)
    with pytest.raises(Malformed, match="is no share"):
        replace(MODELS["probe"], noise=0.1)
