"""The Gemma 3 family, text model.

It is Gemma 2's with norms of queries and keys, and rotary tables by kind of layer.
"""

from typing import Any

from transformers import Gemma3ForCausalLM, Gemma3TextConfig

from specverify.backends.base import Unsupported
from specverify.backends.engine.model.family import gemma2
from specverify.backends.engine.model.family.base import ModelFamily, equal_windows, layered_rope
from specverify.backends.engine.model.float64_modules import ExactLayeredRotary, rms_norm
from specverify.reference.architecture import Architecture
from specverify.reference.family.gemma3 import Gemma3Settings


def _fields(arch: Architecture) -> dict[str, Any]:
    if arch.score_cap:
        raise Unsupported("gemma3 with a soft cap of attention: transformers' attention hands none on")
    rope = layered_rope(arch, Gemma3Settings.of(arch).local_theta or arch.rope.theta)
    return {**gemma2.fields_of(arch), "rope_parameters": rope}


GEMMA3 = ModelFamily(
    "gemma3",
    Gemma3TextConfig,
    Gemma3ForCausalLM,
    _fields,
    windows=equal_windows,
    one_bias=True,
    complete=gemma2.complete,
    exact={
        "Gemma3RMSNorm": rms_norm("eps", offset=1.0),
        "Gemma3TextScaledWordEmbedding": gemma2.with_exact_scale,
        "Gemma3RotaryEmbedding": lambda _, config: ExactLayeredRotary(config),
    },
)
