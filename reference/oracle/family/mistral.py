"""Mistral (transformers `models/mistral`): Llama with one window for all layers.

`sliding_window` null means no window.
"""

from reference.files.fields import Fields
from reference.oracle.family.base import OracleFamily, all_or_none


def _slides(fields: Fields, layers: int, family: str) -> list[bool]:
    return all_or_none(fields, layers, fields.get("sliding_window") is not None, family)


MISTRAL = OracleFamily(
    "mistral",
    model_types=("mistral",),
    defaults={"max_position_embeddings": 131072, "num_key_value_heads": 8, "sliding_window": 4096},
    slides=_slides,
)
