"""config.json files of small models, what transformers makes of each in float64, and what the oracle makes of it."""

import copy
import json
import warnings
from collections.abc import Iterator
from pathlib import Path
from typing import Any

import numpy as np
import torch
from transformers import AutoConfig, AutoModelForCausalLM
from transformers.utils import logging

from specverify.backends.transformers_reference import wide
from specverify.reference.files.fields import UnreadableCheckpoint
from specverify.reference.oracle.checkpoint import identify
from specverify.reference.oracle.configuration import read_architecture
from specverify.reference.oracle.model import PathByPath
from specverify.reference.oracle.parameters import load
from specverify.reference.trace import Array
from specverify.reference.weights import shapes
from tests.published import CONFIGS

Content = dict[str, Any]

TOKENS = tuple(int(token) for token in np.random.default_rng(0).integers(0, 64, 26))

ENDS = {"pad_token_id": None, "bos_token_id": None, "eos_token_id": None}

LARGEST = 3_000_000
"""Most weights of a model that is made; a field that is left out may mean a published size."""

GENERIC = {
    "architectures", "transformers_version", "dtype", "torch_dtype", "_name_or_path", "model_type", "id2label",
    "label2id", "use_cache", "return_dict", "problem_type", "chunk_size_feed_forward", "output_attentions",
    "output_hidden_states", "is_encoder_decoder", *ENDS,
}  # fmt: skip
"""Fields of every config that say nothing of the model."""

ROPES: dict[str, Content] = {
    "default": {},
    "linear": {"factor": 2.0},
    "dynamic": {"factor": 2.0},
    "yarn": {"factor": 4.0, "original_max_position_embeddings": 16},
    "llama3": {"factor": 8.0, "low_freq_factor": 1.0, "high_freq_factor": 4.0, "original_max_position_embeddings": 16},
    "longrope": {"original_max_position_embeddings": 64},
    "proportional": {},
}
"""The kinds of rotary embedding of transformers, each with what its dictionary must hold."""

ROPE_ADDED: Content = {
    "partial_rotary_factor": 0.5, "factor": 3.0, "attention_factor": 1.5, "mscale": 0.5, "mscale_all_dim": 0.7,
    "beta_fast": 4.0, "truncate": False, "alpha": 5.0, "llama_4_scaling_beta": 0.5, "mrope_section": [1, 1, 1],
    "type": "linear", "original_max_position_embeddings": 16, "unknown": 1,
}  # fmt: skip
"""Fields that are added to a rope dictionary without them."""

LAYER_TYPES = (["full_attention"] * 2, ["sliding_attention"] * 2, ["sliding_attention", "full_attention"])

ADDED: dict[str, tuple[Any, ...]] = {
    "sliding_window": (5, None, 0), "use_sliding_window": (True,), "attention_bias": (True,), "mlp_bias": (True,),
    "head_dim": (8, None), "layer_types": (None, *LAYER_TYPES), "partial_rotary_factor": (0.5, None),
    "tie_word_embeddings": (True,), "attention_chunk_size": (6,), "rope_theta": (500.0,), "is_causal": (False,),
    "rope_scaling": (None, {}, {"rope_type": "linear", "factor": 2.0}, {"type": "dynamic", "factor": 2.0}),
    "rope_parameters": (None, {}), "max_window_layers": (1,), "num_key_value_heads": (None,), "hidden_act": ("gelu",),
    "attention_multiplier": (0.3,), "embedding_multiplier": (3.0,), "residual_multiplier": (0.3,),
    "logits_scaling": (3.0,), "final_logit_softcapping": (3.0,), "attn_logit_softcapping": (2.0,),
    "per_layer_config": ({}, {"0": {"head_dim": 8}}), "enable_moe_block": (True,), "global_head_dim": (12,),
    "use_qk_norm": (True, False), "no_rope_layers": ([1, 0],), "norm_topk_prob": (True, False, None),
    "mlp_only_layers": ([1],), "num_experts": (4,), "num_local_experts": (4,), "n_routed_experts": (4,),
    "scoring_func": ("softmax", "sigmoid"), "qkv_bias": (True, False), "rms_norm_eps": (1e-3,), "norm_eps": (1e-3,),
    "original_max_position_embeddings": (16,), "query_pre_attn_scalar": (7,), "interleave_moe_layer_step": (2,),
    "use_bidirectional_attention": (True, None), "tie_embedding": (False, True), "block_ff_dim": (60,),
}  # fmt: skip
"""Fields that are added to a config without them: those by which some family's numbers change."""


