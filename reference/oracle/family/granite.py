"""Granite (transformers `models/granite`): Llama with multipliers of its own."""

from typing import Any

from specverify.reference.family.granite import GraniteSettings
from specverify.reference.files.fields import Fields
from specverify.reference.oracle.family.base import OracleFamily, biases
from specverify.reference.oracle.formulas.layer import Formulas


def _fields(fields: Fields) -> dict[str, Any]:
    settings = {name: fields.number(name, 1.0) for name in vars(GraniteSettings())}
    wrong_name = next((name for name, value in settings.items() if value <= 0), None)
    if wrong_name is not None:
        raise fields.refuse(f"{wrong_name} is {settings[wrong_name]}, not positive; correct it")
    return {
        **biases(fields),
        "mlp_bias": fields.flag("mlp_bias"),
        "settings": GraniteSettings(**settings),
    }


GRANITE = OracleFamily(
    "granite",
    Formulas(
        score_scale=lambda arch: GraniteSettings.of(arch).attention_multiplier,
        embedding_scale=lambda arch: GraniteSettings.of(arch).embedding_multiplier,
        embedding_rounded=False,  # a factor of Python, which torch multiplies by in float32 for 16 bits
        residual_scale=lambda arch: GraniteSettings.of(arch).residual_multiplier,
        logits=lambda arch, scored: scored / GraniteSettings.of(arch).logits_scaling,
    ),
    model_types=("granite",),
    defaults={"max_position_embeddings": 2048},
    fields=_fields,
)
