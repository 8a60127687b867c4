"""Directories of draft heads in published layouts, and of their target, with seeded weights."""

import json
from collections.abc import Callable, Mapping
from pathlib import Path
from typing import Any

import numpy as np
from safetensors.numpy import save_file
from tokenizers import Tokenizer, models, pre_tokenizers

from specverify.reference.architecture import Architecture, Seeded
from specverify.reference.draft.block import Block
from specverify.reference.draft.eagle1 import Eagle1
from specverify.reference.draft.eagle3 import Eagle3
from specverify.reference.draft.head import Head
from specverify.reference.draft.layer_head import LayerHead
from specverify.reference.draft.medusa import Medusa
from specverify.reference.draft.mtp import Mtp
from specverify.reference.draft.peagle import PEagle
from specverify.reference.trace import Array
from specverify.reference.weights import seeded_head, seeded_weights

TARGET = Seeded(Architecture("llama", 24, 8, 12, 2, 1, 4, (0,) * 8), 3)
"""A target of eight layers: the fewest of which 2, N // 2 and N - 3 are three in ascending order."""


def layer_config(head: LayerHead, target: Architecture) -> dict[str, Any]:
    layer = head.layer
    return {
        "hidden_size": target.hidden_size, "num_attention_heads": layer.heads, "num_key_value_heads": layer.kv_heads,
        "head_dim": layer.head_dim, "intermediate_size": layer.intermediate_size, "rms_norm_eps": layer.norm_eps,
        "rope_theta": layer.theta, "vocab_size": target.vocab_size, "hidden_act": "silu",
        "num_hidden_layers": head.modules, **(eagle1_config(head) if isinstance(head, Eagle1) else {}),
    }  # fmt: skip


def eagle1_config(head: Eagle1) -> dict[str, Any]:
    """The fields of layers without rotary embedding and of experts, where the head has them."""
    rotated = [int(number not in head.unrotated) for number in range(head.layers)]
    counts = {"num_local_experts": head.experts, "num_experts_per_tok": head.experts_per_token}
    return {**({"no_rope_layers": rotated} if head.unrotated else {}), **(counts if head.experts else {})}


def inputs(head: Eagle3) -> list[int]:
    """The layers whose inputs the head reads."""
    return [layer + 1 for layer in head.reads.layers]


def eagle3_config(head: Eagle3, target: Architecture) -> dict[str, Any]:
    reduced = {"draft_vocab_size": len(head.vocabulary) or target.vocab_size}
    return {**layer_config(head, target), **reduced, "architectures": ["LlamaForCausalLMEagle3"]}


def safeailab(head: Head, target: Architecture) -> tuple[dict[str, Any], Callable[[str], str]]:
    if isinstance(head, Eagle3):
        return eagle3_config(head, target), str
    assert isinstance(head, Eagle1)
    return {**layer_config(head, target), "bias": head.bias}, str


def specforge(head: Head, target: Architecture) -> tuple[dict[str, Any], Callable[[str], str]]:
    assert isinstance(head, Eagle3)
    ids = {"eagle_aux_hidden_state_layer_ids": list(head.reads.layers), "use_aux_hidden_state": True}
    return {**eagle3_config(head, target), "eagle_config": ids}, str


def vllm(head: Head, target: Architecture) -> tuple[dict[str, Any], Callable[[str], str]]:
    if isinstance(head, Medusa):
        counts = {"num_heads": head.heads, "num_hidden_layers": head.layers, "medusa_fc_bias": head.bias}
        return {**counts, "hidden_size": target.hidden_size, "vocab_size": target.vocab_size}, vllm_medusa
    if isinstance(head, Eagle1):
        config: dict[str, Any] = {"model_type": "eagle", "model": {**layer_config(head, target), "bias": head.bias}}
        return config, lambda name: f"model.{name}"
    assert isinstance(head, Eagle3)
    flags = {"norm_before_residual": head.norm_before_residual, "norm_output": head.norm_output}
    ids = {"eagle_aux_hidden_state_layer_ids": inputs(head)}
    renamed = {"d2t": "draft_id_to_target_id"}
    named = lambda name: renamed.get(name, name.replace("midlayer.", "layers.0."))  # noqa: E731
    return {**eagle3_config(head, target), **flags, **ids}, named