BY_LAYER = ("layer_types", "no_rope_layers", "indexer_types", "mlp_layer_types")
"""Fields with an entry for each layer."""


def shrunk_config(name: str) -> Content:
    """The published config `name` with two layers, or four where layers share, and 64 tokens."""
    content = copy.deepcopy(CONFIGS[name])
    layers = content["num_hidden_layers"]
    for field, value in content.items():
        if isinstance(value, list) and len(value) == layers and field in BY_LAYER:
            content[field] = [value[0], next((kind for kind in value if kind != value[0]), value[0])]
    if "full_attention_interval" in content:
        content["full_attention_interval"] = 2
    if content.get("first_k_dense_replace"):
        content["first_k_dense_replace"] = 1  # a layer of experts remains
    if "vocab_size_per_layer_input" in content:
        content["vocab_size_per_layer_input"] = 64
    kept_layers = 2
    if content.get("num_kv_shared_layers"):  # a layer of each kind has keys and values, and one behind it reads them
        kept_layers, content["num_kv_shared_layers"] = 4, 2
        content["layer_types"] = content["layer_types"] * 2
    return {**content, "num_hidden_layers": kept_layers, "vocab_size": 64, **ENDS}


def full_content(content: Content) -> Content:
    """`content` with every field that transformers 5 writes."""
    fields = {name: value for name, value in content.items() if name != "model_type"}
    return dict(AutoConfig.for_model(content["model_type"], **fields).to_dict())


def older(content: Content) -> Content:
    """`content` as transformers 4 wrote it: `rope_theta` and `rope_scaling` in place of `rope_parameters`."""
    content = copy.deepcopy(content)
    if content["model_type"] in ("gemma4_text", "mimo_v2_flash"):  # later models, whose files have both dictionaries
        return content
    rope = content.pop("rope_parameters", None)
    if rope is None:
        return content
    if "full_attention" in rope:
        if content["model_type"] == "gemma3_text":
            content["rope_local_base_freq"] = rope["sliding_attention"]["rope_theta"]
        rope = rope["full_attention"]
    kind = rope.get("rope_type", "default")
    further = {name: value for name, value in rope.items() if name not in ("rope_type", "rope_theta")}
    outside = {name: further.pop(name) for name in ("partial_rotary_factor",) if name in further}
    content |= {"rope_theta": rope["rope_theta"], **outside}
    return content if kind == "default" else {**content, "rope_scaling": {"type": kind, "rope_type": kind, **further}}


def alternatives(name: str, value: Any) -> list[Any]:
    """Other values of a field."""
    if isinstance(value, bool):
        return [None, not value]
    if isinstance(value, int):
        return [None, value + 1, 2 * value, 0, float(value), -1, str(value)]
    if isinstance(value, float):
        return [None, 2 * value + 0.125, 0.0, str(value)]
    if isinstance(value, str):
        return [None, *(("silu", "gelu_pytorch_tanh", "swish") if "act" in name else ("unknown",))]
    if isinstance(value, list):
        return [None, [], value[:-1], value[::-1], value + value[:1]]
    return [None, {}] if isinstance(value, dict) else []


def changes(content: Content) -> Iterator[tuple[str, Content]]:
    """`content` with one field left out, null, changed or added, each with words for it."""
    for name, value in content.items():
        if name in GENERIC:
            continue
        yield f"{name} left out", {other_name: content[other_name] for other_name in content if other_name != name}
        for alternative in alternatives(name, value):
            yield f"{name} {alternative!r}", {**content, name: alternative}
        if name in ("rope_parameters", "rope_scaling") and isinstance(value, dict):
            by_kind = {kind: rope for kind, rope in value.items() if isinstance(rope, dict)}
            for kind, rope in by_kind.items() or ((None, value),):
                for words, changed in _rope_changes(content, rope):
                    yield (
                        f"{name} {kind or ''} {words}",
                        {**content, name: {**value, kind: changed} if kind else changed},
                    )
    for name, values in ADDED.items():
        for value in values if name not in content else ():
            yield f"{name} {value!r} added", {**content, name: value}


