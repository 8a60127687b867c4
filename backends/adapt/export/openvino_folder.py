"""The exporter to a folder of OpenVINO GenAI, by that engine's own reader of GGUF.

The reader takes matrices of 16 bits, and it converts the tokenizer, which must have all bytes. Token ids of the model
are given to the engine as they are, so that the tokenizer's texts never count.
"""

from pathlib import Path
from typing import Any

import numpy as np

from specverify.backends.adapt.export.gguf_file import add_sizes, head_size, tensors
from specverify.backends.adapt.models import open_network
from specverify.backends.base import Unsupported
from specverify.reference.trace import Array

FAMILIES = {"llama": "llama", "qwen2": "qwen2", "qwen3": "qwen3"}
"""For each `model_type` of config.json that can be written, the name of its architecture in a GGUF."""

END = 257
"""The token of the tokenizer that ends a text; models with as many tokens are refused."""

PRECISE = {"INFERENCE_PRECISION_HINT": "f32", "KV_CACHE_PRECISION": "f32"}
"""Settings of the engine for float32 throughout; it would choose narrower ones by itself."""


def save_openvino(checkpoint: str | Path, folder: Path) -> Path:
    """Write the model of a checkpoint directory into `folder`: openvino_model.xml and what stands beside it.

    No token of the model ends a text. The packages `openvino-genai` and `gguf` must be installed.

    Raises:
        Unsupported: The reader would make another model: another family, a sliding window, biases of a Llama, another
            rotary embedding, weights that 16 bits do not hold, or a vocabulary beyond END.
        OSError: The folder cannot be written.
    """
    from gguf import GGUFWriter
    from openvino_genai import LLMPipeline

    network = open_network(checkpoint)
    architecture = _architecture(network.config)
    folder.mkdir(parents=True, exist_ok=True)
    file = folder / "model.gguf"
    writer = GGUFWriter(file, architecture)
    add_sizes(writer, network.config)
    writer.add_rope_freq_base(network.config.rope_parameters["rope_theta"])
    writer.add_file_type(1)  # mostly 16 bits
    _add_tokenizer(writer)
    for name, values in tensors(network, architecture):
        writer.add_tensor(name, _as_float16(name, values) if values.ndim > 1 else values)
    writer.write_header_to_file()
    writer.write_kv_data_to_file()
    writer.write_tensors_to_file()
    writer.close()
    LLMPipeline(str(file), "CPU", enable_save_ov_model=True, **PRECISE)
    file.unlink()
    return folder


def _architecture(config: Any) -> str:
    """The name of the model's architecture in a GGUF; raises Unsupported where the reader has none for it."""
    if config.model_type not in FAMILIES:
        raise Unsupported(f"save_openvino writes {', '.join(FAMILIES)}, and this model is {config.model_type}")
    if config.model_type == "llama" and (config.attention_bias or config.mlp_bias):
        raise Unsupported("save_openvino cannot write the biases of a llama model")
    if any(kind != "full_attention" for kind in getattr(config, "layer_types", None) or ()):
        raise Unsupported("save_openvino cannot write layers with a sliding window")
    if getattr(config, "score_cap", 0.0):
        raise Unsupported("save_openvino cannot write a soft cap of attention")
    kind = config.rope_parameters["rope_type"]
    if kind != "default":
        raise Unsupported(f"save_openvino cannot write the rotary embedding {kind}")
    if head_size(config) % 8:
        raise Unsupported(f"save_openvino writes heads of a multiple of 8, and these have {head_size(config)}")
    if config.vocab_size >= END:
        raise Unsupported(f"save_openvino writes vocabularies of fewer than {END} tokens, not {config.vocab_size}")
    return FAMILIES[config.model_type]


def _as_float16(name: str, values: Array) -> Array:
    """`values` as float16; raises Unsupported where that changes them."""
    narrow = values.astype(np.float16)
    if not np.array_equal(narrow.astype(np.float32), values):
        raise Unsupported(f"save_openvino writes matrices of 16 bits, which do not hold the weights of {name}")
    return np.asarray(narrow)


def _add_tokenizer(writer: Any) -> None:
    """Write the least tokenizer that the reader converts: all bytes, one merge, and a token that ends a text."""
    # GPT-2 writes the bytes that cannot be printed as the characters from 256 on.
    printable_bytes = {*range(33, 127), *range(161, 173), *range(174, 256)}
    substitutes = iter(range(256, 512))
    texts = [chr(byte if byte in printable_bytes else next(substitutes)) for byte in range(256)]
    writer.add_tokenizer_model("gpt2")
    writer.add_tokenizer_pre("qwen2")
    writer.add_token_list([*texts, "ab", "<|end|>"])
    writer.add_token_types([*[1] * END, 3])
    writer.add_token_merges(["a b"])
    for add in (writer.add_bos_token_id, writer.add_eos_token_id, writer.add_pad_token_id):
        add(END)
