"""A config.json means what its family means in transformers, and asks in vain by name."""

import json
import re
from collections.abc import Callable
from dataclasses import replace
from pathlib import Path
from typing import Any

import pytest
from transformers import LlamaConfig, MistralConfig, Qwen2Config, Qwen3Config

from specverify.reference.architecture import Architecture, Rope
from specverify.reference.files.fields import LARGEST_SIZE
from specverify.reference.oracle.configuration import UnreadableCheckpoint, read_architecture, read_sizes
from tests.models import TWO_LAYERS

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
QWEN2 = {**LLAMA, "model_type": "qwen2"}
MISTRAL = {**LLAMA, "model_type": "mistral"}
PANGU = {**LLAMA, "model_type": "PanguEmbedded"}

# Rope dictionaries and layer types that several tests use, without the field that names the variant.
TYPES = ["full_attention", "sliding_attention"]
YARN = {"factor": 4.0, "original_max_position_embeddings": 16}
BAND = {"factor": 8, "low_freq_factor": 1, "high_freq_factor": 4, "original_max_position_embeddings": 32}
FACTORS = {"short_factor": [1, 1.5], "long_factor": [2, 3]}


def without(config: dict[str, Any], *names: str) -> dict[str, Any]:
    return {name: value for name, value in config.items() if name not in names}


def longrope(**fields: Any) -> Rope:
    return Rope(kind="longrope", short_factor=(1.0, 1.5), long_factor=(2.0, 3.0), **fields)


