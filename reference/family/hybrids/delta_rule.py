"""Qwen3-Next: layers with the gated delta rule in place of attention.

After transformers' `models/qwen3_next`: layers with the gated delta rule (arXiv 2412.06464) behind a short
convolution, and every so many layers one with attention whose output a gate multiplies. A recurrent layer has two
states: a matrix for each value head, and the last inputs of its convolution. Both belong to a path of tokens, and no
mask repairs them. Blocks are gated ones, or mixtures of experts as in Qwen 2 MoE.
"""

from specverify.reference.family.base import ArchitectureFields, Family, Shapes, gated
from specverify.reference.family.experts import mixture
from specverify.reference.family.rotary_width import check_width
from specverify.reference.malformed import Malformed


def is_recurrent(arch: ArchitectureFields, layer: int) -> bool:
    """Whether `layer` of Qwen3-Next has the gated delta rule; the last of every `attention_every` has attention."""
    return (layer + 1) % int(arch.setting("attention_every")) != 0


def _recurrent(arch: ArchitectureFields, layer: int) -> Shapes | None:
    if not is_recurrent(arch, layer):
        return None
    keys, values, key_width, value_width, taps = (
        int(arch.setting(name)) for name in ("key_heads", "value_heads", "key_width", "value_width", "conv_width")
    )
    channels = 2 * keys * key_width + values * value_width
    return {
        "linear_attn.in_proj_qkvz.weight": (channels + values * value_width, arch.hidden_size),
        "linear_attn.in_proj_ba.weight": (2 * values, arch.hidden_size),
        "linear_attn.conv1d.weight": (channels, 1, taps),
        "linear_attn.dt_bias": (values,),
        "linear_attn.A_log": (values,),
        # Not `norm.weight`: this norm multiplies by its weight, the family's others by 1 plus theirs.
        "linear_attn.gain": (value_width,),
        "linear_attn.out_proj.weight": (arch.hidden_size, values * value_width),
    }


def _blocks(arch: ArchitectureFields, layer: int) -> Shapes:
    return mixture(arch, layer) if arch.setting("experts") else gated(arch, layer)


INTEGER_SETTINGS = {
    "attention_every": 1, "key_heads": 1, "value_heads": 1, "key_width": 1, "value_width": 1, "conv_width": 2,
    "experts": 0, "experts_per_token": 1, "expert_size": 1, "shared_size": 1, "sparse_step": 1,
}  # fmt: skip
"""Settings that are whole numbers, each with its least value."""


def _check(arch: ArchitectureFields) -> None:
    for name, least in INTEGER_SETTINGS.items():
        value = arch.setting(name)
        if value != int(value) or not least <= value <= 65536:
            raise Malformed("settings", f"{name} of {value} is not a whole number from {least} to 65536")
    if arch.setting("value_heads") % arch.setting("key_heads"):
        raise Malformed("settings", "the value heads do not share the key heads evenly")
    if arch.setting("experts") and arch.setting("experts_per_token") > arch.setting("experts"):
        raise Malformed("settings", f"experts_per_token of {arch.setting('experts_per_token'):g} with fewer experts")
    if arch.setting("norm_topk") not in (0, 1):
        raise Malformed("settings", "norm_topk is neither 0 nor 1")
    check_width(arch)


SIZES = {"vocab_size": 25, "hidden_size": 16, "intermediate_size": 20, "heads": 2, "kv_heads": 1, "head_dim": 8,
         "norm_eps": 1e-6, "qk_norm": True}  # fmt: skip

STATES = {"attention_every": 2.0, "conv_width": 3.0, "experts": 0.0, "key_heads": 1.0, "key_width": 4.0,
          "value_heads": 2.0, "value_width": 3.0}  # fmt: skip

QWEN3_NEXT = Family(
    "qwen3_next",
    resting_gain=0.0,
    feed_forward=_blocks,
    recurrent=_recurrent,
    gated_attention=True,
    mixes_rows=True,  # where it has experts
    rare=True,
    check=_check,
    settings={
        "attention_every": 4.0,  # the last of each so many layers has attention, the others the gated delta rule
        "key_heads": 16.0,
        "value_heads": 32.0,
        "key_width": 128.0,
        "value_width": 128.0,
        "conv_width": 4.0,  # the number of inputs of the convolution, the row's own included
        "rotary_dim": 0.0,  # rotary embedding turns so many leading dimensions of a head; 0 for all
        "experts": 512.0,  # 0 where every layer has a gated block
        "experts_per_token": 10.0,
        "expert_size": 512.0,
        "shared_size": 512.0,
        "norm_topk": 1.0,
        "sparse_step": 1.0,
    },
    drawn=(
        {**SIZES, "windows": (0, 0), "settings": tuple(sorted({**STATES, "rotary_dim": 2.0}.items()))},
        {**SIZES, "vocab_size": 39, "heads": 4, "kv_heads": 2, "head_dim": 6, "windows": (0, 0, 0),
         "settings": tuple(sorted({**STATES, "attention_every": 3.0, "key_heads": 2.0, "rotary_dim": 4.0,
                                   "value_width": 4.0}.items()))},
    ),
)  # fmt: skip
