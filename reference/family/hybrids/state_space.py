"""Falcon-H1: in every layer a Mamba-2 mixer beside attention.

After transformers' `models/falcon_h1`: mixer and attention read the same normed row, and both answers are added to the
residual stream. The mixer is a selective state space (arXiv 2405.21060) behind a short convolution. Its state is a
matrix for each of its heads, and the last inputs of the convolution. Many factors multiply inputs and outputs.
"""

from specverify.reference.family.base import ArchitectureFields, Family, LayerNorms, Shapes
from specverify.reference.malformed import Malformed

FACTORS = (
    "embedding_multiplier", "logits_multiplier", "gate_multiplier", "down_multiplier", "key_multiplier",
    "attention_in_multiplier", "attention_out_multiplier", "mixer_in_multiplier", "mixer_out_multiplier",
)  # fmt: skip
"""The factors of embeddings, of logits, of the gated block, of keys, and of the inputs and outputs of both parts."""

PARTS = ("mixer_gate_multiplier", "mixer_value_multiplier", "mixer_key_multiplier", "mixer_query_multiplier",
         "mixer_time_multiplier")  # fmt: skip
"""The factors of the parts of the mixer's projection, in their order there."""

INTEGER_SETTINGS = ("mixer_heads", "mixer_width", "mixer_groups", "state_width", "conv_width")
FLAGS = ("conv_bias", "mixer_bias", "mixer_output_bias", "gated_norm", "norm_before_gate")


def _recurrent(arch: ArchitectureFields, layer: int) -> Shapes:
    heads, width, groups, state_width, taps = (int(arch.setting(name)) for name in INTEGER_SETTINGS)
    inner, channels = heads * width, heads * width + 2 * groups * state_width
    table: dict[str, tuple[int, ...]] = {
        "mamba.in_proj.weight": (inner + channels + heads, arch.hidden_size),
        "mamba.conv1d.weight": (channels, 1, taps),
        "mamba.dt_bias": (heads,),
        "mamba.A_log": (heads,),
        "mamba.D": (heads,),
        "mamba.out_proj.weight": (arch.hidden_size, inner),
    }
    optional = {"conv_bias": "conv1d.bias", "mixer_bias": "in_proj.bias", "mixer_output_bias": "out_proj.bias"}
    for flag, name in optional.items():
        if arch.setting(flag):
            table[f"mamba.{name}"] = table[f"mamba.{name.split('.')[0]}.weight"][:1]
    return {**table, "mamba.norm.weight": (inner,)} if arch.setting("gated_norm") else table


def _check(arch: ArchitectureFields) -> None:
    for name in INTEGER_SETTINGS:
        value, least = arch.setting(name), 2 if name == "conv_width" else 1
        if value != int(value) or not least <= value <= 65536:
            raise Malformed("settings", f"{name} of {value} is not a whole number from {least} to 65536")
    if arch.setting("mixer_heads") % arch.setting("mixer_groups"):
        raise Malformed("settings", "the mixer's heads do not share its groups evenly")
    for name in FLAGS:
        if arch.setting(name) not in (0, 1):
            raise Malformed("settings", f"{name} is neither 0 nor 1")
    for name in (*FACTORS, *PARTS):
        if not arch.setting(name) > 0:
            raise Malformed("settings", f"{name} of {arch.setting(name)} is not positive")


SIZES = {"hidden_size": 12, "intermediate_size": 16, "heads": 2, "kv_heads": 1, "head_dim": 6}

MIXER = {"mixer_heads": 2.0, "mixer_width": 3.0, "state_width": 4.0, "conv_width": 3.0, "key_multiplier": 1.5,
         "mixer_out_multiplier": 1.25}  # fmt: skip

MULTIPLIED = {
    **MIXER, "attention_in_multiplier": 1.5, "attention_out_multiplier": 0.75, "down_multiplier": 0.75,
    "embedding_multiplier": 1.5, "gate_multiplier": 1.25, "gated_norm": 1.0, "logits_multiplier": 1.5,
    "mixer_gate_multiplier": 0.75, "mixer_groups": 2.0, "mixer_heads": 4.0, "mixer_in_multiplier": 1.25,
    "mixer_key_multiplier": 1.5, "mixer_query_multiplier": 1.25, "mixer_time_multiplier": 1.5,
    "mixer_value_multiplier": 0.75, "norm_before_gate": 0.0,
}  # fmt: skip

FALCON_H1 = Family(
    "falcon_h1",
    norms=LayerNorms(before_feed_forward="pre_ff_layernorm"),
    recurrent=_recurrent,
    beside_attention=True,
    rare=True,
    check=_check,
    settings={
        "mixer_heads": 128.0,
        "mixer_width": 8.0,  # the width of a head of the mixer
        "mixer_groups": 1.0,  # heads of a group share what they write to and read from the state
        "state_width": 256.0,
        "conv_width": 4.0,  # the number of inputs of the convolution, the row's own included
        "conv_bias": 1.0,
        "mixer_bias": 0.0,
        "mixer_output_bias": 0.0,
        "gated_norm": 0.0,  # 1 for a norm of each group beside the gate of the mixer's output
        "norm_before_gate": 1.0,
        **dict.fromkeys((*FACTORS, *PARTS), 1.0),
    },
    drawn=(
        {**SIZES, "vocab_size": 27, "windows": (0,), "settings": tuple(sorted(MIXER.items()))},
        {**SIZES, "vocab_size": 33, "windows": (0, 0), "tied": True, "settings": tuple(sorted(MULTIPLIED.items()))},
    ),
)
