"""Llama (transformers `models/llama`) and openPangu-Embedded.

openPangu-Embedded is Llama with bias on q, k, v and o; its defaults are those of the `configuration_openpangu_dense.py`
that ships with its checkpoints.
"""

from typing import Any

from reference.files.fields import Fields
from reference.oracle.family.base import OracleFamily


def _llama(fields: Fields) -> dict[str, Any]:
    biased = fields.flag("attention_bias")
    return {"qkv_bias": biased, "output_bias": biased, "mlp_bias": fields.flag("mlp_bias")}


def _pangu(fields: Fields) -> dict[str, Any]:
    biased = fields.flag("bias") or fields.flag("attention_bias")
    return {"qkv_bias": biased, "output_bias": biased}


LLAMA = OracleFamily("llama", model_types=("llama",), defaults={"max_position_embeddings": 2048}, fields=_llama)

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