CONFIGS: list[tuple[str, dict[str, Any], dict[str, Any]]] = [
    ("llama", LLAMA, {}),
    ("llama kv default", without(LLAMA, "num_key_value_heads"), {"kv_heads": 2}),
    ("llama kv null", {**LLAMA, "num_key_value_heads": None}, {"kv_heads": 2}),
    ("llama head_dim", {**LLAMA, "head_dim": 6}, {"head_dim": 6}),
    ("llama eps default", without(LLAMA, "rms_norm_eps"), {"norm_eps": 1e-6}),
    ("llama positions default", without(LLAMA, "max_position_embeddings"), {"max_positions": 2048}),
    ("llama attention_bias", {**LLAMA, "attention_bias": True}, {"qkv_bias": True, "output_bias": True}),
    ("llama mlp_bias", {**LLAMA, "mlp_bias": True}, {"mlp_bias": True}),
    ("llama tied", {**LLAMA, "tie_word_embeddings": True}, {"tied": True}),
    ("llama theta", {**LLAMA, "rope_theta": 500}, {"rope": Rope(theta=500.0)}),
    ("llama no windows", {**LLAMA, "sliding_window": None}, {}),
    ("pangu", PANGU, {"family": "pangu", "qkv_bias": True, "output_bias": True, "rope": Rope(theta=16e6)}),
    (
        "pangu alias and bias false",
        {**PANGU, "model_type": "pangu_embedded", "bias": False, "rope_theta": 100},
        {"family": "pangu", "rope": Rope(theta=100.0)},
    ),
    (
        "pangu eps default",
        without(PANGU, "rms_norm_eps"),
        {"family": "pangu", "qkv_bias": True, "output_bias": True, "rope": Rope(theta=16e6), "norm_eps": 1e-5},
    ),
    ("qwen2", QWEN2, {"family": "qwen2", "qkv_bias": True}),
    ("qwen2 window unused", {**QWEN2, "sliding_window": 5}, {"family": "qwen2", "qkv_bias": True}),
    (
        "qwen2 windows",
        {**QWEN2, "sliding_window": 5, "use_sliding_window": True, "max_window_layers": 1},
        {"family": "qwen2", "qkv_bias": True, "windows": (0, 5)},
    ),
    (
        "qwen2 windows from layer 28",
        {**QWEN2, "sliding_window": 5, "use_sliding_window": True},
        {"family": "qwen2", "qkv_bias": True},
    ),
    (
        "qwen2 window default",
        {**QWEN2, "use_sliding_window": True, "max_window_layers": 1},
        {"family": "qwen2", "qkv_bias": True, "windows": (0, 4096)},
    ),
    ("qwen3", QWEN3, {"family": "qwen3", "qk_norm": True}),
    ("qwen3 head_dim default", without(QWEN3, "head_dim"), {"family": "qwen3", "qk_norm": True, "head_dim": 128}),
    (
        "qwen3 bias",
        {**QWEN3, "attention_bias": True},
        {"family": "qwen3", "qk_norm": True, "qkv_bias": True, "output_bias": True},
    ),
    (
        "qwen3 layer_types over max_window_layers",
        {**QWEN3, "sliding_window": 5, "use_sliding_window": True, "max_window_layers": 0, "layer_types": TYPES},
        {"family": "qwen3", "qk_norm": True, "windows": (0, 5)},
    ),
    ("mistral window", {**MISTRAL, "sliding_window": 7}, {"family": "mistral", "windows": (7, 7)}),
    ("mistral null", {**MISTRAL, "sliding_window": None}, {"family": "mistral"}),
    ("mistral default", MISTRAL, {"family": "mistral", "windows": (4096, 4096)}),
    (
        "linear v4",
        {**LLAMA, "rope_theta": 500.0, "rope_scaling": {"type": "linear", "factor": 2}},
        {"rope": Rope(500.0, "linear", 2.0)},
    ),
    (
        "dynamic v5",
        {**LLAMA, "rope_parameters": {"rope_type": "dynamic", "factor": 2.0, "rope_theta": 500.0}},
        {"rope": Rope(500.0, "dynamic", 2.0)},
    ),
    ("default v5", {**LLAMA, "rope_parameters": {"rope_type": "default", "rope_theta": 9.0}}, {"rope": Rope(9.0)}),
    (
        "v4 wins, dictionary's theta wins",
        {
            **LLAMA,
            "rope_theta": 7.0,
            "rope_scaling": {"rope_type": "linear", "type": "dynamic", "factor": 2.0, "rope_theta": 8.0},
            "rope_parameters": {"rope_type": "default", "rope_theta": 9.0},
        },
        {"rope": Rope(8.0, "linear", 2.0)},
    ),
    ("yarn", {**LLAMA, "rope_scaling": {"type": "yarn", **YARN}}, {"rope": Rope(kind="yarn", factor=4.0, original=16)}),
    (
        "yarn options",
        {
            **LLAMA,
            "rope_scaling": {
                **{"type": "yarn", **YARN, "beta_fast": 20, "beta_slow": 2, "truncate": False},
                **{"mscale": 0.5, "mscale_all_dim": 0.6, "attention_factor": 1.5},
            },
        },
        {
            "rope": Rope(
                kind="yarn", factor=4.0, original=16, beta_fast=20.0, beta_slow=2.0, truncate=False,
                mscale=0.5, mscale_all_dim=0.6, attention_factor=1.5,
            )
        },
    ),
    (
        "yarn factor null, original outside wins",
        {**LLAMA, "original_max_position_embeddings": 32, "rope_scaling": {"type": "yarn", **YARN, "factor": None}},
        {"rope": Rope(kind="yarn", factor=2.0, original=32)},
    ),
    (
        "llama3",
        {**LLAMA, "rope_scaling": {"rope_type": "llama3", **BAND}},
        {"rope": Rope(kind="llama3", factor=8.0, original=32, low_freq_factor=1.0, high_freq_factor=4.0)},
    ),
    (
        "longrope",
        {**LLAMA, "rope_scaling": {"type": "longrope", **FACTORS, "original_max_position_embeddings": 16}},
        {"rope": longrope(factor=4.0, original=16)},
    ),
    (
        "longrope original default",
        {**LLAMA, "rope_scaling": {"type": "longrope", **FACTORS, "factor": 3}},
        {"rope": longrope(factor=3.0, original=64)},
    ),
]  # fmt: skip


def read_content(root: Path, content: object) -> Architecture:
    (root / "config.json").write_text(json.dumps(content))
    return read_architecture(root / "config.json")


@pytest.mark.parametrize(("config", "fields"), [entry[1:] for entry in CONFIGS], ids=[entry[0] for entry in CONFIGS])
def test_config_means_what_its_family_means(tmp_path: Path, config: dict[str, Any], fields: dict[str, Any]) -> None:
    assert read_content(tmp_path, config) == replace(TWO_LAYERS, **fields)


@pytest.mark.parametrize(
    ("model_type", "default"), [("qwen2", 32), ("qwen3", 32), ("mistral", 8), ("PanguEmbedded", 8)]
)
def test_kv_heads_left_out_are_the_familys_default(tmp_path: Path, model_type: str, default: int) -> None:
    config = {**LLAMA, "model_type": model_type, "num_attention_heads": 64, "head_dim": 2}
    assert read_content(tmp_path, without(config, "num_key_value_heads")).kv_heads == default


