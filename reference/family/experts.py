"""Families whose feed-forward blocks are mixtures of experts.

Mixtral (arXiv 2401.04088), Qwen 2 MoE (2407.10671), Qwen 3 MoE (2505.09388) and GLM-4 MoE (2508.06471), after
transformers' `models/mixtral`, `models/qwen2_moe`, `models/qwen3_moe` and `models/glm4_moe`. A router scores the
experts of each row. The row goes through the experts with the highest scores, and their outputs are added with weights
made of the scores. Qwen 2 MoE and GLM-4 MoE have a shared expert beside them, through which every row goes. Tensors
have the names of Qwen 2 MoE.
"""

from specverify.reference.family.base import ArchitectureFields, Family, Shapes, gated_block
from specverify.reference.family.rotary_width import check_width
from specverify.reference.malformed import Malformed


def has_experts(arch: ArchitectureFields, layer: int) -> bool:
    """Whether the feed-forward block of `layer` is a mixture of experts; other layers have a gated block."""
    settings = arch.words.settings
    if "dense_layers" in settings and layer < arch.setting("dense_layers"):
        return False
    return "sparse_step" not in settings or (layer + 1) % int(arch.setting("sparse_step")) == 0


def expert_size(arch: ArchitectureFields) -> int:
    """The inner width of one expert."""
    return int(arch.setting("expert_size")) if "expert_size" in arch.words.settings else arch.intermediate_size


def shared_size(arch: ArchitectureFields) -> int:
    """The inner width of the shared expert; 0 for a family without one."""
    if "shared_size" in arch.words.settings:
        return int(arch.setting("shared_size"))
    return int(arch.setting("shared_experts")) * expert_size(arch) if "shared_experts" in arch.words.settings else 0


def has_correction(arch: ArchitectureFields) -> bool:
    """Whether experts are scored by the sigmoid, and chosen by the sum of score and correction bias."""
    return {"groups", "norm_topk"} <= set(arch.words.settings)


def mixture(arch: ArchitectureFields, layer: int) -> Shapes:
    """The tensors of the feed-forward block of `layer`."""
    hidden = arch.hidden_size
    if not has_experts(arch, layer):
        return gated_block("mlp", hidden, arch.intermediate_size)
    experts = int(arch.setting("experts"))
    table: dict[str, tuple[int, ...]] = {"mlp.gate.weight": (experts, hidden)}
    if has_correction(arch):
        table["mlp.gate.e_score_correction_bias"] = (experts,)
    for expert in range(experts):
        table |= gated_block(f"mlp.experts.{expert}", hidden, expert_size(arch))
    if "shared_size" in arch.words.settings:
        table["mlp.shared_expert_gate.weight"] = (1, hidden)
        table |= gated_block("mlp.shared_expert", hidden, shared_size(arch))
    elif shared_size(arch):
        table |= gated_block("mlp.shared_experts", hidden, shared_size(arch))
    return table


INTEGER_SETTINGS = {
    "experts", "experts_per_token", "expert_size", "shared_size", "shared_experts", "groups", "top_groups",
    "dense_layers", "sparse_step",
}  # fmt: skip
"""Settings that are whole numbers."""

FROM_NONE = {"dense_layers", "shared_experts"}
"""The fields of them that may be 0."""