def block_config(head: Block, target: Architecture) -> dict[str, Any]:
    """The fields of a Qwen3 of the draft's layers, with those that tell windows and what slots see."""
    layer = head.layer
    kinds = ["sliding_attention" if head.window(number) else "full_attention" for number in range(head.layers)]
    stated = (
        {"is_causal": head.causal == "all"} if head.causal == "all" or (head.windows and head.causal == "none") else {}
    )
    return {
        "hidden_size": target.hidden_size, "num_attention_heads": layer.heads, "num_key_value_heads": layer.kv_heads,
        "head_dim": layer.head_dim, "intermediate_size": layer.intermediate_size, "rms_norm_eps": layer.norm_eps,
        "rope_theta": layer.theta, "vocab_size": target.vocab_size, "hidden_act": "silu", "model_type": "qwen3",
        "num_hidden_layers": head.layers, "attention_bias": False, "layer_types": kinds,
        "use_sliding_window": bool(head.windows), "sliding_window": max(head.windows, default=0) or None, **stated,
    }  # fmt: skip


def markov_config(head: Block) -> dict[str, Any]:
    """The fields of DSpark's Markov head."""
    return {"markov_rank": head.markov_rank, "markov_head_type": head.markov} if head.markov_rank else {}


def dflash2_config(head: Block) -> dict[str, Any]:
    """The fields of DFlash2's convolutions and selector."""
    if not head.selector_rank:
        return {}
    sizes = {"conv_kernel_size": head.conv_taps, "conv_group_size": head.conv_group}
    return {**sizes, "selector_rank": head.selector_rank, "selector_top_k": head.selector_top_k}


def zlab(head: Head, target: Architecture) -> tuple[dict[str, Any], Callable[[str], str]]:
    """DFlash and DSpark in the layout of z-lab and SpecForge; a draft that scores from the anchor is one of DSpark."""
    assert isinstance(head, Block)
    options = {"mask_token_id": head.mask_token, "target_layer_ids": list(head.reads.layers), **markov_config(head)}
    options |= dflash2_config(head)
    if head.from_anchor:
        options["projector_type"] = "dspark"
    elif head.markov_rank:
        options |= {"projector_type": "dspark", "sample_from_anchor": False}
    reduced = {"draft_vocab_size": len(head.vocabulary)} if head.vocabulary else {}
    name = "DSparkDraftModel" if "projector_type" in options else "DFlashDraftModel"
    name = "DFlash2DraftModel" if head.selector_rank else name
    fields = {"architectures": [name], "block_size": head.slots, "num_target_layers": target.layers}
    return {**block_config(head, target), **fields, **reduced, "dflash_config": options}, str


def speculators(head: Head, target: Architecture) -> tuple[dict[str, Any], Callable[[str], str]]:
    if isinstance(head, Block):
        kind = "dspark" if head.markov_rank else "dflash2" if head.selector_rank else "dflash"
        own_fields = {
            "speculators_model_type": kind, "architectures": ["DSparkSpeculator"], "block_size": head.slots,
            "mask_token_id": head.mask_token, "aux_hidden_state_layer_ids": [layer + 1 for layer in head.reads.layers],
            "sample_from_anchor": head.from_anchor, "draft_vocab_size": len(head.vocabulary) or target.vocab_size,
            "transformer_layer_config": block_config(head, target), **markov_config(head), **dflash2_config(head),
        }  # fmt: skip
        return {**own_fields, "architectures": [f"{'DSpark' if head.markov_rank else 'DFlash'}Speculator"]}, str
    assert isinstance(head, LayerHead)
    outer = {"transformer_layer_config": layer_config(head, target), "speculators_config": {"algorithm": "x"}}
    if isinstance(head, Eagle1):
        fields = {"speculators_model_type": "eagle", "fusion_bias": head.bias, "layernorms": False}
        return {**outer, **fields}, lambda name: name.replace("fc.", "fusion_fc.").replace("layers.0.", "transformer.")
    assert isinstance(head, Eagle3)
    fields = {
        "speculators_model_type": "eagle3", "draft_vocab_size": len(head.vocabulary) or target.vocab_size,
        "norm_before_residual": head.norm_before_residual, "norm_output": head.norm_output,
        "eagle_aux_hidden_state_layer_ids": inputs(head),
    }  # fmt: skip
    if isinstance(head, PEagle):
        plan = {"algorithm": "peagle", "proposal_methods": [{"speculative_tokens": head.mask_slots + 1}]}
        fields |= {"speculators_model_type": "peagle", "mask_token_id": head.mask_token, "speculators_config": plan}
    return {**outer, **fields}, lambda name: name.replace("midlayer.", "layers.0.")


def fasterdecoding(head: Head, target: Architecture) -> tuple[dict[str, Any], Callable[[str], str]]:
    assert isinstance(head, Medusa)
    config = {"medusa_num_heads": head.heads, "medusa_num_layers": head.layers}
    return config, lambda name: name.removeprefix("medusa_head.")


