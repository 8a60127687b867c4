"""Qwen3.5: the layers of Qwen3-Next behind other projections.

After transformers' `models/qwen3_5` and `models/qwen3_5_moe`. A layer with the gated delta rule has a projection for
queries, keys and values of all heads, one for the gates, and one each for the rates and the decays, where Qwen3-Next
lays the parts of a key head side by side. The dense family has gated blocks; the family `qwen3_5_moe` has experts and a
shared expert in every layer, whose weights always have the sum of 1. Rotary pairs are shared out among three axes,
which a text without images cannot tell.
"""

from dataclasses import dataclass

from specverify.reference.family.base import Family, Shapes
from specverify.reference.family.experts import mixture
from specverify.reference.family.hybrid_delta_rule import DeltaRuleSettings, attention_in_all, delta_net
from specverify.reference.family.settings import ArchitectureFields, whole


@dataclass(frozen=True)
class Qwen35Settings(DeltaRuleSettings):
    """The settings of Qwen3.5."""


@dataclass(frozen=True)
class Qwen35MoeSettings(DeltaRuleSettings):
    """The settings of Qwen3.5 with experts."""

    norm_topk = True

    experts: int = whole(256)
    experts_per_token: int = whole(8)
    expert_size: int = whole(512)
    shared_size: int = whole(512)


def _recurrent(arch: ArchitectureFields, layer: int) -> Shapes | None:
    settings = DeltaRuleSettings.of(arch)
    if not settings.has_recurrence(layer):
        return None
    hidden, values = arch.hidden_size, settings.value_heads
    inputs = {
        "linear_attn.in_proj_qkv.weight": (settings.channels, hidden),
        "linear_attn.in_proj_z.weight": (values * settings.value_width, hidden),
        "linear_attn.in_proj_b.weight": (values, hidden),
        "linear_attn.in_proj_a.weight": (values, hidden),
    }
    return delta_net(arch, inputs)


SIZES = {"hidden_size": 16, "intermediate_size": 20, "heads": 2, "kv_heads": 1, "norm_eps": 1e-6, "qk_norm": True}

STATES = {"attention_every": 2, "key_heads": 1, "value_heads": 2, "key_width": 4, "value_width": 3, "conv_width": 3}

QWEN3_5 = Family(
    "qwen3_5",
    resting_gain=0.0,
    recurrent=_recurrent,
    gated_attention=True,
    rare=True,
    settings=Qwen35Settings,
    modules=attention_in_all,
    drawn=(
        {**SIZES, "vocab_size": 27, "head_dim": 8, "windows": (0, 0),
         "settings": Qwen35Settings(**STATES, rotary_dim=2)},
        # Several value heads share each of two key heads, so that another order of heads has other numbers.
        {**SIZES, "vocab_size": 35, "head_dim": 6, "windows": (0, 0, 0), "tied": True,
         "settings": Qwen35Settings(**{**STATES, "attention_every": 3, "key_heads": 2, "value_heads": 4},
                                    rotary_dim=4)},
    ),
)  # fmt: skip

QWEN3_5_MOE = Family(
    "qwen3_5_moe",
    resting_gain=0.0,
    feed_forward=mixture,
    recurrent=_recurrent,
    gated_attention=True,
    mixes_rows=True,
    rare=True,
    settings=Qwen35MoeSettings,
    modules=attention_in_all,
    drawn=(
        {**SIZES, "vocab_size": 31, "head_dim": 8, "windows": (0, 0),
         "settings": Qwen35MoeSettings(**STATES, rotary_dim=4, experts=4, experts_per_token=2, expert_size=12,
                                       shared_size=10)},
    ),
)  # fmt: skip
