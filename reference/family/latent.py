"""Multi-head latent attention (MLA): DeepSeek-V2, DeepSeek-V3, Kimi K2.

After transformers' `models/deepseek_v2` and `models/deepseek_v3`. Keys and values of a row come from one latent vector,
compressed from its hidden state, and from one rotated part of keys that all heads share. A head of queries and keys is
its unrotated dimensions, then the rotated ones; a head of values has a width of its own. Queries may be compressed too.
Blocks after the first few layers are mixtures of experts with shared experts (`specverify.reference.family.experts`).
DeepSeek-V3 scores experts as GLM-4 MoE does; DeepSeek-V2 takes the softmax over all experts and scores a group by its
best one.
"""

from collections.abc import Mapping
from dataclasses import dataclass, replace
from typing import Any

from specverify.reference.family.base import Family, Shapes
from specverify.reference.family.experts import Mixture, mixture
from specverify.reference.family.settings import ArchitectureFields, LayerHeads, Settings, check_whole, whole
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


@dataclass(frozen=True)
class IndexedSettings(DeepseekV3Settings):
    """The settings of DeepSeek-V3.2 and GLM-5 (arXiv 2512.02556, transformers `models/deepseek_v32`).

    An indexer beside attention scores the columns for each row, and the row attends to the best of them.

    Attributes:
        index_heads: The number of heads of the indexer.
        index_width: Their width, of which the first `rotary_dim` dimensions are rotated.
        index_columns: The most columns that a row attends to.
        following_layers: The layers without an indexer, as the sum of 2**layer; each takes the columns of the layer
            before it.
    """

    index_heads: int = whole(64)
    index_width: int = whole(128)
    index_columns: int = whole(2048)
    following_layers: int = whole(0, least=0, most=2**16)

    def check(self, arch: ArchitectureFields) -> None:
        """See `Settings.check`."""
        super().check(arch)
        if not self.query_rank:
            raise Malformed("settings", "query_rank of 0: the indexer reads compressed queries")
        if self.index_width < self.rotary_dim:
            raise Malformed("settings", f"index_width of {self.index_width} has no {self.rotary_dim} to turn")
        if not self.interleaved:
            raise Malformed("settings", f"interleaved of 0: rotary embedding of {arch.family} turns neighbours")
        if self.following_layers % 2 or self.following_layers >= 2**arch.layers:
            raise Malformed("settings", f"following_layers of {self.following_layers}: a layer before chooses columns")

    def follows(self, layer: int) -> bool:
        """Whether `layer` takes the columns of the layer before it."""
        return bool(self.following_layers >> layer & 1)

    def layer_heads(self, arch: ArchitectureFields, layer: int) -> LayerHeads:
        """See `Settings.layer_heads`."""
        return LayerHeads(
            arch.kv_heads, arch.head_dim, int(self.value_dim), 0 if self.follows(layer) else self.index_width
        )

    def probed(self, width: int) -> "IndexedSettings":
        """A probe reads who sees whom by the mask alone: its rows attend to every column."""
        return replace(self, latent_rank=width, value_dim=width, index_columns=65536)


def _with_indexer(arch: ArchitectureFields, layer: int) -> Shapes:
    settings = IndexedSettings.of(arch)
    table = dict(_projections(arch, layer))
    if settings.follows(layer):
        return table
    width, prefix = settings.index_width, "self_attn.indexer"
    return {
        **table,
        f"{prefix}.wq_b.weight": (settings.index_heads * width, settings.query_rank),
        f"{prefix}.wk.weight": (width, arch.hidden_size),
        f"{prefix}.k_norm.weight": (width,),
        f"{prefix}.k_norm.bias": (width,),
        f"{prefix}.weights_proj.weight": (settings.index_heads, arch.hidden_size),
    }


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

INDEXED: Mapping[str, Any] = {
    "query_rank": 6, "latent_rank": 8, "rotary_dim": 2, "value_dim": 4, "experts": 4, "experts_per_token": 2,
    "expert_size": 8, "index_heads": 12, "index_width": 6, "index_columns": 4,
}  # fmt: skip

DEEPSEEK_V32 = Family(
    "deepseek_v32",
    feed_forward=mixture,
    projections=_with_indexer,
    mixes_rows=True,
    indexed=True,
    rare=True,
    settings=IndexedSettings,
    drawn=(
        # One head scores half of all columns as 0: ties are frequent.
        {**SIZES, "vocab_size": 25, "head_dim": 8,
         "settings": IndexedSettings(**{**INDEXED, "rotary_dim": 4, "index_heads": 1}, dense_layers=2, groups=1,
                                     top_groups=1)},
        {**SIZES, "vocab_size": 39,
         "settings": IndexedSettings(**INDEXED, dense_layers=1, groups=2, top_groups=1)},
    ),
)  # fmt: skip

GLM_MOE_DSA = Family(
    "glm_moe_dsa",
    feed_forward=mixture,
    projections=_with_indexer,
    mixes_rows=True,
    indexed=True,
    rare=True,
    settings=IndexedSettings,
    drawn=(
        {**SIZES, "vocab_size": 29, "windows": (0, 0, 0),
         "settings": IndexedSettings(**INDEXED, dense_layers=1, groups=1, top_groups=1, following_layers=2)},
    ),
)  # fmt: skip
