"""LFM2: layers with a gated short convolution in place of attention.

After transformers' `models/lfm2`. The convolution has no other state than its last inputs. Queries and keys are normed.
Which layers have attention follows no rule: the setting `attention_layers` has one bit for each, the first the lowest.
"""

from dataclasses import dataclass

from specverify.reference.family.base import Family, LayerNorms, Shapes
from specverify.reference.family.settings import ArchitectureFields, Settings, whole


@dataclass(frozen=True)
class Lfm2Settings(Settings):
    """The settings of LFM2."""

    attention_layers: int = whole(21796, most=2**19)  # layers 2, 5, 8, 10, 12 and 14, as LFM2-1.2B has them
    conv_width: int = whole(3, least=2, most=64)  # the number of inputs of the convolution, the row's own included


def _recurrent(arch: ArchitectureFields, layer: int) -> Shapes | None:
    settings, hidden = Lfm2Settings.of(arch), arch.hidden_size
    if settings.attention_layers >> layer & 1:
        return None
    return {
        "conv.in_proj.weight": (3 * hidden, hidden),
        "conv.conv.weight": (hidden, 1, settings.conv_width),
        "conv.out_proj.weight": (hidden, hidden),
    }


SIZES = {"hidden_size": 12, "intermediate_size": 16, "heads": 2, "kv_heads": 1, "head_dim": 6, "qk_norm": True}

LFM2 = Family(
    "lfm2",
    norms=LayerNorms(before_attention="operator_norm", before_feed_forward="ffn_norm"),
    recurrent=_recurrent,
    rare=True,
    settings=Lfm2Settings,
    drawn=(
        {**SIZES, "vocab_size": 31, "windows": (0, 0), "tied": True, "settings": Lfm2Settings(attention_layers=1)},
        {**SIZES, "vocab_size": 22, "windows": (0, 0, 0),
         "settings": Lfm2Settings(attention_layers=5, conv_width=4)},
    ),
)  # fmt: skip
