"""Reading the config.json of a Hugging Face checkpoint as an Architecture.

A setting that the oracle does not compute is refused by name. Defaults and precedence follow transformers 5.23
(`models/*/configuration_*.py`, `modeling_rope_utils.py`); `specverify.reference.oracle.family` has the fields of one
family alone. Code that a checkpoint brings along (`auto_map`) is never run.
"""

from functools import cache
from pathlib import Path
from typing import Any

from specverify.reference.architecture import Architecture, Rope
from specverify.reference.files.block_scales import block_size
from specverify.reference.files.fields import (
    LARGEST_SIZE,
    MOST_LETTERS,
    Fields,
    UnreadableCheckpoint,
    quote_value,
    read_json,
)
from specverify.reference.files.text_model import sizes_content, text_content
from specverify.reference.malformed import Malformed
from specverify.reference.oracle.family import FAMILIES, OracleFamily
from specverify.reference.oracle.family.unread import UNREAD

BY_TYPE = {kind: family for family in FAMILIES.values() for kind in family.model_types}
"""The family of each `model_type`."""

ROPE_FIELDS = {
    "rope_type", "type", "rope_theta", "factor", "original_max_position_embeddings", "attention_factor", "beta_fast",
    "beta_slow", "low_freq_factor", "high_freq_factor", "mscale", "mscale_all_dim", "truncate", "short_factor",
    "long_factor", "partial_rotary_factor", "finetuned",
}  # fmt: skip
"""The fields that a rope dictionary may hold; any other field asks for a formula that the oracle does not compute."""

LENGTHS = ("max_position_embeddings", "n_positions", "max_seq_len", "seq_length", "max_sequence_length", "n_ctx")
"""Names of the longest sequence in config.json files of transformers' classes, the usual one first."""

WHOLE_NUMBERS = (
    "sliding_window", "no_rope_layer_interval", "interleave_moe_layer_step", "original_max_position_embeddings",
    "max_window_layers",
)  # fmt: skip
"""Fields of which transformers refuses other values even where it does not read them."""

ALIASES = {"swish": "silu"}
"""Other names of activations, each with the name that families have; transformers computes both alike."""

MOST_LAYERS = 10_000
"""Most layers that are read: each layer costs time and memory before its first weight is read."""

__all__ = ["UnreadableCheckpoint", "read_architecture", "read_sizes"]


def read_architecture(file: Path) -> Architecture:
    """The architecture that `file`, a config.json, describes.

    Raises:
        UnreadableCheckpoint: The file is missing, is not JSON, or asks for a formula that the oracle does not compute.
    """
    content = text_content(file, read_json(file))
    kind = content.get("model_type")
    family = BY_TYPE.get(kind) if isinstance(kind, str) else None
    if family is None:
        known_types, reason = ", ".join(BY_TYPE), UNREAD.get(kind) if isinstance(kind, str) else None
        because = f", since {reason}" if reason else ""
        raise UnreadableCheckpoint(
            f"{file}: the oracle does not compute model_type {quote_value(kind)}{because} (it knows {known_types}); "
            "compare with plain transformers instead: --against transformers"
        )
    return _architecture(Fields(file, _without_nulls(file, content, family), dict(family.defaults)), family)


def _without_nulls(file: Path, content: dict[str, Any], family: OracleFamily) -> dict[str, Any]:
    """`content` with the value that null stands for in each field of `family` that is read.

    transformers' classes take null in some fields alone, and in few of them null means what the absence of the field
    means.

    Raises:
        UnreadableCheckpoint: A field is null that may not be.
    """
    stated = dict(content)
    for name in _names_read(family.name):
        if name not in content or content[name] is not None:
            continue
        if name in family.nulls:
            stated[name] = family.nulls[name]
        elif name not in family.nullable and name != family.activation[0]:
            raise UnreadableCheckpoint(f"{file}: field {name} is null, which {family.name} has not; state its value")
    return stated


