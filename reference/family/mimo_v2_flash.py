"""MiMo-V2-Flash: layers with a window have twice as many heads of keys and values, and sinks.

After transformers' `models/mimo_v2_flash`. Heads of values are narrower than those of keys, and their rows are
multiplied by a number. Rotary embedding turns the first dimensions of a head, to a base of its own in layers with a
window. Experts are those of GLM-4 MoE without a shared one.
"""

from dataclasses import dataclass, replace

from specverify.reference.family.base import Family, Shapes
from specverify.reference.family.experts import Mixture, mixture
from specverify.reference.family.settings import ArchitectureFields, LayerHeads, positive, whole
from specverify.reference.malformed import Malformed


@dataclass(frozen=True)
class MiMoV2FlashSettings(Mixture):
    """The widths of heads, the scale of values, and the counts of experts."""

    corrected = True
    by_sigmoid = True
    group_best = 2
    partial_rotary = True

    value_dim: int = whole(128)
    value_scale: float = positive(0.707)
    local_theta: float = 0.0  # the base of rotary embedding in layers with a window; 0 for that of the others
    rotary_dim: int = 0
    experts: int = whole(256)
    experts_per_token: int = whole(8)
    expert_size: int = whole(2048)
    dense_layers: int = whole(1, least=0)
    groups: int = whole(1)
    top_groups: int = whole(1)
    norm_topk: bool = True
    routed_scale: float = 1.0

    def layer_heads(self, arch: ArchitectureFields, layer: int) -> LayerHeads:
        """See `Settings.layer_heads`."""
        return LayerHeads(arch.kv_heads * (2 if arch.windows[layer] else 1), arch.head_dim, self.value_dim)

    def check(self, arch: ArchitectureFields) -> None:
        """See `Settings.check`."""
        if self.local_theta and not self.local_theta > 1:
            raise Malformed("settings", f"local_theta of {self.local_theta} is not a rotary base (more than 1), nor 0")
        super().check(arch)

    def probed(self, width: int) -> "MiMoV2FlashSettings":
        """See `Settings.probed`."""
        return replace(self, value_dim=width, value_scale=1.0)


def _sinks(arch: ArchitectureFields, layer: int) -> Shapes:
    return {"self_attn.sinks": (arch.heads,)} if arch.windows[layer] else {}


SIZES = {"hidden_size": 16, "intermediate_size": 20, "heads": 4, "head_dim": 6}

MIMO_V2_FLASH = Family(
    "mimo_v2_flash",
    feed_forward=mixture,
    attention_extras=_sinks,
    mixes_rows=True,
    sinks=True,
    rare=True,
    settings=MiMoV2FlashSettings,
    drawn=(
        {**SIZES, "vocab_size": 33, "kv_heads": 1, "head_dim": 8, "windows": (0, 4),
         "settings": MiMoV2FlashSettings(4, 0.75, 50.0, 4, 4, 2, 12)},
        {**SIZES, "vocab_size": 19, "kv_heads": 2, "windows": (5, 0, 5), "qkv_bias": True,
         "settings": MiMoV2FlashSettings(3, 0.5, 0.0, 4, 4, 2, 10, dense_layers=0, groups=2, routed_scale=1.5)},
    ),
)  # fmt: skip
