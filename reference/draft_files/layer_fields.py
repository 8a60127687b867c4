"""The decoder layer of a head: its sizes in config.json and its tensors."""

from typing import Any

from specverify.reference.architecture import Rope
from specverify.reference.draft.layer_head import ROPES, HeadLayer
from specverify.reference.draft_files.target_sizes import TargetSizes
from specverify.reference.draft_files.tensors import HeadTensors
from specverify.reference.files.fields import Fields, quote_value
from specverify.reference.malformed import Malformed
from specverify.reference.trace import Array

ROPE_FIELDS = {
    "rope_type", "type", "rope_theta", "factor", "original_max_position_embeddings", "low_freq_factor",
    "high_freq_factor", "attention_factor", "beta_fast", "beta_slow", "mscale", "mscale_all_dim", "truncate",
    "partial_rotary_factor", "finetuned",
}  # fmt: skip
"""The fields that a rope dictionary may hold; the last one says how a context was reached, and changes nothing."""

YARN_NUMBERS = ("attention_factor", "beta_fast", "beta_slow", "mscale", "mscale_all_dim")
"""The numbers of yarn that may be left out."""

AXES = ("mrope_section", "mrope_interleaved")
"""The fields by which heads of targets that see images share rotary pairs out among the axes of positions."""

PLAIN_ROPE = (None, "default")
"""The ways in which config.json says that the rotary embedding is the plain one."""


def check_plain(fields: Fields, has_windows: bool = False) -> None:
    """Refuse a head that needs a formula which is not computed here; `has_windows` tells that windows are.

    Raises:
        UnreadableCheckpoint: with the field.
    """
    if fields.get("quantization_config") is not None:
        raise fields.refuse("quantization_config asks for quantized weights; save the head dequantized")
    if (act := fields.content.get("hidden_act", "silu")) not in ("silu", "swish"):
        raise fields.refuse(f"hidden_act is {quote_value(act)}; heads are computed with silu")
    for name, plain in (("partial_rotary_factor", 1.0), ("logit_scale", 1.0)):
        if fields.number(name, plain) != plain:
            raise fields.refuse(f"{name} is {fields.number(name)}; heads are computed with {plain:g}")
    for name in ("mlp_bias", "parallel_drafting", *(() if has_windows else ("use_sliding_window",))):
        if fields.flag(name):
            raise fields.refuse(f"{name} is true; heads are computed without it")