PLAIN = {"rope_type": "default", "rope_theta": 10000.0, "original_max_position_embeddings": 64}
SAMPLE: dict[str, Any] = {
    "vocab_size": 32, "hidden_size": 32, "intermediate_size": 48, "num_hidden_layers": 4, "num_attention_heads": 4,
    "num_key_value_heads": 4, "head_dim": 8, "qk_rope_head_dim": 8, "max_position_embeddings": 256,
    "rms_norm_eps": 1e-6, "layer_norm_eps": 1e-6, "num_experts_per_tok": 2, "vocab_size_per_layer_input": 32,
}  # fmt: skip
"""A small config.json, with which `fields_read` asks for the fields of a family."""


class _RecordingFields(Fields):
    """Fields that note the names for which they are asked."""

    def __init__(self, content: dict[str, Any], defaults: dict[str, Any]) -> None:
        super().__init__(Path("config.json"), content, defaults)
        self.names: set[str] = set()

    def get(self, name: str) -> Any:
        self.names.add(name)
        return super().get(name)


@cache
def _names_read(family: str) -> tuple[str, ...]:
    return fields_read(FAMILIES[family])


def fields_read(family: OracleFamily) -> tuple[str, ...]:
    """The fields of config.json that are read for `family`, by name; each one is honoured or refused."""
    rope = {**PLAIN, **{name: 1.0 for name in family.rope_fields}}
    names = {family.activation[0]}
    for window_fields in ({}, {"use_sliding_window": True, "sliding_window": 4, "max_window_layers": 0}):
        content = {**SAMPLE, **family.sample, **window_fields}
        if not family.layered_rope:
            content["rope_parameters"] = rope
        fields = _RecordingFields(content, dict(family.defaults))
        try:
            _architecture(fields, family)
        except UnreadableCheckpoint:
            assert window_fields, "a family reads the sample without windows"  # some families have none
        names |= fields.names
    return tuple(sorted(names))


