"""The text model of Qwen2-VL and Qwen2.5-VL (transformers `models/qwen2_vl`).

It (arXiv 2409.12191) is Qwen 2 whose rotary pairs are shared out among three axes of positions. The pairs of an axis
turn by the position on that axis; `mrope_section` of config.json holds their numbers. Text has one number on all axes,
and is Qwen 2's.
"""

from dataclasses import dataclass

from specverify.reference.family.base import Family
from specverify.reference.family.settings import ArchitectureFields, Settings
from specverify.reference.malformed import Malformed


@dataclass(frozen=True)
class VisionTextSettings(Settings):
    """How many rotary pairs turn by each axis, the pairs of the highest frequencies first.

    The defaults are those of the published models, for heads of 128.
    """

    time_pairs: int = 16
    height_pairs: int = 24
    width_pairs: int = 24

    @property
    def sections(self) -> tuple[int, int, int]:
        """The three numbers, in the order of `mrope_section`."""
        return self.time_pairs, self.height_pairs, self.width_pairs

    def check(self, arch: ArchitectureFields) -> None:
        """See `Settings.check`."""
        pairs = arch.head_dim // 2
        if sum(self.sections) != pairs or any(section % 1 for section in self.sections):
            raise Malformed("settings", f"time_pairs, height_pairs, width_pairs do not share {pairs} rotary pairs")
        if not arch.qkv_bias or arch.output_bias or arch.mlp_bias or arch.qk_norm:
            raise Malformed(
                "qkv_bias", f"{arch.family} has biases on q, k and v, and neither others nor norms of these"
            )

    def with_wider_heads(self, ratio: float) -> "VisionTextSettings":
        """Pairs shared out as before, the rest of rounding for time; see `Settings.with_wider_heads`."""
        height, width = round(self.height_pairs * ratio), round(self.width_pairs * ratio)
        return VisionTextSettings(round(sum(self.sections) * ratio) - height - width, height, width)

    def probed(self, width: int) -> "VisionTextSettings":
        """All pairs of a probe's heads turn by time; see `Settings.probed`."""
        return VisionTextSettings(width // 2, 0, 0)


QWEN2_VL = Family(
    "qwen2_vl",
    rare=True,
    three_axes=True,
    settings=VisionTextSettings,
    drawn=(
        {
            "vocab_size": 15, "hidden_size": 16, "intermediate_size": 24, "heads": 2, "kv_heads": 1, "head_dim": 8,
            "windows": (0, 0), "qkv_bias": True,
            "settings": VisionTextSettings(2, 1, 1),
        },
        {
            "vocab_size": 33, "hidden_size": 24, "intermediate_size": 24, "heads": 4, "kv_heads": 2, "head_dim": 6,
            "windows": (0, 0), "qkv_bias": True, "tied": True, "norm_eps": 1e-6,
            "settings": VisionTextSettings(1, 1, 1),
        },
    ),
)  # fmt: skip
