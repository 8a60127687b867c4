"""Multi-head latent attention (MLA): DeepSeek-V2, DeepSeek-V3, Kimi K2.

After transformers' `models/deepseek_v2` and `models/deepseek_v3`. Keys and values of a row come from one latent vector,
compressed from its hidden state, and from one rotated part of keys that all heads share. A head of queries and keys is
its unrotated dimensions, then the rotated ones; a head of values has a width of its own. Queries may be compressed too.
Blocks after the first few layers are mixtures of experts with shared experts (`specverify.reference.family.experts`).
DeepSeek-V3 scores experts as GLM-4 MoE does; DeepSeek-V2 takes the softmax over all experts and scores a group by its
best one.
"""

from dataclasses import dataclass, replace

from specverify.reference.family.base import Family, Shapes
from specverify.reference.family.experts import Mixture, mixture
from specverify.reference.family.settings import ArchitectureFields, Settings, check_whole, whole
from specverify.reference.malformed import Malformed


def _projections(arch: ArchitectureFields, layer: int) -> Shapes:
    settings = Latent.of(arch)
    hidden, heads, query_width = arch.hidden_size, arch.heads, arch.heads * arch.head_dim
    rank, latent, turned = settings.query_rank, settings.latent_rank, settings.rotary_dim
    table: dict[str, tuple[int, ...]] = {}
    widths = {"kv_a_proj_with_mqa": latent + turned}
    if rank:
        widths = {"q_a_proj": rank, **widths}
        table |= {"q_a_layernorm.weight": (rank,), "q_b_proj.weight": (query_width, rank)}
    else:
        table["q_proj.weight"] = (query_width, hidden)
    for name, width in widths.items():
        table[f"{name}.weight"] = (width, hidden)
        if arch.qkv_bias:
            table[f"{name}.bias"] = (width,)
    table["kv_a_layernorm.weight"] = (latent,)
    table["kv_b_proj.weight"] = (heads * (arch.head_dim - turned + settings.value_dim), latent)
    table["o_proj.weight"] = (hidden, heads * settings.value_dim)
    if arch.output_bias:
        table["o_proj.bias"] = (hidden,)
    return {f"self_attn.{name}": shape for name, shape in table.items()}


@dataclass(frozen=True)
class Latent(Mixture):
    """The settings of latent attention, and those of experts that both families have."""

    query_rank: int = whole(1536, least=0)  # the width of compressed queries; 0 for queries projected in one step
    latent_rank: int = whole(512)  # the width of the latent vector of keys and values
    rotary_dim: int = 64  # the last so many dimensions of a head are rotated, and all heads share those of keys
    value_dim: int = whole(128)  # the width of a head of values
    experts_per_token: int = whole(8)
    shared_experts: int = whole(1, least=0)
    dense_layers: int = whole(3, least=0)
    groups: int = whole(8)
    top_groups: int = whole(4)
    routed_scale: float = 2.5
    experts: int = whole(256)
    expert_size: int = whole(2048)

    def check(self, arch: ArchitectureFields) -> None:
        """See `Settings.check`."""
        super().check(arch)
        check_whole("rotary_dim", self.rotary_dim, least=2)
        if arch.heads != arch.kv_heads:
            raise Malformed("kv_heads", f"{arch.kv_heads} for {arch.heads} heads: each head has keys of its own here")
        if arch.qk_norm:
            raise Malformed("qk_norm", f"{arch.family} has no norms of whole queries and keys")

    def probed(self, width: int) -> "Latent":
        """Latent vectors and values hold the codes; see `Settings.probed`."""
        return replace(self, latent_rank=width, value_dim=width)


@dataclass(frozen=True)
class DeepseekV3Settings(Latent):
    """The settings of DeepSeek-V3 and Kimi K2."""

    corrected = True
    by_sigmoid = True
    group_best = 2

    norm_topk: bool = True
    interleaved: bool = True  # rotary embedding turns neighbours; else dimension i with the one half a width further


@dataclass(frozen=True)
class DeepseekV2Settings(Latent):
    """The settings of DeepSeek-V2."""

    experts_per_token: int = whole(6)
    shared_experts: int = whole(2, least=0)
    dense_layers: int = whole(0, least=0)
    groups: int = whole(1)  # 1 is transformers' topk_method greedy, more are group_limited_greedy
    top_groups: int = whole(1)
    routed_scale: float = 1.0
    experts: int = whole(64)
    expert_size: int = whole(1407)


def _modules(settings: Settings) -> Settings:
    """Every module has experts."""
    assert isinstance(settings, Latent)
    return replace(settings, dense_layers=0)


SIZES = {"vocab_size": 23, "hidden_size": 16, "intermediate_size": 20, "heads": 2, "kv_heads": 2, "head_dim": 6,
         "windows": (0, 0), "norm_eps": 1e-6}  # fmt: skip

DEEPSEEK_V3 = Family(
    "deepseek_v3",
    feed_forward=mixture,
    projections=_projections,
    mixes_rows=True,
    rare=True,
    settings=DeepseekV3Settings,
    modules=_modules,
    drawn=(
        {**SIZES, "settings": DeepseekV3Settings(query_rank=6, latent_rank=8, rotary_dim=2, value_dim=4, experts=4,
                                                  experts_per_token=2, expert_size=8, dense_layers=1, groups=2,
                                                  top_groups=1)},
        # Without experts, so that it is drawn in 16 bits too.
        {**SIZES, "vocab_size": 21, "head_dim": 8,
         "settings": DeepseekV3Settings(query_rank=0, latent_rank=12, rotary_dim=4, value_dim=6, dense_layers=2)},
        {**SIZES, "vocab_size": 35, "heads": 3, "kv_heads": 3, "hidden_size": 18, "head_dim": 10,
         "rope": {"kind": "yarn", "factor": 8.0, "original": 64, "mscale": 1.0, "mscale_all_dim": 1.0},
         "settings": DeepseekV3Settings(query_rank=0, latent_rank=10, rotary_dim=4, value_dim=6, experts=6,
                                        experts_per_token=3, expert_size=8, dense_layers=0, groups=3, top_groups=2,
                                        interleaved=False)},
    ),
)  # fmt: skip

DEEPSEEK_V2 = Family(
    "deepseek_v2",
    feed_forward=mixture,
    projections=_projections,
    mixes_rows=True,
    rare=True,
    settings=DeepseekV2Settings,
    drawn=(
        {**SIZES, "vocab_size": 27, "rope": {"kind": "yarn", "factor": 4.0, "original": 64, "mscale_all_dim": 0.7},
         "settings": DeepseekV2Settings(query_rank=0, latent_rank=8, rotary_dim=4, value_dim=6, experts=4,
                                        experts_per_token=2, expert_size=8, shared_experts=1, dense_layers=1, groups=2,
                                        routed_scale=2.0)},
    ),
)  # fmt: skip