REQUIRED = without(LLAMA, "num_key_value_heads", "max_position_embeddings", "rms_norm_eps")


@pytest.mark.parametrize("slides", [False, True])
@pytest.mark.parametrize("family", [LlamaConfig, Qwen2Config, Qwen3Config, MistralConfig])
def test_all_that_is_left_out_is_what_transformers_takes(tmp_path: Path, family: Any, slides: bool) -> None:
    """The last two of 30 layers slide by Qwen's default, where anything slides."""
    content = {**REQUIRED, "model_type": family.model_type, "num_hidden_layers": 30}
    content |= {"hidden_size": 128, "num_attention_heads": 64}
    content |= {"use_sliding_window": slides} if "qwen" in family.model_type else {}
    transformers_config, arch = family(**without(content, "model_type")), read_content(tmp_path, content)
    assert (arch.kv_heads, arch.max_positions) == (
        transformers_config.num_key_value_heads,
        transformers_config.max_position_embeddings,
    )
    assert (arch.norm_eps, arch.tied) == (transformers_config.rms_norm_eps, transformers_config.tie_word_embeddings)
    assert arch.head_dim == (getattr(transformers_config, "head_dim", None) or transformers_config.hidden_size // 64)
    assert {"rope_type": arch.rope.kind, "rope_theta": arch.rope.theta} == transformers_config.rope_parameters
    window = getattr(transformers_config, "sliding_window", None) or 0
    if "qwen" in family.model_type:
        sliding = [kind == "sliding_attention" for kind in transformers_config.layer_types]
        assert sum(sliding) == 2 * slides
        assert arch.windows == tuple(window * is_sliding for is_sliding in sliding)
    else:
        assert arch.windows == (window,) * 30


def with_fields(**fields: Any) -> dict[str, Any]:
    return {**LLAMA, **fields}


def with_scaling(**fields: Any) -> dict[str, Any]:
    return {**LLAMA, "rope_scaling": fields}


REFUSED: list[tuple[str, object, str]] = [
    ("family", with_fields(model_type="mamba"),
     r"does not compute model_type 'mamba', since its .* \(it knows .*against"),
    ("no family", without(LLAMA, "model_type"), r"does not compute model_type None"),
    ("family a list", with_fields(model_type=["llama"]), r"does not compute model_type \['llama'\]"),
    ("size missing", without(LLAMA, "hidden_size"), r"field hidden_size is missing; add"),
    ("size a word", with_fields(vocab_size="11"), r"field vocab_size is '11', not a number; correct"),
    ("size a fraction", with_fields(intermediate_size=1.5), r"field intermediate_size is 1.5, not a whole number"),
    ("size true", with_fields(num_attention_heads=True), r"field num_attention_heads is True, not a number"),
    ("size zero", with_fields(num_attention_heads=0), r"heads: 0 is not a size; correct"),
    ("no layers", with_fields(num_hidden_layers=0), r"num_hidden_layers is 0; correct"),
    ("flag a word", with_fields(tie_word_embeddings="no"), r"tie_word_embeddings is 'no', neither true nor false"),
    ("uneven heads", with_fields(hidden_size=12, num_attention_heads=3, num_key_value_heads=2),
     r"3 heads do not share 2"),
    ("activation", with_fields(hidden_act="gelu"), r"computes hidden_act 'silu', not 'gelu'; compare --against"),
    ("activation null", with_fields(hidden_act=None), r"computes hidden_act 'silu', not None"),
    ("quantized", with_fields(quantization_config={"quant_method": "awq"}), r"quantization_config asks for quantized"),
    ("partial rotary", with_fields(partial_rotary_factor=0.5), r"partial_rotary_factor is not supported"),
    ("partial rotary inside", with_scaling(type="linear", factor=2.0, partial_rotary_factor=0.5),
     r"partial_rotary_factor"),
    ("rope type", with_scaling(type="su", factor=2.0), r"rope.kind: 'su' is none of default, linear"),
    ("rope type a number", with_scaling(type=3, factor=2.0), r"rope.kind: '3' is none of default, linear"),
    ("rope field", with_scaling(type="default", mrope_section=[1, 1]), r"rope field 'mrope_section' is not supported"),
    ("rope by layer type", with_scaling(full_attention={"rope_type": "default"}),
     r"rope field 'full_attention' is not"),
    ("rope not a dictionary", with_fields(rope_scaling="yarn"), r"rope dictionary is 'yarn', not an object"),
    ("rope factor missing", with_scaling(type="linear"), r"field factor is missing"),
    ("rope factor below one", with_scaling(type="linear", factor=0.5), r"rope.factor: 0.5 does not stretch"),
    ("yarn factor missing", with_scaling(type="yarn", original_max_position_embeddings=16), r"field factor is missing"),
    ("llama3 band missing", with_scaling(type="llama3", **without(BAND, "low_freq_factor")),
     r"field low_freq_factor is"),
    ("attention factor zero", with_scaling(type="yarn", **YARN, attention_factor=0),
     r"attention_factor is not positive"),
    ("longrope list short", with_scaling(type="longrope", **{**FACTORS, "short_factor": [1]}),
     r"short_factor: 1 factors"),
    ("longrope no list", with_scaling(type="longrope", **{**FACTORS, "long_factor": 3}),
     r"long_factor is not a list of num"),
    ("llama window", with_fields(sliding_window=4), r"llama has no sliding_window; remove"),
    ("llama layer_types", with_fields(layer_types=TYPES), r"layer_types contradicts sliding_window"),
    ("layer_types unknown", with_fields(layer_types=["chunked_attention"] * 2), r"layer_types must say full_attention"),
    ("layer_types short", with_fields(layer_types=TYPES[:1]), r"layer_types must say full_attention or .* 2 layers"),
    ("slides without window", with_fields(model_type="qwen2", layer_types=TYPES), r"without a sliding_window; set"),
    ("window zero", with_fields(model_type="mistral", sliding_window=0), r"sliding_window is 0; correct"),
    ("a list", [1], r"holds no JSON object; download"),
]  # fmt: skip


def assert_one_line(problem: UnreadableCheckpoint, where: Path) -> None:
    line = str(problem)
    assert line.startswith(str(where))
    assert "\n" not in line
    assert re.search(r"; \S|--against", line), f"does not say what to do: {line}"


@pytest.mark.parametrize(("config", "line"), [entry[1:] for entry in REFUSED], ids=[entry[0] for entry in REFUSED])
def test_what_cannot_be_computed_is_refused_in_one_line(tmp_path: Path, config: object, line: str) -> None:
    with pytest.raises(UnreadableCheckpoint, match=line) as caught:
        read_content(tmp_path, config)
    assert_one_line(caught.value, tmp_path / "config.json")


def test_sizes_are_read_off_any_config(tmp_path: Path) -> None:
    """Of a model that the oracle does not compute, for a run against another backend."""
    where = tmp_path / "config.json"
    content = {"model_type": "mamba", "vocab_size": 11, "max_position_embeddings": 64}
    where.write_text(json.dumps(content))
    assert read_sizes(where) == (11, 64)
    where.write_text(json.dumps({**content, "vocab_size": 1, "max_position_embeddings": 1}))
    assert read_sizes(where) == (1, 1)
    where.write_text(json.dumps({**content, "max_position_embeddings": None}))
    assert read_sizes(where) == (11, LARGEST_SIZE), "a model without positions states no longest sequence"
    for name in ("vocab_size", "max_position_embeddings"):
        for value in (0, -1, True, 2.0, "11", *((None,) if name == "vocab_size" else ())):
            where.write_text(json.dumps({**content, name: value}))
            with pytest.raises(UnreadableCheckpoint, match=f"field {name} is (missing|{value!r}, not a )") as caught:
                read_sizes(where)
            assert_one_line(caught.value, where)


def missing(where: Path) -> None:
    """Leaves no file."""


@pytest.mark.parametrize(
    ("make", "line"),
    [
        (missing, r"config\.json is missing; point to"),
        (Path.mkdir, r"config\.json: cannot be read \(Is a directory\); download"),
        (lambda where: where.write_bytes(b"{"), r"config\.json: not JSON; download"),
        (lambda where: where.write_bytes(b""), r"config\.json: not JSON; download"),
        (lambda where: where.write_bytes(b"\xff\xfe\x00"), r"config\.json: not JSON; download"),
        (lambda where: where.write_bytes(b"[" * 100000), r"config\.json: not JSON; download"),
    ],
)
def test_no_readable_json_is_refused_in_one_line(tmp_path: Path, make: Callable[[Path], Any], line: str) -> None:
    make(tmp_path / "config.json")
    with pytest.raises(UnreadableCheckpoint, match=line) as caught:
        read_architecture(tmp_path / "config.json")
    assert_one_line(caught.value, tmp_path)
