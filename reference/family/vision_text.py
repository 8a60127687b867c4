"""The text model of Qwen2-VL and Qwen2.5-VL (transformers `models/qwen2_vl`).

It (arXiv 2409.12191) is Qwen 2 whose rotary pairs are shared out among three axes of positions. The pairs of an axis
turn by the position on that axis; `mrope_section` of config.json holds their numbers. Text has one number on all axes,
and is Qwen 2's.
"""

from specverify.reference.family.base import ArchitectureFields, Family
from specverify.reference.malformed import Malformed

SECTIONS = ("time_pairs", "height_pairs", "width_pairs")
"""The settings that say how many rotary pairs turn by each axis, the pairs of the highest frequencies first."""


DEFAULTS = dict(zip(SECTIONS, (16.0, 24.0, 24.0), strict=True))
"""Their numbers in the published models, for heads of 128."""


def _check(arch: ArchitectureFields) -> None:
    if sum(arch.setting(name) for name in SECTIONS) != arch.head_dim // 2:
        raise Malformed("settings", f"{', '.join(SECTIONS)} do not share {arch.head_dim // 2} rotary pairs")
    if not arch.qkv_bias or arch.output_bias or arch.mlp_bias or arch.qk_norm:
        raise Malformed(
            "qkv_bias", f"{arch.words.name} has biases on q, k and v, and neither others nor norms of these"
        )


def _probed(settings: dict[str, float], width: int) -> dict[str, float]:
    """All pairs of a probe's heads of `width` turn by time; a number that is the default is not said."""
    shares = dict(zip(SECTIONS, (float(width // 2), 0.0, 0.0), strict=True))
    return {name: share for name, share in shares.items() if share != DEFAULTS[name]}


QWEN2_VL = Family(
    "qwen2_vl",
    rare=True,
    check=_check,
    probed=_probed,
    settings=DEFAULTS,
    drawn=(
        {
            "vocab_size": 15, "hidden_size": 16, "intermediate_size": 24, "heads": 2, "kv_heads": 1, "head_dim": 8,
            "windows": (0, 0), "qkv_bias": True,
            "settings": (("height_pairs", 1.0), ("time_pairs", 2.0), ("width_pairs", 1.0)),
        },
        {
            "vocab_size": 33, "hidden_size": 24, "intermediate_size": 24, "heads": 4, "kv_heads": 2, "head_dim": 6,
            "windows": (0, 0), "qkv_bias": True, "tied": True, "norm_eps": 1e-6,
            "settings": (("height_pairs", 1.0), ("time_pairs", 1.0), ("width_pairs", 1.0)),
        },
    ),
)  # fmt: skip
