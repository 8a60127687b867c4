"""The Mistral family, whose layers all have the same window or none."""

from typing import Any

from transformers import MistralConfig, MistralForCausalLM

from backends.engine.model.family.base import ModelFamily, no_irope, same
from backends.engine.model.float64_modules import rms_norm
from reference.architecture import Architecture


def _fields(arch: Architecture) -> dict[str, Any]:
    no_irope(arch)
    same(arch, "all windows", *arch.windows)
    return {"sliding_window": max(arch.windows) or None}


MISTRAL = ModelFamily(
    "mistral", MistralConfig, MistralForCausalLM, _fields, exact={"MistralRMSNorm": rms_norm("variance_epsilon")}
)
