"""The exporter to GGUF, the model file of llama.cpp and of its readers.

Weights are written in float32, as they stand in the checkpoint or widened.
"""

from pathlib import Path
from typing import Any

import numpy as np
import torch

from specverify.backends.adapt.models import open_network
from specverify.backends.base import Unsupported
from specverify.reference.trace import Array

ARCHITECTURES = {"llama": "llama", "mistral": "llama", "qwen2": "qwen2", "qwen3": "qwen3"}
"""For each `model_type` of config.json that can be written, the name of its architecture in a GGUF."""

ROPES = ("default", "linear", "llama3")
"""Kinds of rotary embedding (`specverify.reference.architecture.ROPE_KINDS`) that can be written."""


def save_gguf(checkpoint: str | Path, file: Path) -> Path:
    """Write the model of a checkpoint directory into `file` in GGUF, with a tokenizer whose token n is the text `<n>`.

    The tokenizer has no special tokens: no token of the case begins or ends a text. The package `gguf` must be
    installed.

    Raises:
        Unsupported: A GGUF cannot say what the model is: another family, a sliding window, another rotary embedding.
        OSError: The file cannot be written.
    """
    from gguf import GGUFWriter

    network = open_network(checkpoint)
    config = network.config
    architecture = _architecture(config)
    writer = GGUFWriter(file, architecture)
    add_sizes(writer, config)
    writer.add_rope_dimension_count(head_size(config))
    writer.add_vocab_size(config.vocab_size)
    _add_rope(writer, network)
    # The tokenizer of RWKV has no special tokens unless a file names some; others have defaults such as token 2.
    writer.add_tokenizer_model("rwkv")
    writer.add_token_list([token_text(token) for token in range(config.vocab_size)])
    for name, values in tensors(network, architecture):
        writer.add_tensor(name, values)
    writer.write_header_to_file()
    writer.write_kv_data_to_file()
    writer.write_tensors_to_file()
    writer.close()
    return file


def add_sizes(writer: Any, config: Any) -> None:
    """Write the numbers of layers, positions, heads and features into a GGUF."""
    writer.add_block_count(config.num_hidden_layers)
    writer.add_context_length(config.max_position_embeddings)
    writer.add_embedding_length(config.hidden_size)
    writer.add_feed_forward_length(config.intermediate_size)
    writer.add_head_count(config.num_attention_heads)
    writer.add_head_count_kv(config.num_key_value_heads)
    writer.add_key_length(head_size(config))
    writer.add_value_length(head_size(config))
    writer.add_layer_norm_rms_eps(config.rms_norm_eps)


def token_text(token: int) -> str:
    """The text of a token in the files of `save_gguf`; no text contains another one."""
    return f"<{token}>"


def head_size(config: Any) -> int:
    """The width of a head: config.json may leave it out where the heads share the hidden size evenly."""
    return int(getattr(config, "head_dim", None) or config.hidden_size // config.num_attention_heads)


def tensors(network: Any, architecture: str) -> list[tuple[str, Array]]:
    """The weights as float32 arrays under their names in a GGUF of `architecture`.

    The GGUF of a Llama rotates neighbouring dimensions, where transformers rotates halves of a head: there the rows of
    queries and keys are in another order.
    """
    from gguf import MODEL_ARCH, MODEL_ARCH_NAMES, get_tensor_name_map

    config = network.config
    architecture_numbers = {name: number for number, name in MODEL_ARCH_NAMES.items()}
    names = get_tensor_name_map(MODEL_ARCH(architecture_numbers[architecture]), config.num_hidden_layers)
    heads = {"q_proj": config.num_attention_heads, "k_proj": config.num_key_value_heads}
    named_arrays = []
    for name, weight in network.state_dict().items():
        if config.tie_word_embeddings and name == "lm_head.weight":
            continue  # readers take the embedding where a file has no head
        gguf_name = names.get_name(name, try_suffixes=(".weight", ".bias"))
        if gguf_name is None:
            raise Unsupported(f"a GGUF of {architecture} has no place for the weight {name}")
        values = weight.detach().to(torch.float32).numpy()
        part = name.split(".")[-2]
        if architecture == "llama" and part in heads:
            values = _neighbours(values, heads[part])
        named_arrays.append((gguf_name, np.ascontiguousarray(values)))
    if architecture == "llama" and config.rope_parameters["rope_type"] == "llama3":
        named_arrays.append(("rope_freqs.weight", _stretch(network)))
    return named_arrays


def _architecture(config: Any) -> str:
    """The name of the model's architecture in a GGUF; raises Unsupported where it has none."""
    if config.model_type not in ARCHITECTURES:
        raise Unsupported(f"save_gguf writes {', '.join(ARCHITECTURES)}, and this model is {config.model_type}")
    if any(kind != "full_attention" for kind in getattr(config, "layer_types", None) or ()) or (
        config.model_type == "mistral" and config.sliding_window
    ):
        raise Unsupported(f"a GGUF of {config.model_type} cannot say that layers have a sliding window")
    if getattr(config, "score_cap", 0.0):
        raise Unsupported(f"a GGUF of {config.model_type} cannot say that attention has a soft cap")
    kind = config.rope_parameters["rope_type"]
    # Only the reader of a Llama looks for the factors that stand for Llama 3's rotary embedding.
    if kind not in ROPES or (kind == "llama3" and ARCHITECTURES[config.model_type] != "llama"):
        raise Unsupported(f"save_gguf cannot write the rotary embedding {kind} of a {config.model_type} model")
    return ARCHITECTURES[config.model_type]


def _add_rope(writer: Any, network: Any) -> None:
    """Write the settings of the rotary embedding."""
    from gguf import RopeScalingType

    rope = network.config.rope_parameters
    writer.add_rope_freq_base(rope["rope_theta"])
    if rope["rope_type"] == "linear":
        writer.add_rope_scaling_type(RopeScalingType.LINEAR)
        writer.add_rope_scaling_factor(rope["factor"])


def _neighbours(values: Array, heads: int) -> Array:
    """The rows of `values` [heads * head_dim, ...], pairs of halves in each head made neighbours."""
    halves = values.reshape(heads, 2, values.shape[0] // heads // 2, *values.shape[1:])
    return np.asarray(halves.swapaxes(1, 2).reshape(values.shape))


def _stretch(network: Any) -> Array:
    """Divisors of the plain frequencies, float32 [head_dim / 2]."""
    scaled_frequencies = network.model.rotary_emb.inv_freq.double().numpy()
    pairs = len(scaled_frequencies)
    plain = network.config.rope_parameters["rope_theta"] ** (-np.arange(pairs) / pairs)
    return np.asarray(plain / scaled_frequencies, dtype=np.float32)