def check_experts(arch: ArchitectureFields) -> None:
    """Raise Malformed for counts of experts and groups that make no sense together."""
    settings = {name: arch.setting(name) for name in arch.words.settings}
    for name in sorted(INTEGER_SETTINGS & set(settings)):
        least = 0 if name in FROM_NONE else 1
        if settings[name] != int(settings[name]) or not least <= settings[name] <= 65536:
            raise Malformed("settings", f"{name} of {settings[name]} is not a whole number from {least} to 65536")
    experts, groups = int(settings["experts"]), int(settings.get("groups", 1))
    if not settings["experts_per_token"] <= experts:
        raise Malformed("settings", f"experts_per_token of {settings['experts_per_token']:g} with {experts} experts")
    if settings.get("norm_topk", 0) not in (0, 1):
        raise Malformed("settings", "norm_topk is neither 0 nor 1")
    num_open = int(settings.get("top_groups", 1))
    # A corrected group is scored by its two best experts, and the chosen groups must hold the chosen experts.
    least = 2 if has_correction(arch) else 1
    if experts % groups or num_open > groups or (groups > 1 and experts // groups < least):
        raise Malformed("settings", f"{experts} experts in {groups} groups of which {num_open} are chosen")
    if "groups" in settings and (experts < least or num_open * (experts // groups) < settings["experts_per_token"]):
        raise Malformed("settings", f"{num_open} of {groups} groups hold fewer experts than a row takes")
    if "rotary_dim" in settings:
        check_width(arch)


SIZES = {"vocab_size": 27, "hidden_size": 16, "intermediate_size": 24, "heads": 2, "kv_heads": 1, "head_dim": 4}

MIXTRAL = Family(
    "mixtral",
    feed_forward=mixture,
    mixes_rows=True,
    rare=True,
    check=check_experts,
    settings={"experts": 8.0, "experts_per_token": 2.0},
    drawn=(
        {**SIZES, "windows": (0, 0), "settings": (("experts", 4.0),)},
        {**SIZES, "vocab_size": 33, "heads": 3, "hidden_size": 18, "head_dim": 6, "windows": (5, 5), "tied": True,
         "settings": (("experts", 3.0), ("experts_per_token", 1.0))},
    ),
)  # fmt: skip

QWEN2_MOE = Family(
    "qwen2_moe",
    feed_forward=mixture,
    mixes_rows=True,
    rare=True,
    check=check_experts,
    settings={
        "experts": 60.0,
        "experts_per_token": 4.0,
        "expert_size": 1408.0,
        "shared_size": 5632.0,
        "norm_topk": 0.0,  # 1 where the weights of the chosen experts are scaled to the sum of 1
        "sparse_step": 1.0,  # each so many layers, the last one of them has experts
    },
    drawn=(
        {**SIZES, "vocab_size": 25, "windows": (0, 0), "norm_eps": 1e-6, "qkv_bias": True,
         "settings": (("expert_size", 12.0), ("experts", 4.0), ("experts_per_token", 2.0), ("shared_size", 10.0))},
    ),
)  # fmt: skip

QWEN3_MOE = Family(
    "qwen3_moe",
    feed_forward=mixture,
    mixes_rows=True,
    rare=True,
    check=check_experts,
    settings={
        "experts": 128.0,
        "experts_per_token": 8.0,
        "expert_size": 768.0,
        "norm_topk": 0.0,
        "sparse_step": 1.0,
    },
    drawn=(
        {**SIZES, "vocab_size": 39, "heads": 4, "kv_heads": 2, "head_dim": 8, "windows": (0, 0), "norm_eps": 1e-6,
         "qk_norm": True, "settings": (("expert_size", 12.0), ("experts", 5.0), ("experts_per_token", 2.0),
                                       ("norm_topk", 1.0), ("sparse_step", 2.0))},
    ),
)  # fmt: skip

GLM4_MOE = Family(
    "glm4_moe",
    feed_forward=mixture,
    mixes_rows=True,
    rare=True,
    check=check_experts,
    settings={
        "experts": 128.0,
        "experts_per_token": 8.0,
        "expert_size": 1408.0,
        "shared_experts": 1.0,  # the shared expert is as wide as so many experts
        "dense_layers": 1.0,  # the first so many layers have a gated block
        "groups": 1.0,  # experts come in so many groups,
        "top_groups": 1.0,  # of which so many are open to a row
        "norm_topk": 1.0,
        "routed_scale": 1.0,  # the factor of the weights of experts
        "rotary_dim": 0.0,  # rotary embedding turns so many leading dimensions of a head; 0 for all
    },
    drawn=(
        {**SIZES, "vocab_size": 21, "head_dim": 8, "windows": (0, 0), "qk_norm": True,
         "settings": (("expert_size", 12.0), ("experts", 4.0), ("experts_per_token", 2.0), ("rotary_dim", 4.0),
                      ("routed_scale", 1.5))},
        {**SIZES, "vocab_size": 45, "heads": 4, "kv_heads": 2, "head_dim": 6, "windows": (0, 0), "qkv_bias": True,
         "settings": (("dense_layers", 0.0), ("expert_size", 12.0), ("experts", 6.0), ("experts_per_token", 3.0),
                      ("groups", 3.0), ("rotary_dim", 2.0), ("top_groups", 2.0))},
    ),
)  # fmt: skip
