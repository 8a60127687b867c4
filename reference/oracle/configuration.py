"""Reads the config.json of a Hugging Face checkpoint as an Architecture; names each setting that the oracle lacks.

Defaults and precedence follow transformers 5.23 (`models/*/configuration_*.py`, `modeling_rope_utils.py`) and, for
openPangu-Embedded, the `configuration_openpangu_dense.py` that ships with its checkpoints. Code that a checkpoint
brings along (`auto_map`) is never run.
"""

from pathlib import Path
from typing import Any

from reference.architecture import Architecture, Rope
from reference.files.fields import SHOWN, Fields, UnreadableCheckpoint, read_json, shown
from reference.malformed import Malformed

FAMILY_OF = {
    "llama": "llama",
    "qwen2": "qwen2",
    "qwen3": "qwen3",
    "mistral": "mistral",
    "PanguEmbedded": "pangu",
    "pangu_embedded": "pangu",
}
"""Our word for each `model_type`."""

DEFAULTS: dict[str, dict[str, Any]] = {
    "llama": {"max_position_embeddings": 2048},
    "qwen2": {"max_position_embeddings": 32768, "num_key_value_heads": 32},
    "qwen3": {"max_position_embeddings": 32768, "num_key_value_heads": 32, "head_dim": 128},
    "mistral": {"max_position_embeddings": 131072, "num_key_value_heads": 8, "sliding_window": 4096},
    "pangu": {
        "max_position_embeddings": 32768,
        "num_key_value_heads": 8,
        "rms_norm_eps": 1e-5,
        "rope_theta": 16000000.0,
        "bias": True,
    },
}
"""Each family's default of a field that config.json leaves out, where it matters to the numbers."""

ROPE_FIELDS = {
    "rope_type", "type", "rope_theta", "factor", "original_max_position_embeddings", "attention_factor", "beta_fast",
    "beta_slow", "low_freq_factor", "high_freq_factor", "mscale", "mscale_all_dim", "truncate", "short_factor",
    "long_factor", "partial_rotary_factor", "finetuned",
}  # fmt: skip
"""Fields a rope dictionary may hold; another one asks for something we do not compute."""

MOST_LAYERS = 10_000
"""Layers that are read: each costs time and memory before its first weight is looked at."""

__all__ = ["UnreadableCheckpoint", "configured", "sizes"]