def head_layer(fields: Fields, target: TargetSizes, word: str, hidden: int = 0, has_windows: bool = False) -> HeadLayer:
    """The sizes of a decoder layer of a head, whose rows are as wide as the target's.

    Args:
        fields: config.json.
        target: The target.
        word: The kind of head.
        hidden: The width of the rows of a head that has another one; 0 for the target's.
        has_windows: Whether layers of the kind may have windows.

    Raises:
        UnreadableCheckpoint: a size is missing or makes no sense, belongs to another target, or a rotary embedding or
            a number of layers is asked for that is not computed here.
    """
    check_plain(fields, has_windows)
    hidden = hidden or target.hidden_size
    target.check_equal(fields, "hidden_size", hidden)
    heads = fields.integer("num_attention_heads")
    try:
        rope = _rope(fields, word)
        return HeadLayer(
            heads,
            fields.integer("num_key_value_heads", heads),
            fields.integer("head_dim", hidden // max(1, heads)),
            fields.size("intermediate_size"),
            rope.theta,
            float(fields.number("rms_norm_eps", 1e-6)),
            None if rope.kind == "default" else rope,
        )
    except Malformed as complaint:
        raise fields.refuse(f"{complaint}; correct it") from None


def check_one_layer(fields: Fields, word: str) -> None:
    """Refuse a head of several decoder layers: names and norms of the further ones differ between implementations.

    Raises:
        UnreadableCheckpoint: `num_hidden_layers` is not 1.
    """
    layers = fields.integer("num_hidden_layers", 1)
    if layers != 1:
        raise fields.refuse(
            f"num_hidden_layers is {layers}: {word} heads of one decoder layer are read; the names and norms of "
            "further layers differ between implementations"
        )


def check_rotated_and_dense(fields: Fields, word: str) -> None:
    """Refuse layers without rotary embedding, and experts, in a kind of head that is computed with neither.

    Raises:
        UnreadableCheckpoint: `no_rope_layers` has a 0, or `num_local_experts` is not 0.
    """
    flags = fields.get("no_rope_layers")
    if flags is not None and (not isinstance(flags, list) or any(flag != 1 for flag in flags)):
        raise fields.refuse(
            f"no_rope_layers is {quote_value(flags)}: {word} heads are computed with rotary embedding in every layer"
        )
    if fields.integer("num_local_experts", 0):
        raise fields.refuse(
            f"num_local_experts is {fields.integer('num_local_experts')}: {word} heads are computed without experts"
        )


def _rope(fields: Fields, word: str) -> Rope:
    """The rotary embedding, in `rope_scaling` (transformers 4) or `rope_parameters` (5), and the field `rope_theta`."""
    content = fields.get("rope_scaling") or fields.get("rope_parameters") or {}
    if not isinstance(content, dict):
        raise fields.refuse(f"the rope dictionary is {quote_value(content)}, not an object; correct it")
    content = _of_text(fields, content)
    unknown = sorted(set(content) - ROPE_FIELDS)
    if unknown:
        raise fields.refuse(f"rope field {quote_value(unknown[0])} is not computed in heads; remove it")
    if content.get("partial_rotary_factor") not in (None, 1, 1.0):
        raise fields.refuse("partial_rotary_factor in the rope dictionary: heads turn all dimensions; remove it")
    for name in ("rope_type", "rope_theta"):
        if name in content and content[name] is None:
            raise fields.refuse(f"rope field {name} is null; state its value")
    kind = content.get("rope_type", content.get("type"))
    if kind not in (*PLAIN_ROPE, *ROPES):
        raise fields.refuse(
            f"rope_type is {quote_value(kind)}: {word} heads are computed with the plain rotary embedding, "
            f"{', '.join(ROPES)}"
        )
    rope_fields = Fields(fields.where, content, {})
    theta = float(rope_fields.number("rope_theta", fields.number("rope_theta", 10000.0)))
    if kind in PLAIN_ROPE:
        return Rope(theta)
    factor = float(rope_fields.number("factor"))
    if kind == "linear":
        return Rope(theta, kind, factor)
    original = rope_fields.integer("original_max_position_embeddings")
    if kind == "yarn":
        numbers: dict[str, Any] = {name: float(rope_fields.number(name, getattr(Rope, name))) for name in YARN_NUMBERS}
        return Rope(theta, kind, factor, original, truncate=rope_fields.flag("truncate", True), **numbers)
    low, high = (float(rope_fields.number(f"{name}_freq_factor")) for name in ("low", "high"))
    if not (low > 0 and high > 0):
        raise fields.refuse("low_freq_factor and high_freq_factor are positive; correct them")
    return Rope(theta, "llama3", factor, original, low_freq_factor=low, high_freq_factor=high)


def _of_text(fields: Fields, content: dict[str, Any]) -> dict[str, Any]:
    """The rope dictionary without the fields on axes: text has one number on all axes, so that the plain kind remains.

    Raises:
        UnreadableCheckpoint: The sections are not three numbers of rotary pairs.
    """
    if "mrope_section" not in content:
        return content
    section = content["mrope_section"]
    if not isinstance(section, list) or len(section) != 3 or not all(type(pairs) is int for pairs in section):
        raise fields.refuse(f"mrope_section is {quote_value(section)}, not three numbers of rotary pairs; correct it")
    plain = {name: value for name, value in content.items() if name not in AXES}
    return {name: "default" if value == "mrope" else value for name, value in plain.items()}


def layer_weights(
    tensors: HeadTensors, prefix: str, layer: HeadLayer, width: int, hidden: int, fields: Fields
) -> dict[str, Array]:
    """The projections of the decoder layer under `prefix`, whose attention reads rows of `width`.

    Raises:
        UnreadableCheckpoint: as `HeadTensors.linear`.
    """
    inner_width = layer.intermediate_size
    state = attention_weights(tensors, prefix, layer, width, hidden, fields)
    mlp_shapes = {"gate": (inner_width, hidden), "up": (inner_width, hidden), "down": (hidden, inner_width)}
    for name, (out, into) in mlp_shapes.items():
        state |= tensors.linear(f"{prefix}.mlp.{name}_proj", out, into, False, "mlp_bias false")
    return state


def attention_weights(
    tensors: HeadTensors, prefix: str, layer: HeadLayer, width: int, hidden: int, fields: Fields
) -> dict[str, Array]:
    """The projections of attention of the decoder layer under `prefix`, which reads rows of `width`.

    `attention_bias` asks for biases of all four projections, `qkv_bias` for those of queries, keys and values.

    Raises:
        UnreadableCheckpoint: as `HeadTensors.linear`.
    """
    all_biased = fields.flag("attention_bias")
    qkv_biased = fields.flag("qkv_bias")
    query_width = layer.heads * layer.head_dim
    kv_width = layer.kv_heads * layer.head_dim
    bias_words = f"attention_bias {str(all_biased).lower()}" + (" and qkv_bias true" if qkv_biased else "")
    state: dict[str, Array] = {}
    for name, out in (("q", query_width), ("k", kv_width), ("v", kv_width)):
        state |= tensors.linear(f"{prefix}.self_attn.{name}_proj", out, width, all_biased or qkv_biased, bias_words)
    return state | tensors.linear(f"{prefix}.self_attn.o_proj", hidden, query_width, all_biased, bias_words)


def own_embedding(tensors: HeadTensors, fields: Fields, target: TargetSizes, hidden: int = 0) -> dict[str, Array]:
    """The embedding of the head's own, where it has one; otherwise the target's is used.

    Raises:
        UnreadableCheckpoint: its shape is not that of the target's embedding.
    """
    target.check_equal(fields, "vocab_size", target.vocab_size)
    if "embed_tokens.weight" not in tensors:
        return {}
    width = hidden or target.hidden_size
    return {"embed_tokens.weight": tensors.take("embed_tokens.weight", (target.vocab_size, width))}
