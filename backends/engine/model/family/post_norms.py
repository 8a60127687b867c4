"""The OLMo 2, OLMo 3 and EXAONE 4 families."""

from typing import Any

from transformers import (
    Exaone4Config,
    Exaone4ForCausalLM,
    Olmo2Config,
    Olmo2ForCausalLM,
    Olmo3Config,
    Olmo3ForCausalLM,
)

from specverify.backends.base import Unsupported
from specverify.backends.engine.model.family.base import (
    ModelFamily,
    equal_windows,
    layer_types,
    layered_rope,
    no_chunks,
)
from specverify.backends.engine.model.float64_modules import ExactLayeredRotary, rms_norm
from specverify.reference.architecture import Architecture


def _olmo3(arch: Architecture) -> dict[str, Any]:
    return {
        "layer_types": layer_types(arch),
        "sliding_window": max(arch.windows) or 1,  # transformers makes its mask even where no layer has a window
        "rope_parameters": layered_rope(arch, arch.rope.theta),
    }


def _exaone4(arch: Architecture) -> dict[str, Any]:
    bare = tuple(layer for layer, window in enumerate(arch.windows) if any(arch.windows) and not window)
    if arch.unrotated != bare:
        raise Unsupported("exaone4: exactly the layers without a window lack rotary embedding, if any layer has one")
    return {
        "layer_types": layer_types(arch),
        "sliding_window": max(arch.windows) or None,
        "sliding_window_pattern": 4,
    }


OLMO2 = ModelFamily(
    "olmo2", Olmo2Config, Olmo2ForCausalLM, one_bias=True, exact={"Olmo2RMSNorm": rms_norm("variance_epsilon")}
)
OLMO3 = ModelFamily(
    "olmo3",
    Olmo3Config,
    Olmo3ForCausalLM,
    _olmo3,
    windows=equal_windows,
    one_bias=True,
    exact={
        "Olmo3RMSNorm": rms_norm("variance_epsilon"),
        "Olmo3RotaryEmbedding": lambda _, config: ExactLayeredRotary(config),
    },
)
EXAONE4 = ModelFamily(
    "exaone4",
    Exaone4Config,
    Exaone4ForCausalLM,
    _exaone4,
    windows=equal_windows,
    irope=no_chunks,
    exact={"Exaone4RMSNorm": rms_norm("variance_epsilon")},
)