def configured(where: Path) -> Architecture:
    """The architecture that the file `where`, a config.json, describes.

    Raises:
        UnreadableCheckpoint: missing, not JSON, or asking for what the oracle does not compute.
    """
    content = read_json(where)
    kind = content.get("model_type")
    family = FAMILY_OF.get(kind) if isinstance(kind, str) else None
    if family is None:
        known = ", ".join(FAMILY_OF)
        raise UnreadableCheckpoint(
            f"{where}: the oracle does not compute model_type {shown(kind)} (it knows {known}); "
            "compare with plain transformers instead: --against transformers"
        )
    fields = Fields(where, content, DEFAULTS[family])
    _refuse_unsupported(fields)
    heads = fields.integer("num_attention_heads")
    hidden = fields.integer("hidden_size")
    layers = fields.integer("num_hidden_layers")
    bias = {"pangu": fields.flag("bias") or fields.flag("attention_bias"), "qwen2": False, "mistral": False}
    output_bias = bias.get(family, fields.flag("attention_bias"))
    try:
        return Architecture(
            family=family,
            vocab_size=fields.size("vocab_size"),
            hidden_size=hidden,
            intermediate_size=fields.integer("intermediate_size"),
            heads=heads,
            kv_heads=fields.integer("num_key_value_heads", heads),
            head_dim=fields.integer("head_dim", hidden // max(1, heads)),
            windows=_windows(fields, family, layers),
            rope=_rope(fields),
            norm_eps=float(fields.number("rms_norm_eps", 1e-6)),
            max_positions=fields.size("max_position_embeddings"),
            tied=fields.flag("tie_word_embeddings"),
            qkv_bias=family == "qwen2" or output_bias,
            output_bias=output_bias,
            mlp_bias=family == "llama" and fields.flag("mlp_bias"),
            qk_norm=family == "qwen3",
        )
    except Malformed as complaint:
        raise fields.refuse(f"{complaint}; correct it") from None


def sizes(where: Path) -> tuple[int, int]:
    """Vocabulary size and longest sequence of any model whose config.json names them, understood here or not.

    Raises:
        UnreadableCheckpoint: for a config that is missing, no JSON, or names neither.
    """
    fields = Fields(where, read_json(where), {})
    return fields.size("vocab_size"), fields.size("max_position_embeddings")


def _refuse_unsupported(fields: Fields) -> None:
    if fields.get("quantization_config") is not None:
        raise fields.refuse("quantization_config asks for quantized weights; save the checkpoint dequantized")
    activation = fields.content.get("hidden_act", "silu")
    if activation != "silu":
        raise fields.refuse(
            f"the oracle computes hidden_act 'silu', not {shown(activation)}; compare --against a backend"
        )
    if fields.number("partial_rotary_factor", 1.0) != 1.0:
        raise fields.refuse("partial_rotary_factor is not supported; compare --against a backend")


def _windows(fields: Fields, family: str, layers: int) -> tuple[int, ...]:
    """Each layer's window, by its family's rule.

    Qwen reads `sliding_window` only with `use_sliding_window`, from layer `max_window_layers` on or where
    `layer_types` says; Mistral gives it to every layer; Llama and openPangu have none.
    """
    if layers < 1:
        raise fields.refuse(f"num_hidden_layers is {layers}; correct it")
    if layers > MOST_LAYERS:
        raise fields.refuse(f"num_hidden_layers is {layers}, more than the {MOST_LAYERS} that are read; correct it")
    window = fields.get("sliding_window")
    types = fields.get("layer_types")
    if family in ("qwen2", "qwen3"):
        window = fields.integer("sliding_window", 4096) if fields.flag("use_sliding_window") else None
        first = fields.integer("max_window_layers", 28)
        slides = [window is not None and layer >= first for layer in range(layers)]
    else:
        slides = [family == "mistral" and window is not None] * layers
        if family != "mistral" and window is not None:
            raise fields.refuse(f"{family} has no sliding_window; remove the field, or compare --against a backend")
    if types is not None:
        known = {"full_attention": False, "sliding_attention": True}
        if (
            not isinstance(types, list)
            or len(types) != layers
            or not all(isinstance(kind, str) and kind in known for kind in types)
        ):
            raise fields.refuse(
                f"layer_types must say full_attention or sliding_attention for each of {layers} layers; "
                "compare --against a backend"
            )
        named = [known[kind] for kind in types]
        if family in ("qwen2", "qwen3"):
            slides = named
        elif named != slides:
            raise fields.refuse(
                f"layer_types contradicts sliding_window, which {family} gives to all layers or none; correct it"
            )
    if any(slides) and window is None:
        raise fields.refuse("layer_types names sliding_attention without a sliding_window; set use_sliding_window")
    if not any(slides):
        return (0,) * layers
    width = fields.integer("sliding_window", 4096)
    if width < 1:
        raise fields.refuse(f"sliding_window is {width}; correct it, or set it to null for none")
    return tuple(width if slide else 0 for slide in slides)


def _rope(fields: Fields) -> Rope:
    """The rope dictionary, whether `rope_scaling` (transformers 4) or `rope_parameters` (5); the former wins."""
    content = fields.get("rope_scaling") or fields.get("rope_parameters") or {}
    theta = float(fields.number("rope_theta", 10000.0))
    if not isinstance(content, dict):
        raise fields.refuse(f"the rope dictionary is {shown(content)}, not an object; correct it")
    unknown = sorted(set(content) - ROPE_FIELDS)
    if unknown:
        raise fields.refuse(f"rope field {shown(unknown[0])} is not supported; compare --against a backend")
    given = Fields(fields.where, content, {})
    if given.number("partial_rotary_factor", 1.0) != 1.0:
        raise fields.refuse("partial_rotary_factor is not supported; compare --against a backend")
    kind = content.get("rope_type", content.get("type", "default"))
    if isinstance(kind, (list, dict)):
        raise fields.refuse(f"rope_type is {shown(kind)}, not the name of a variant; correct it")
    theta = float(given.number("rope_theta", theta))
    if kind == "default":
        return Rope(theta=theta)
    longest = fields.integer("max_position_embeddings")
    original, ratio = 0, 1.0
    if kind in ("yarn", "llama3", "longrope"):
        original = fields.integer(
            "original_max_position_embeddings", given.integer("original_max_position_embeddings", longest)
        )
        ratio = longest / max(1, original)
    # A factor of null means the ratio to yarn and longrope; only longrope may leave it out.
    implied = kind == "longrope" or (kind == "yarn" and "factor" in content)
    if given.get("attention_factor") is not None and not given.number("attention_factor") > 0:
        raise fields.refuse("rope attention_factor is not positive; correct it")
    numbers = {
        name: float(given.number(name, getattr(Rope, name)))
        for name in ("attention_factor", "beta_fast", "beta_slow", "mscale", "mscale_all_dim")
    }
    # Llama 3 has no defaults for its band.
    band = {
        name: float(given.number(name, None if kind == "llama3" else getattr(Rope, name)))
        for name in ("low_freq_factor", "high_freq_factor")
    }
    try:
        return Rope(
            theta=theta,
            kind=str(kind)[:SHOWN],
            factor=float(given.number("factor", ratio if implied else None)),
            original=original,
            truncate=given.flag("truncate", True),
            short_factor=given.numbers("short_factor"),
            long_factor=given.numbers("long_factor"),
            **numbers,
            **band,
        )
    except Malformed as complaint:
        raise complaint.under("rope") from None
