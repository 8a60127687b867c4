"""Qwen3-Next: layers with the gated delta rule in place of attention.

After transformers' `models/qwen3_next`: layers with the gated delta rule (arXiv 2412.06464) behind a short
convolution, and every so many layers one with attention whose output a gate multiplies. A recurrent layer has two
states: a matrix for each value head, and the last inputs of its convolution. Both belong to a path of tokens, and no
mask repairs them. Blocks are gated ones, or mixtures of experts as in Qwen 2 MoE. Qwen3.5
(`specverify.reference.family.qwen3_5`) has the same layers behind other projections.
"""

from dataclasses import dataclass, replace

from specverify.reference.family.base import Family, Shapes, gated
from specverify.reference.family.experts import Mixture, mixture
from specverify.reference.family.settings import ArchitectureFields, Settings, whole
from specverify.reference.malformed import Malformed


@dataclass(frozen=True)
class DeltaRuleSettings(Mixture):
    """The settings of a family with the gated delta rule in most layers and gated attention in the others."""

    partial_rotary = True
    experts = 0
    experts_per_token = 1

    attention_every: int = whole(4)  # the last of each so many layers has attention, the others the gated delta rule
    key_heads: int = whole(16)
    value_heads: int = whole(32)
    key_width: int = whole(128)
    value_width: int = whole(128)
    conv_width: int = whole(4, least=2)  # the number of inputs of the convolution, the row's own included
    rotary_dim: int = 0  # rotary embedding turns so many leading dimensions of a head; 0 for all

    @property
    def channels(self) -> int:
        """The number of channels of the convolution: queries, keys and values."""
        return 2 * self.key_heads * self.key_width + self.value_heads * self.value_width

    def check(self, arch: ArchitectureFields) -> None:
        """See `Settings.check`."""
        if self.value_heads % self.key_heads:
            raise Malformed("settings", "the value heads do not share the key heads evenly")
        if self.experts and self.experts_per_token > self.experts:
            raise Malformed("settings", f"experts_per_token of {self.experts_per_token} with fewer experts")
        Settings.check(self, arch)

    def has_recurrence(self, layer: int) -> bool:
        """Whether `layer` has the gated delta rule in place of attention."""
        return (layer + 1) % self.attention_every != 0


@dataclass(frozen=True)
class Qwen3NextSettings(DeltaRuleSettings):
    """The settings of Qwen3-Next."""

    experts: int = whole(512, least=0)  # 0 where every layer has a gated block
    experts_per_token: int = whole(10)
    expert_size: int = whole(512)
    shared_size: int = whole(512)
    norm_topk: bool = True
    sparse_step: int = whole(1)


def delta_net(arch: ArchitectureFields, inputs: Shapes) -> Shapes:
    """The tensors of a layer with the gated delta rule, whose projections of its input are `inputs`."""
    settings = DeltaRuleSettings.of(arch)
    values = settings.value_heads
    return {
        **inputs,
        "linear_attn.conv1d.weight": (settings.channels, 1, settings.conv_width),
        "linear_attn.dt_bias": (values,),
        "linear_attn.A_log": (values,),
        # Not `norm.weight`: this norm multiplies by its weight, the family's others by 1 plus theirs.
        "linear_attn.gain": (settings.value_width,),
        "linear_attn.out_proj.weight": (arch.hidden_size, values * settings.value_width),
    }


def _recurrent(arch: ArchitectureFields, layer: int) -> Shapes | None:
    settings = DeltaRuleSettings.of(arch)
    if not settings.has_recurrence(layer):
        return None
    width = settings.value_heads * settings.value_width
    inputs = {
        "linear_attn.in_proj_qkvz.weight": (settings.channels + width, arch.hidden_size),
        "linear_attn.in_proj_ba.weight": (2 * settings.value_heads, arch.hidden_size),
    }
    return delta_net(arch, inputs)


def _blocks(arch: ArchitectureFields, layer: int) -> Shapes:
    return mixture(arch, layer) if Qwen3NextSettings.of(arch).experts else gated(arch, layer)


def attention_in_all(settings: Settings) -> Settings:
    """The settings of MTP modules, none of which has the gated delta rule."""
    assert isinstance(settings, DeltaRuleSettings)
    return replace(settings, attention_every=1)


SIZES = {"vocab_size": 25, "hidden_size": 16, "intermediate_size": 20, "heads": 2, "kv_heads": 1, "head_dim": 8,
         "norm_eps": 1e-6, "qk_norm": True}  # fmt: skip

STATES = Qwen3NextSettings(
    attention_every=2, key_heads=1, value_heads=2, key_width=4, value_width=3, conv_width=3, rotary_dim=2, experts=0
)

QWEN3_NEXT = Family(
    "qwen3_next",
    resting_gain=0.0,
    feed_forward=_blocks,
    recurrent=_recurrent,
    gated_attention=True,
    mixes_rows=True,  # where it has experts
    rare=True,
    settings=Qwen3NextSettings,
    modules=attention_in_all,
    drawn=(
        {**SIZES, "windows": (0, 0), "settings": STATES},
        {**SIZES, "vocab_size": 39, "heads": 4, "kv_heads": 2, "head_dim": 6, "windows": (0, 0, 0),
         "settings": replace(STATES, attention_every=3, key_heads=2, rotary_dim=4, value_width=4)},
        {**SIZES, "vocab_size": 33, "windows": (0, 0),
         "settings": replace(STATES, experts=4, experts_per_token=2, expert_size=12, shared_size=10)},
    ),
)  # fmt: skip
