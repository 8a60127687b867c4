"""LFM2: layers with a gated short convolution in place of attention.

After transformers' `models/lfm2`. The convolution has no other state than its last inputs. Queries and keys are normed.
Which layers have attention follows no rule: the setting `attention_layers` has one bit for each, the first the lowest.
"""

from specverify.reference.family.base import ArchitectureFields, Family, LayerNorms, Shapes
from specverify.reference.malformed import Malformed


def _recurrent(arch: ArchitectureFields, layer: int) -> Shapes | None:
    if int(arch.setting("attention_layers")) >> layer & 1:
        return None
    hidden, taps = arch.hidden_size, int(arch.setting("conv_width"))
    return {
        "conv.in_proj.weight": (3 * hidden, hidden),
        "conv.conv.weight": (hidden, 1, taps),
        "conv.out_proj.weight": (hidden, hidden),
    }


def _check(arch: ArchitectureFields) -> None:
    for name, least, most in (("attention_layers", 1, 2**19), ("conv_width", 2, 64)):
        value = arch.setting(name)
        if value != int(value) or not least <= value <= most:
            raise Malformed("settings", f"{name} of {value} is not a whole number from {least} to {most}")


SIZES = {"hidden_size": 12, "intermediate_size": 16, "heads": 2, "kv_heads": 1, "head_dim": 6, "qk_norm": True}

LFM2 = Family(
    "lfm2",
    norms=LayerNorms(before_attention="operator_norm", before_feed_forward="ffn_norm"),
    recurrent=_recurrent,
    rare=True,
    check=_check,
    settings={
        "attention_layers": 21796.0,  # layers 2, 5, 8, 10, 12 and 14, as LFM2-1.2B has them
        "conv_width": 3.0,  # the number of inputs of the convolution, the row's own included
    },
    drawn=(
        {**SIZES, "vocab_size": 31, "windows": (0, 0), "tied": True, "settings": (("attention_layers", 1.0),)},
        {**SIZES, "vocab_size": 22, "windows": (0, 0, 0),
         "settings": (("attention_layers", 5.0), ("conv_width", 4.0))},
    ),
)  # fmt: skip
