"""Llama (transformers `models/llama`), openPangu-Embedded, Seed-OSS, SmolLM3.

openPangu-Embedded is Llama with bias on q, k, v and o; its defaults are those of the `configuration_openpangu_dense.py`
that ships with its checkpoints. Seed-OSS has a bias on q, k and v, and SmolLM3 some layers without rotary embedding.
"""

from typing import Any

from specverify.reference.files.fields import Fields
from specverify.reference.oracle.family.base import NULLABLE, OracleFamily, biases, check_head_split, sliding_layers


def _biases(fields: Fields) -> dict[str, Any]:
    return {**biases(fields), "mlp_bias": fields.flag("mlp_bias")}


def _llama(fields: Fields) -> dict[str, Any]:
    check_head_split(fields)
    return _biases(fields)


def _pangu(fields: Fields) -> dict[str, Any]:
    biased = fields.flag("bias") or fields.flag("attention_bias")
    return {"qkv_bias": biased, "output_bias": biased}


LLAMA = OracleFamily(
    "llama",
    model_types=("llama",),
    defaults={"max_position_embeddings": 2048},
    fields=_llama,
    nullable=NULLABLE | {"head_dim"},
)

PANGU = OracleFamily(
    "pangu",
    model_types=("PanguEmbedded", "pangu_embedded"),
    defaults={
        "max_position_embeddings": 32768,
        "num_key_value_heads": 8,
        "rms_norm_eps": 1e-5,
        "rope_theta": 16000000.0,
        "bias": True,
    },
    fields=_pangu,
)


def _seed_oss(fields: Fields) -> dict[str, Any]:
    return {
        "qkv_bias": fields.flag("attention_bias", True),
        "output_bias": fields.flag("attention_out_bias"),
        "mlp_bias": fields.flag("mlp_bias"),
    }


SEED_OSS = OracleFamily(
    "seed_oss",
    model_types=("seed_oss",),
    defaults={"max_position_embeddings": 524288, "num_key_value_heads": 8, "head_dim": 128},
    fields=_seed_oss,
    nullable=NULLABLE | {"head_dim"},
)


def unrotated_layers(fields: Fields, layers: int, default_values: tuple[Any, ...] = (None,)) -> tuple[int, ...]:
    """The layers without rotary embedding: those for which `no_rope_layers` has 0, or every so many.

    `default_values` holds the values of that field for which transformers counts by `no_rope_layer_interval`.
    """
    stated_layers = fields.get("no_rope_layers")
    if stated_layers in default_values:
        every = fields.integer("no_rope_layer_interval", 4)
        if every < 1:
            raise fields.refuse(f"no_rope_layer_interval is {every}; correct it")
        return tuple(layer for layer in range(layers) if (layer + 1) % every == 0)
    if (
        not isinstance(stated_layers, list)
        or len(stated_layers) < layers
        or any(entry not in (0, 1) for entry in stated_layers)
    ):
        raise fields.refuse(f"no_rope_layers must say 1 (rotary embedding) or 0 for each of {layers} layers")
    return tuple(layer for layer in range(layers) if not stated_layers[layer])


def _smollm3_slides(fields: Fields, layers: int, family: str) -> list[bool]:
    """The layers that `layer_types` names; without that field those without rotary embedding, if windows are asked."""
    stated_slides, unrotated = sliding_layers(fields, layers), unrotated_layers(fields, layers)
    wants_window = fields.flag("use_sliding_window") and fields.get("sliding_window") is not None
    slides = (
        [wants_window and layer in unrotated for layer in range(layers)] if stated_slides is None else stated_slides
    )
    if any(slides) and not wants_window:
        raise fields.refuse("layer_types names sliding_attention without a sliding_window; set use_sliding_window")
    return slides


def _smollm3(fields: Fields) -> dict[str, Any]:
    return {**_biases(fields), "unrotated": unrotated_layers(fields, fields.integer("num_hidden_layers"))}


SMOLLM3 = OracleFamily(
    "smollm3",
    model_types=("smollm3",),
    defaults={
        "max_position_embeddings": 32768,
        "num_key_value_heads": 4,
        "rope_theta": 2000000.0,
        "tie_word_embeddings": True,
    },
    slides=_smollm3_slides,
    fields=_smollm3,
)
