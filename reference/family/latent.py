"""Multi-head latent attention (MLA): DeepSeek-V2, DeepSeek-V3, Kimi K2.

After transformers' `models/deepseek_v2` and `models/deepseek_v3`. Keys and values of a row come from one latent vector,
compressed from its hidden state, and from one rotated part of keys that all heads share. A head of queries and keys is
its unrotated dimensions, then the rotated ones; a head of values has a width of its own. Queries may be compressed too.
Blocks after the first few layers are mixtures of experts with shared experts (`specverify.reference.family.experts`).
DeepSeek-V3 scores experts as GLM-4 MoE does; DeepSeek-V2 takes the softmax over all experts and scores a group by its
best one.
"""

from specverify.reference.family.base import ArchitectureFields, Family, Shapes
from specverify.reference.family.experts import check_experts, mixture
from specverify.reference.malformed import Malformed


def _projections(arch: ArchitectureFields, layer: int) -> Shapes:
    hidden, heads, query_width = arch.hidden_size, arch.heads, arch.heads * arch.head_dim
    rank, latent, turned, values = (
        int(arch.setting(name)) for name in ("query_rank", "latent_rank", "rotary_dim", "value_dim")
    )
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
    table["kv_b_proj.weight"] = (heads * (arch.head_dim - turned + values), latent)
    table["o_proj.weight"] = (hidden, heads * values)
    if arch.output_bias:
        table["o_proj.bias"] = (hidden,)
    return {f"self_attn.{name}": shape for name, shape in table.items()}


def _check(arch: ArchitectureFields) -> None:
    check_experts(arch)
    for name, least in (("query_rank", 0), ("latent_rank", 1), ("rotary_dim", 2), ("value_dim", 1)):
        value = arch.setting(name)
        if value != int(value) or not least <= value <= 65536:
            raise Malformed("settings", f"{name} of {value} is not a whole number from {least} to 65536")
    if "interleaved" in arch.words.settings and arch.setting("interleaved") not in (0, 1):
        raise Malformed("settings", "interleaved is neither 0 nor 1")
    if arch.heads != arch.kv_heads:
        raise Malformed("kv_heads", f"{arch.kv_heads} for {arch.heads} heads: each head has keys of its own here")
    if arch.qk_norm:
        raise Malformed("qk_norm", f"{arch.words.name} has no norms of whole queries and keys")


def _probed(settings: dict[str, float], width: int) -> dict[str, float]:
    """The settings of a transparent probe: latent vectors and values hold `width` codes."""
    return {**settings, "latent_rank": float(width), "value_dim": float(width)}


ATTENTION = {
    "query_rank": 1536.0,  # the width of compressed queries; 0 where queries are projected in one step
    "latent_rank": 512.0,  # the width of the latent vector of keys and values
    "rotary_dim": 64.0,  # the last so many dimensions of a head are rotated, and all heads share those of keys
    "value_dim": 128.0,  # the width of a head of values
}

EXPERTS = {
    "experts_per_token": 8.0,
    "shared_experts": 1.0,
    "dense_layers": 3.0,
    "groups": 8.0,
    "top_groups": 4.0,
    "routed_scale": 2.5,
}

SIZES = {"vocab_size": 23, "hidden_size": 16, "intermediate_size": 20, "heads": 2, "kv_heads": 2, "head_dim": 6,
         "windows": (0, 0), "norm_eps": 1e-6}  # fmt: skip

DEEPSEEK_V3 = Family(
    "deepseek_v3",
    feed_forward=mixture,
    projections=_projections,
    probed=_probed,
    mixes_rows=True,
    rare=True,
    check=_check,
    settings={
        **ATTENTION,
        **EXPERTS,
        "experts": 256.0,
        "expert_size": 2048.0,
        "norm_topk": 1.0,
        "interleaved": 1.0,  # rotary embedding turns neighbours; else dimension i with the one half a width further
    },
    drawn=(
        {**SIZES, "settings": (("dense_layers", 1.0), ("expert_size", 8.0), ("experts", 4.0),
                               ("experts_per_token", 2.0), ("groups", 2.0), ("latent_rank", 8.0), ("query_rank", 6.0),
                               ("rotary_dim", 2.0), ("top_groups", 1.0), ("value_dim", 4.0))},
        # Without experts, so that it is drawn in 16 bits too.
        {**SIZES, "vocab_size": 21, "head_dim": 8,
         "settings": (("dense_layers", 2.0), ("latent_rank", 12.0), ("query_rank", 0.0), ("rotary_dim", 4.0),
                      ("value_dim", 6.0))},
        {**SIZES, "vocab_size": 35, "heads": 3, "kv_heads": 3, "hidden_size": 18, "head_dim": 10,
         "rope": {"kind": "yarn", "factor": 8.0, "original": 64, "mscale": 1.0, "mscale_all_dim": 1.0},
         "settings": (("dense_layers", 0.0), ("expert_size", 8.0), ("experts", 6.0), ("experts_per_token", 3.0),
                      ("groups", 3.0), ("interleaved", 0.0), ("latent_rank", 10.0), ("query_rank", 0.0),
                      ("rotary_dim", 4.0), ("top_groups", 2.0), ("value_dim", 6.0))},
    ),
)  # fmt: skip

DEEPSEEK_V2 = Family(
    "deepseek_v2",
    feed_forward=mixture,
    projections=_projections,
    probed=_probed,
    mixes_rows=True,
    rare=True,
    check=_check,
    settings={
        **ATTENTION,
        **EXPERTS,
        "experts": 64.0,
        "experts_per_token": 6.0,
        "expert_size": 1407.0,
        "shared_experts": 2.0,
        "dense_layers": 0.0,
        "groups": 1.0,  # 1 is transformers' topk_method greedy, more are group_limited_greedy
        "top_groups": 1.0,
        "routed_scale": 1.0,
    },
    drawn=(
        {**SIZES, "vocab_size": 27, "rope": {"kind": "yarn", "factor": 4.0, "original": 64, "mscale_all_dim": 0.7},
         "settings": (("dense_layers", 1.0), ("expert_size", 8.0), ("experts", 4.0), ("experts_per_token", 2.0),
                      ("groups", 2.0), ("latent_rank", 8.0), ("query_rank", 0.0), ("rotary_dim", 4.0),
                      ("routed_scale", 2.0), ("shared_experts", 1.0), ("value_dim", 6.0))},
    ),
)  # fmt: skip