def _architecture(fields: Fields, family: OracleFamily) -> Architecture:
    """The architecture that the fields of a config.json of `family` describe."""
    _refuse_unsupported(fields, family)
    heads = fields.integer("num_attention_heads")
    hidden = fields.integer("hidden_size")
    layers = fields.integer("num_hidden_layers")
    try:
        general = {
            "vocab_size": fields.size("vocab_size"),
            "hidden_size": hidden,
            "intermediate_size": fields.integer("intermediate_size"),
            "heads": heads,
            "kv_heads": fields.integer("num_key_value_heads", heads),
            "head_dim": fields.integer("head_dim", hidden // max(1, heads)),
            "windows": _windows(fields, family, layers),
            "rope": _rope(fields, family),
            "norm_eps": float(fields.number(family.epsilon, 1e-6)),
            "max_positions": fields.size("max_position_embeddings"),
            "tied": fields.flag("tie_word_embeddings"),
        }
        return Architecture(family.name, **{**general, **family.fields(fields)})
    except Malformed as complaint:
        raise fields.refuse(f"{complaint}; correct it") from None


def read_sizes(file: Path) -> tuple[int, int]:
    """Vocabulary size and longest sequence of any model whose config.json names the first, known to the oracle or not.

    A model that states no longest sequence, such as one without positions, has LARGEST_SIZE.

    Raises:
        UnreadableCheckpoint: for a config that is missing, no JSON, or without a vocabulary size.
    """
    fields = Fields(file, sizes_content(read_json(file)), {})
    longest = next((fields.size(name) for name in LENGTHS if fields.get(name) is not None), LARGEST_SIZE)
    return fields.size("vocab_size"), longest


def _refuse_unsupported(fields: Fields, family: OracleFamily) -> None:
    if not fields.flag("is_causal", True):
        raise fields.refuse("is_causal is false: each token would see those behind it, and none could be drafted")
    for name in WHOLE_NUMBERS:
        if fields.content.get(name) is not None:
            Fields(fields.where, fields.content, {}).integer(name)  # a check, and no reading of this family
    fields.get("quantization_config")  # so that it counts among the fields that are read
    block_size(fields.where, fields.content)
    if not family.sized_layers and fields.content.get("per_layer_config"):
        raise fields.refuse("per_layer_config gives layers sizes of their own; compare --against a backend")
    name, expected = family.activation
    activation = fields.content.get(name, expected)
    if ALIASES.get(activation, activation) != expected if isinstance(activation, str) else True:
        raise fields.refuse(
            f"the oracle computes {name} {expected!r}, not {quote_value(activation)}; compare --against a backend"
        )
    if not family.partial_rotary and fields.number("partial_rotary_factor", 1.0) != 1.0:
        raise fields.refuse("partial_rotary_factor is not supported; compare --against a backend")


def _windows(fields: Fields, family: OracleFamily, layers: int) -> tuple[int, ...]:
    """Each layer's window: the field `sliding_window` where the layer slides by the family's rule, else 0."""
    if layers < 1:
        raise fields.refuse(f"num_hidden_layers is {layers}; correct it")
    if layers > MOST_LAYERS:
        raise fields.refuse(f"num_hidden_layers is {layers}, more than the {MOST_LAYERS} that are read; correct it")
    slides = family.slides(fields, layers, family.name)
    if not any(slides):
        return (0,) * layers
    width = fields.integer("sliding_window")
    if width < 1:
        raise fields.refuse(f"sliding_window is {width}; correct it, or set it to null for none")
    return tuple(width if slide else 0 for slide in slides)


def _rope(fields: Fields, family: OracleFamily) -> Rope:
    """The variant in the rope dictionary of the layers that see all columns."""
    content = family.rope(fields)
    theta = float(fields.number("rope_theta", 10000.0))
    if not isinstance(content, dict):
        raise fields.refuse(f"the rope dictionary is {quote_value(content)}, not an object; correct it")
    unknown = sorted(set(content) - ROPE_FIELDS - family.rope_fields)
    if unknown:
        raise fields.refuse(f"rope field {quote_value(unknown[0])} is not supported; compare --against a backend")
    rope_fields = Fields(fields.where, content, {})
    if not family.partial_rotary and rope_fields.number("partial_rotary_factor", 1.0) != 1.0:
        raise fields.refuse("partial_rotary_factor is not supported; compare --against a backend")
    kind = content.get("rope_type", content.get("type", "default"))
    if isinstance(kind, (list, dict)):
        raise fields.refuse(f"rope_type is {quote_value(kind)}, not the name of a variant; correct it")
    theta = float(rope_fields.number("rope_theta", theta))
    if kind == "default":
        return Rope(theta=theta)
    if kind == "proportional" and not family.proportional:
        raise fields.refuse(f"rope_type is proportional, which is not computed for {family.name}; compare --against")
    if kind == "proportional":
        stretch, share = rope_fields.number("factor", 1.0), rope_fields.number("partial_rotary_factor", 1.0)
        try:
            return Rope(theta=theta, kind=kind, factor=float(stretch), share=float(share))
        except Malformed as complaint:
            raise complaint.under("rope") from None
    longest = fields.integer("max_position_embeddings")
    original, ratio = 0, 1.0
    if kind in ("yarn", "llama3", "longrope"):
        original = fields.integer(
            "original_max_position_embeddings", rope_fields.integer("original_max_position_embeddings", longest)
        )
        ratio = longest / max(1, original)
    # For yarn and longrope a factor of null means `ratio`; longrope may also leave the factor out.
    is_implied = kind == "longrope" or (kind == "yarn" and "factor" in content)
    if rope_fields.get("attention_factor") is not None and not rope_fields.number("attention_factor") > 0:
        raise fields.refuse("rope attention_factor is not positive; correct it")
    numbers = {
        name: float(rope_fields.number(name, getattr(Rope, name)))
        for name in ("attention_factor", "beta_fast", "beta_slow", "mscale", "mscale_all_dim")
    }
    # For llama3 the config must state both factors: transformers has no defaults for them.
    band = {
        name: float(rope_fields.number(name, None if kind == "llama3" else getattr(Rope, name)))
        for name in ("low_freq_factor", "high_freq_factor")
    }
    if kind == "llama3" and not min(band.values()) > 0:
        raise fields.refuse("low_freq_factor and high_freq_factor are positive; correct them")
    try:
        return Rope(
            theta=theta,
            kind=str(kind)[:MOST_LETTERS],
            factor=float(rope_fields.number("factor", ratio if is_implied else None)),
            original=original,
            truncate=rope_fields.flag("truncate", True),
            short_factor=rope_fields.numbers("short_factor"),
            long_factor=rope_fields.numbers("long_factor"),
            **numbers,
            **band,
        )
    except Malformed as complaint:
        raise complaint.under("rope") from None
