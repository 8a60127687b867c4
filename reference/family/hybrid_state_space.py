"""Falcon-H1: in every layer a Mamba-2 mixer beside attention.

After transformers' `models/falcon_h1`: mixer and attention read the same normed row, and both answers are added to the
residual stream. The mixer is a selective state space (arXiv 2405.21060) behind a short convolution. Its state is a
matrix for each of its heads, and the last inputs of the convolution. Many factors multiply inputs and outputs.
"""

from dataclasses import dataclass, replace

from specverify.reference.family.base import Family, LayerNorms, Shapes
from specverify.reference.family.settings import ArchitectureFields, Settings, positive, whole
from specverify.reference.malformed import Malformed


@dataclass(frozen=True)
class FalconH1Settings(Settings):
    """The settings of Falcon-H1: sizes and biases of the mixer, and factors."""

    mixer_heads: int = whole(128)
    mixer_width: int = whole(8)  # the width of a head of the mixer
    mixer_groups: int = whole(1)  # heads of a group share what they write to and read from the state
    state_width: int = whole(256)
    conv_width: int = whole(4, least=2)  # the number of inputs of the convolution, the row's own included
    conv_bias: bool = True
    mixer_bias: bool = False
    mixer_output_bias: bool = False
    gated_norm: bool = False  # whether a norm of each group stands beside the gate of the mixer's output
    norm_before_gate: bool = True
    embedding_multiplier: float = positive(1.0)
    logits_multiplier: float = positive(1.0)
    gate_multiplier: float = positive(1.0)  # this and the next are those of the gated block
    down_multiplier: float = positive(1.0)
    key_multiplier: float = positive(1.0)
    attention_in_multiplier: float = positive(1.0)
    attention_out_multiplier: float = positive(1.0)
    mixer_in_multiplier: float = positive(1.0)
    mixer_out_multiplier: float = positive(1.0)
    mixer_gate_multiplier: float = positive(1.0)  # from here on those of the parts of the mixer's projection
    mixer_value_multiplier: float = positive(1.0)
    mixer_key_multiplier: float = positive(1.0)
    mixer_query_multiplier: float = positive(1.0)
    mixer_time_multiplier: float = positive(1.0)

    @property
    def inner(self) -> int:
        """The width of all heads of the mixer."""
        return self.mixer_heads * self.mixer_width

    @property
    def shared(self) -> int:
        """The width of the keys of all groups, which is that of the queries too."""
        return self.mixer_groups * self.state_width

    @property
    def part_multipliers(self) -> tuple[float, ...]:
        """The factors of gate, value, key, query and time, in their order in the mixer's projection."""
        parts = (self.mixer_gate_multiplier, self.mixer_value_multiplier, self.mixer_key_multiplier)
        return (*parts, self.mixer_query_multiplier, self.mixer_time_multiplier)

    def check(self, arch: ArchitectureFields) -> None:
        """See `Settings.check`."""
        if self.mixer_heads % self.mixer_groups:
            raise Malformed("settings", "the mixer's heads do not share its groups evenly")


def _recurrent(arch: ArchitectureFields, layer: int) -> Shapes:
    settings, hidden = FalconH1Settings.of(arch), arch.hidden_size
    heads, inner, channels = settings.mixer_heads, settings.inner, settings.inner + 2 * settings.shared
    table: dict[str, tuple[int, ...]] = {
        "in_proj.weight": (inner + channels + heads, hidden),
        "conv1d.weight": (channels, 1, settings.conv_width),
        "dt_bias": (heads,),
        "A_log": (heads,),
        "D": (heads,),
        "out_proj.weight": (hidden, inner),
    }
    if settings.conv_bias:
        table["conv1d.bias"] = (channels,)
    if settings.mixer_bias:
        table["in_proj.bias"] = (inner + channels + heads,)
    if settings.mixer_output_bias:
        table["out_proj.bias"] = (hidden,)
    if settings.gated_norm:
        table["norm.weight"] = (inner,)
    return {f"mamba.{name}": shape for name, shape in table.items()}


SIZES = {"hidden_size": 12, "intermediate_size": 16, "heads": 2, "kv_heads": 1, "head_dim": 6}

MIXER = FalconH1Settings(
    mixer_heads=2, mixer_width=3, state_width=4, conv_width=3, key_multiplier=1.5, mixer_out_multiplier=1.25
)

MULTIPLIED = replace(
    MIXER,
    mixer_heads=4,
    mixer_groups=2,
    gated_norm=True,
    norm_before_gate=False,
    embedding_multiplier=1.5,
    logits_multiplier=1.5,
    gate_multiplier=1.25,
    down_multiplier=0.75,
    attention_in_multiplier=1.5,
    attention_out_multiplier=0.75,
    mixer_in_multiplier=1.25,
    mixer_gate_multiplier=0.75,
    mixer_value_multiplier=0.75,
    mixer_key_multiplier=1.5,
    mixer_query_multiplier=1.25,
    mixer_time_multiplier=1.5,
)

FALCON_H1 = Family(
    "falcon_h1",
    norms=LayerNorms(before_feed_forward="pre_ff_layernorm"),
    recurrent=_recurrent,
    beside_attention=True,
    rare=True,
    settings=FalconH1Settings,
    drawn=(
        {**SIZES, "vocab_size": 27, "windows": (0,), "settings": MIXER},
        {**SIZES, "vocab_size": 33, "windows": (0, 0), "tied": True, "settings": MULTIPLIED},
    ),
)
