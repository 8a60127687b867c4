"""Qwen 2 and Qwen 3 (transformers `models/qwen2`, `models/qwen3`), and Qwen2-VL.

Some layers have a sliding window where config.json sets `use_sliding_window`.

Checkpoints of Qwen2-VL hold a vision tower beside the text model, and are not read.
"""

from specverify.reference.files.fields import Fields
from specverify.reference.oracle.family.base import OracleFamily, biases_and_norms, sliding_layers


def _slides(fields: Fields, layers: int, family: str) -> list[bool]:
    """The layers that have the window, none unless `use_sliding_window` is true.

    They are those that `layer_types` names, or without that field the layers from `max_window_layers` on.
    """
    wants_window, first = fields.flag("use_sliding_window"), fields.integer("max_window_layers", 28)
    wants_window = wants_window and fields.get("sliding_window") is not None
    stated_slides = sliding_layers(fields, layers)
    slides = [wants_window and layer >= first for layer in range(layers)] if stated_slides is None else stated_slides
    if any(slides) and not wants_window:
        raise fields.refuse("layer_types names sliding_attention without a sliding_window; set use_sliding_window")
    return slides


QWEN2 = OracleFamily(
    "qwen2",
    model_types=("qwen2",),
    defaults={"max_position_embeddings": 32768, "num_key_value_heads": 32, "sliding_window": 4096},
    slides=_slides,
    fields=lambda fields: {"qkv_bias": True},
)

QWEN3 = OracleFamily(
    "qwen3",
    model_types=("qwen3",),
    defaults={
        "max_position_embeddings": 32768,
        "num_key_value_heads": 32,
        "head_dim": 128,
        "sliding_window": 4096,
    },
    slides=_slides,
    fields=biases_and_norms,
)

QWEN2_VL = OracleFamily("qwen2_vl")