def _rope_changes(content: Content, rope: Content) -> Iterator[tuple[str, Content]]:
    for name, value in rope.items():
        yield f"{name} left out", {other_name: rope[other_name] for other_name in rope if other_name != name}
        for alternative in alternatives(name, value):
            yield f"{name} {alternative!r}", {**rope, name: alternative}
    pairs = (content.get("head_dim") or content["hidden_size"] // content["num_attention_heads"]) // 2
    factors = {
        "short_factor": [1 + pair / 4 for pair in range(pairs)],
        "long_factor": [2.0 + pair for pair in range(pairs)],
    }
    base = {name: rope[name] for name in ("rope_theta",) if name in rope}
    for kind, fields in ROPES.items():
        further = factors if kind == "longrope" else {}
        yield f"of kind {kind}", {**base, "rope_type": kind, **fields, **further}
        yield f"turned into kind {kind}", {**rope, "rope_type": kind, **fields, **further}
    for name, value in ROPE_ADDED.items():
        if name not in rope:
            yield f"{name} added", {**rope, name: value}


def network_of(config: Any) -> Any:
    """The model of a config in float64, with seeded weights."""
    torch.manual_seed(0)
    draw = torch.Generator().manual_seed(1)
    with wide():
        network = AutoModelForCausalLM.from_config(config, dtype=torch.float64, attn_implementation="eager")
        for parameter in network.parameters():
            spread = 0.1 if parameter.ndim == 1 else 0.3
            noise = spread * torch.randn(parameter.shape, generator=draw, dtype=torch.float64)
            parameter.copy_((parameter.ndim == 1) + noise)
        for name, buffer in network.named_buffers():
            if name.endswith("e_score_correction_bias"):  # zero in a new model: then it would choose no expert
                buffer.copy_(0.3 * torch.randn(buffer.shape, generator=draw, dtype=torch.float64))
            if name.endswith("layer_scalar"):  # one in a new model
                buffer.copy_(1 + 0.1 * torch.randn(buffer.shape, generator=draw, dtype=torch.float64))
        network.config._experts_implementation = "eager"  # grouped products know no float64
    return network.eval()


def logits_of(network: Any) -> Array:
    """The logits of transformers at each of TOKENS, float64."""
    tokens = torch.tensor([[token % network.config.vocab_size for token in TOKENS]])
    with wide():
        logits: Array = network(tokens, use_cache=False).logits[0].numpy()
    return logits


def own_logits(folder: Path, dtype: str = "float64") -> Array:
    """The logits of the oracle, which reads the checkpoint in `folder` and rounds its weights to `dtype`."""
    parameters = load(identify(folder), dtype)
    tokens = tuple(token % parameters.architecture.vocab_size for token in TOKENS)
    return parameters.logits(PathByPath(parameters).states(tokens)[-1])


def save_checkpoint(content: Content, folder: Path) -> Any:
    """Write a checkpoint with exactly this config.json into the empty `folder`; its model in transformers."""
    logging.disable_progress_bar()
    (folder / "config.json").write_text(json.dumps(content))
    network = network_of(AutoConfig.from_pretrained(folder))
    network.save_pretrained(folder)
    (folder / "config.json").write_text(json.dumps(content))
    return network


def difference(content: Content, folder: Path) -> float | str:
    """How far the oracle's reading lies from transformers', relative to the largest logit; or who refuses.

    The answers are `refused` for a file that the oracle refuses, `refused by transformers` for one that transformers
    alone refuses, and `large` for a model of more than LARGEST weights.
    """
    (folder / "config.json").write_text(json.dumps(content))
    try:
        arch = read_architecture(folder / "config.json")
    except UnreadableCheckpoint:
        return "refused"
    if sum(int(np.prod(shape)) for shape in shapes(arch).values()) > LARGEST:
        return "large"
    try:
        with warnings.catch_warnings():  # those of transformers are none of ours
            warnings.simplefilter("ignore")
            network = save_checkpoint(content, folder)
            expected = logits_of(network)
    except Exception:  # validators and broken models fail in many ways
        return "refused by transformers"
    try:
        return float(np.abs(own_logits(folder) - expected).max() / np.abs(expected).max())
    except UnreadableCheckpoint:
        return "refused"