def vllm_medusa(name: str) -> str:
    _, head, layer, *parts = name.split(".")
    return f"blocks.{head}.layers.{layer}.{parts[-1]}" if parts[0] == "linear" else f"lm_heads.{head}.weight"


LAYOUTS = {layout.__name__: layout for layout in (safeailab, specforge, vllm, speculators, fasterdecoding, zlab)}


def weights_of(head: Head, target: Seeded = TARGET) -> dict[str, Array]:
    """The seeded weights of `head`, in a dict that may be changed."""
    return dict(seeded_head(head, target))


def save_head(
    folder: Path,
    head: Head,
    layout: str,
    config: Mapping[str, Any] | None = None,
    state: Mapping[str, Array] | None = None,
    target: Seeded = TARGET,
    file: str = "model.safetensors",
) -> Path:
    """A directory with `head` in `layout`: further fields of config.json in `config`, other weights in `state`.

    `state` has our names; a field of `config` that is None is left out.
    """
    assert not isinstance(head, Mtp)
    stated, named = LAYOUTS[layout](head, target.architecture)
    content = {**stated, **(config or {})}
    folder.mkdir(parents=True, exist_ok=True)
    written_config = {key: value for key, value in content.items() if value is not None}
    (folder / "config.json").write_text(json.dumps(written_config))
    weights = weights_of(head, target) if state is None else dict(state)
    if isinstance(head, Eagle1) and head.experts:
        weights = packed_experts(weights, head)
    if "mask_hidden" in weights:
        weights["mask_hidden"] = weights["mask_hidden"].reshape(1, 1, -1)
    arrays = {named(name): _narrow(array) for name, array in weights.items()}
    save_file(arrays, folder / file)
    return folder


def packed_experts(state: Mapping[str, Array], head: Eagle1) -> dict[str, Array]:
    """`state` under Llama 4's names: all experts of a layer in one tensor, inputs first, gate beside up."""
    packed = {name: array for name, array in state.items() if ".mlp." not in name}
    for number in range(head.layers):
        mlp, feed_forward = f"layers.{number}.mlp", f"layers.{number}.feed_forward"
        by_part = {
            part: np.stack([state[f"{mlp}.experts.{expert}.{part}_proj.weight"].T for expert in range(head.experts)])
            for part in ("gate", "up", "down")
        }
        packed[f"{feed_forward}.router.weight"] = state[f"{mlp}.gate.weight"]
        packed[f"{feed_forward}.experts.gate_up_proj"] = np.concatenate([by_part["gate"], by_part["up"]], -1)
        packed[f"{feed_forward}.experts.down_proj"] = by_part["down"]
        for part in ("gate", "up", "down"):
            name = f"shared_expert.{part}_proj.weight"
            packed[f"{feed_forward}.{name}"] = state[f"{mlp}.{name}"]
    return packed


def _narrow(array: Array) -> Array:
    """Weights as float32, which holds seeded ones exactly; whole numbers and truth values as they are."""
    return np.ascontiguousarray(array.astype(np.float32) if array.dtype == np.float64 else array)


ARCH = TARGET.architecture
CONFIG = {
    "model_type": "llama", "vocab_size": ARCH.vocab_size, "hidden_size": ARCH.hidden_size,
    "intermediate_size": ARCH.intermediate_size, "num_hidden_layers": ARCH.layers, "num_attention_heads": ARCH.heads,
    "num_key_value_heads": ARCH.kv_heads, "head_dim": ARCH.head_dim, "max_position_embeddings": 256,
    "rms_norm_eps": ARCH.norm_eps, "rope_theta": ARCH.rope.theta,
}  # fmt: skip


def checkpoint(folder: Path, state: Mapping[str, Array] | None = None, tokens: str = "", **fields: object) -> Path:
    """The target as a checkpoint, with further tensors and fields, and with a tokenizer of the letters `tokens`."""
    folder.mkdir()
    (folder / "config.json").write_text(json.dumps({**CONFIG, **fields}))
    weights = {**seeded_weights(TARGET), **(state or {})}
    save_file({name: array.astype(np.float32) for name, array in weights.items()}, folder / "model.safetensors")
    if tokens:
        tokenizer = Tokenizer(models.WordLevel({word: index for index, word in enumerate(tokens)}, unk_token="?"))
        tokenizer.pre_tokenizer = pre_tokenizers.Whitespace()
        tokenizer.save(str(folder / "tokenizer.json"))
        (folder / "tokenizer_config.json").write_text(json.dumps({"tokenizer_class": "PreTrainedTokenizerFast"}))
    return folder
