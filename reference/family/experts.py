"""Families whose feed-forward blocks are mixtures of experts.

Mixtral (arXiv 2401.04088), Qwen 2 MoE (2407.10671), Qwen 3 MoE (2505.09388) and GLM-4 MoE (2508.06471), after
transformers' `models/mixtral`, `models/qwen2_moe`, `models/qwen3_moe` and `models/glm4_moe`. A router scores the
experts of each row. The row goes through the experts with the highest scores, and their outputs are added with weights
made of the scores. Qwen 2 MoE and GLM-4 MoE have a shared expert beside them, through which every row goes. Tensors
have the names of Qwen 2 MoE.
"""

from dataclasses import dataclass, replace

from specverify.reference.family.base import Family, Shapes, gated_block
from specverify.reference.family.settings import ArchitectureFields, Settings, whole
from specverify.reference.malformed import Malformed


class Mixture(Settings):
    """The settings of a family with experts; one that a family lacks has the number that stands here."""

    experts: int
    experts_per_token: int
    expert_size = 0  # the inner width of an expert; 0 for that of a gated block
    shared_size = 0  # the inner width of a shared expert with a gate; 0 for none
    shared_experts = 0  # a shared expert without a gate is as wide as so many experts
    groups = 1  # experts come in so many groups,
    top_groups = 1  # of which so many are open to a row
    norm_topk = False  # whether the weights of the chosen experts are scaled to the sum of 1
    routed_scale = 1.0  # the factor of the weights of experts
    sparse_step = 1  # each so many layers, the last one of them has experts
    corrected = False  # whether the sum of score and correction bias chooses experts
    by_sigmoid = False  # whether a sigmoid scores each expert by itself, and not the softmax all of them
    group_best = 1  # the score of a group is the sum of so many best experts
    norm_min = 0.0  # the least sum by which the chosen weights are divided

    def has_experts(self, layer: int) -> bool:
        """Whether the feed-forward block of `layer` is a mixture of experts; other layers have a gated block."""
        return layer >= self.dense_layers and self.sparse_step > 0 and (layer + 1) % self.sparse_step == 0

    def check(self, arch: ArchitectureFields) -> None:
        """See `Settings.check`; for counts of experts and groups too."""
        experts, groups, num_open = self.experts, self.groups, self.top_groups
        if not self.experts_per_token <= experts:
            raise Malformed("settings", f"experts_per_token of {self.experts_per_token} with {experts} experts")
        # A group is scored by its best experts, and the chosen groups must hold the chosen experts.
        least = self.group_best
        if experts % groups or num_open > groups or (groups > 1 and experts // groups < least):
            raise Malformed("settings", f"{experts} experts in {groups} groups of which {num_open} are chosen")
        if experts < least or num_open * (experts // groups) < self.experts_per_token:
            raise Malformed("settings", f"{num_open} of {groups} groups hold fewer experts than a row takes")
        super().check(arch)


def mixture(arch: ArchitectureFields, layer: int) -> Shapes:
    """The tensors of the feed-forward block of `layer`."""
    hidden, settings = arch.hidden_size, Mixture.of(arch)
    if not settings.has_experts(layer):
        return gated_block("mlp", hidden, arch.intermediate_size)
    inner = settings.expert_size or arch.intermediate_size
    table: dict[str, tuple[int, ...]] = {"mlp.gate.weight": (settings.experts, hidden)}
    if settings.corrected:
        table["mlp.gate.e_score_correction_bias"] = (settings.experts,)
    for expert in range(settings.experts):
        table |= gated_block(f"mlp.experts.{expert}", hidden, inner)
    if settings.shared_size:
        table["mlp.shared_expert_gate.weight"] = (1, hidden)
        table |= gated_block("mlp.shared_expert", hidden, settings.shared_size)
    elif settings.shared_experts:
        table |= gated_block("mlp.shared_experts", hidden, settings.shared_experts * inner)
    return table


@dataclass(frozen=True)
class MixtralSettings(Mixture):
    """Mixtral's counts of experts, which are as wide as the gated blocks of other families."""

    norm_topk = True

    experts: int = whole(8)
    experts_per_token: int = whole(2)


@dataclass(frozen=True)
class Qwen2MoeSettings(Mixture):
    """The settings of Qwen 2 MoE."""

    experts: int = whole(60)
    experts_per_token: int = whole(4)
    expert_size: int = whole(1408)
    shared_size: int = whole(5632)
    norm_topk: bool = False
    sparse_step: int = whole(1)


@dataclass(frozen=True)
class Qwen3MoeSettings(Mixture):
    """The settings of Qwen 3 MoE."""

    experts: int = whole(128)
    experts_per_token: int = whole(8)
    expert_size: int = whole(768)
    norm_topk: bool = False
    sparse_step: int = whole(1)


@dataclass(frozen=True)
class Glm4MoeSettings(Mixture):
    """The settings of GLM-4 MoE."""

    corrected = True
    by_sigmoid = True
    group_best = 2
    partial_rotary = True

    experts: int = whole(128)
    experts_per_token: int = whole(8)
    expert_size: int = whole(1408)
    shared_experts: int = whole(1, least=0)
    dense_layers: int = whole(1, least=0)
    groups: int = whole(1)
    top_groups: int = whole(1)
    norm_topk: bool = True
    routed_scale: float = 1.0
    rotary_dim: int = 0


def _glm_modules(settings: Settings) -> Settings:
    """Every module has experts."""
    assert isinstance(settings, Glm4MoeSettings)
    return replace(settings, dense_layers=0)


SIZES = {"vocab_size": 27, "hidden_size": 16, "intermediate_size": 24, "heads": 2, "kv_heads": 1, "head_dim": 4}

MIXTRAL = Family(
    "mixtral",
    feed_forward=mixture,
    mixes_rows=True,
    rare=True,
    settings=MixtralSettings,
    drawn=(
        {**SIZES, "windows": (0, 0), "settings": MixtralSettings(experts=4)},
        {**SIZES, "vocab_size": 33, "heads": 3, "hidden_size": 18, "head_dim": 6, "windows": (5, 5), "tied": True,
         "settings": MixtralSettings(experts=3, experts_per_token=1)},
    ),
)  # fmt: skip

QWEN2_MOE = Family(
    "qwen2_moe",
    feed_forward=mixture,
    mixes_rows=True,
    rare=True,
    settings=Qwen2MoeSettings,
    drawn=(
        {**SIZES, "vocab_size": 25, "windows": (0, 0), "norm_eps": 1e-6, "qkv_bias": True,
         "settings": Qwen2MoeSettings(experts=4, experts_per_token=2, expert_size=12, shared_size=10)},
    ),
)  # fmt: skip

QWEN3_MOE = Family(
    "qwen3_moe",
    feed_forward=mixture,
    mixes_rows=True,
    rare=True,
    settings=Qwen3MoeSettings,
    drawn=(
        {**SIZES, "vocab_size": 39, "heads": 4, "kv_heads": 2, "head_dim": 8, "windows": (0, 0), "norm_eps": 1e-6,
         "qk_norm": True, "settings": Qwen3MoeSettings(experts=5, experts_per_token=2, expert_size=12, norm_topk=True,
                                                       sparse_step=2)},
    ),
)  # fmt: skip

GLM4_MOE = Family(
    "glm4_moe",
    feed_forward=mixture,
    mixes_rows=True,
    rare=True,
    settings=Glm4MoeSettings,
    modules=_glm_modules,
    drawn=(
        {**SIZES, "vocab_size": 21, "head_dim": 8, "windows": (0, 0), "qk_norm": True,
         "settings": Glm4MoeSettings(experts=4, experts_per_token=2, expert_size=12, routed_scale=1.5, rotary_dim=4)},
        {**SIZES, "vocab_size": 45, "heads": 4, "kv_heads": 2, "head_dim": 6, "windows": (0, 0), "qkv_bias": True,
         "settings": Glm4MoeSettings(experts=6, experts_per_token=3, expert_size=12, dense_layers=0, groups=3,
                                     top_groups=2, rotary_dim=2)},
    ),
)  # fmt: skip
