"""DeepSeek-V2, DeepSeek-V3 and Kimi K2: latent attention (MLA), and experts.

transformers 5.23 hands its cache latent vectors and rotated parts, and expands them to keys and values after every
read. The engine's caches hold either, as the case's layout says: `LatentRowsCache` stands between. Attention over
latent rows is that of `specverify.backends.engine.attention.latent`.
"""

from functools import partial
from typing import Any

import torch
import transformers
from torch import Tensor, nn
from transformers import DeepseekV2Config, DeepseekV2ForCausalLM, DeepseekV3Config, DeepseekV3ForCausalLM
from transformers.models.deepseek_v2.modeling_deepseek_v2 import DeepseekV2Attention

from specverify.backends.base import Unsupported
from specverify.backends.engine.attention.interface import through_interface
from specverify.backends.engine.attention.latent import Absorption
from specverify.backends.engine.kv.lanes import BatchCache, PagedLanes
from specverify.backends.engine.model.family.base import ModelFamily, rope_parameters
from specverify.backends.engine.model.family.experts import (
    ExactGroupRouter,
    expert_counts,
    grouped_counts,
    stack_experts,
)
from specverify.backends.engine.model.float64_modules import ExactComplexRotary, rms_norm
from specverify.reference.architecture import Architecture
from specverify.reference.family.latent import DeepseekV3Settings, IndexedSettings, Latent


class LatentRowsCache:
    """The cache argument of one layer's attention: caches the latent rows that it is handed, or expands them."""

    def __init__(self, module: Any, lanes: Any) -> None:
        self.module = module
        self.lanes = lanes

    def update(self, latent: Tensor, rotated: Tensor, layer: int, *_: Any, **__: Any) -> tuple[Tensor, Tensor]:
        """Write this forward's rows, [B, 1, T, rank] and [B, 1, T, rotary_dim]; return the columns of the cache."""
        if self.lanes.latent:
            return self.lanes.update(latent, rotated, layer)  # type: ignore[no-any-return]
        key, value = type(self.module).expand_kv(self.module, latent, rotated)
        columns: tuple[Tensor, Tensor] = self.lanes.update(key, value, layer)
        return columns


def cache_latent_rows(network: Any) -> None:
    """Change a model with latent attention, in place, so that its caches are updated through `LatentRowsCache`."""
    for layer in network.model.layers:
        layer.self_attn.expand_kv = _unchanged
        layer.self_attn.absorbed = Absorption(layer.self_attn)
        layer.self_attn.register_forward_pre_hook(_hand_over, with_kwargs=True)


def _unchanged(key: Tensor, value: Tensor) -> tuple[Tensor, Tensor]:
    return key, value


def _hand_over(
    module: nn.Module, args: tuple[Any, ...], named_arguments: dict[str, Any]
) -> tuple[tuple[Any, ...], dict[str, Any]]:
    lanes, indexer = named_arguments["past_key_values"], getattr(module, "indexer", None)
    if indexer is None:
        return args, {**named_arguments, "past_key_values": LatentRowsCache(module, lanes)}
    rows = indexer.keys(named_arguments["hidden_states"], named_arguments["position_embeddings"])
    return args, {**named_arguments, "past_key_values": IndexedRowsCache(module, lanes, rows)}


class IndexedRowsCache(LatentRowsCache):
    """The same of a layer with an indexer: the index key of a row stands behind its key, or its latent vector.

    Every layout then keeps, moves and drops both together.

    Attributes:
        rows: The index keys of this forward's rows, [B, T, width].
        columns: Those of all columns, [B, C, width], once `update` has been called.
    """

    def __init__(self, module: Any, lanes: Any, rows: Tensor) -> None:
        super().__init__(module, lanes)
        self.rows = rows
        self.columns = rows

    def update(self, latent: Tensor, rotated: Tensor, layer: int, *_: Any, **__: Any) -> tuple[Tensor, Tensor]:
        """See `LatentRowsCache`; the columns are returned without their index keys."""
        if self.lanes.latent:
            key, value = latent, rotated
        else:
            key, value = type(self.module).expand_kv(self.module, latent, rotated)
        index_keys = self.rows[:, None].expand(-1, key.shape[1], -1, -1)
        # All columns are read by the indexer, also where attention would read them in their pages.
        gather = partial(BatchCache.update, self.lanes) if isinstance(self.lanes, PagedLanes) else self.lanes.update
        keys, values = gather(torch.cat([key, index_keys], -1), value, layer)
        width = self.rows.shape[-1]
        self.columns = keys[:, 0, :, -width:]
        return keys[..., :-width].contiguous(), values

    def update_indexer(self, keys: Tensor, layer: int) -> Tensor:
        """The index keys of all columns, [B, C, width]; `keys` are those of this forward's rows."""
        return self.columns


class Indexer(nn.Module):
    """The indexer of transformers' DeepSeek-V3.2 and GLM-5, which takes the first of columns with equal scores.

    The first is that of the earliest position; torch's `topk` leaves open which of them it takes. Scores are computed
    in float32 at least.

    Attributes:
        module: transformers' own indexer, whose weights are read.
        interleaved: Whether rotary embedding turns neighbours.
    """

    def __init__(self, module: Any, interleaved: bool) -> None:
        super().__init__()
        self.module = module
        self.interleaved = interleaved

    def keys(self, hidden: Tensor, tables: Any) -> Tensor:
        """The index keys [B, T, width] of the input `hidden` [B, T, H] of attention."""
        rows: Tensor = self.module.k_norm(self.module.wk(hidden))
        return self._turn(rows[:, :, None], tables)[:, :, 0]

    def _turn(self, x: Tensor, tables: Any) -> Tensor:
        """`x` [B, T, heads, width], its first dimensions turned."""
        cos, sin = (table[..., : table.shape[-1] // 2].unsqueeze(2) for table in tables)
        width = 2 * cos.shape[-1]
        part = x[..., :width]
        if self.interleaved:
            first, second = part[..., 0::2], part[..., 1::2]
        else:
            first, second = part.chunk(2, -1)
        return torch.cat([first * cos - second * sin, second * cos + first * sin, x[..., width:]], -1)

    def scores(self, hidden: Tensor, compressed: Tensor, tables: Any, columns: Tensor) -> Tensor:
        """The scores [B, T, C] of columns with index keys `columns` [B, C, width]."""
        queries = self.module.wq_b(compressed).unflatten(-1, (self.module.n_heads, -1))
        queries = self._turn(queries, tables)
        dtype = torch.promote_types(queries.dtype, torch.float32)
        products = self.rectify(queries.to(dtype) @ columns.to(dtype).transpose(-1, -2).unsqueeze(1))
        weights = self.module.weights_proj(hidden.to(self.module.weights_proj.weight.dtype)).to(dtype)
        scores: Tensor = (weights.unsqueeze(-2) @ products).squeeze(-2)
        return scores

    def rectify(self, products: Tensor) -> Tensor:
        """The products [B, heads, T, C] of queries and index keys as the weights of the heads sum them."""
        return torch.relu(products)

    def forward(
        self, hidden: Tensor, compressed: Tensor, tables: Any, mask: Tensor, _: Any = None, past_key_values: Any = None
    ) -> Tensor:
        """The best columns of each row, int64 [B, T, k], of those that `mask` [B, T, C] shows or does not hide."""
        rows = self.keys(hidden, tables)
        columns = rows if past_key_values is None else past_key_values.update_indexer(rows, 0)
        scores = self.scores(hidden, compressed, tables, columns)
        scores = scores.masked_fill(~mask, -torch.inf) if mask.dtype == torch.bool else scores + mask
        order = by_position(mask)[:, None].expand(scores.shape)
        return order.gather(-1, self.best(scores.gather(-1, order)))

    def best(self, scores: Tensor) -> Tensor:
        """The places of the greatest of `scores` [B, T, C], the first ones where scores are equal."""
        return scores.sort(dim=-1, descending=True, stable=True)[1][..., : self.module.index_topk]


def by_position(mask: Tensor) -> Tensor:
    """The columns, int64 [B, C], in an order in which those that a row sees stand by position.

    A row of a tree may have a smaller number than the row above it. But more rows see the row above: its whole subtree
    does. `mask` [B, T, C] shows the columns, or does not hide them.
    """
    is_seen = mask if mask.dtype == torch.bool else mask == 0
    return is_seen.sum(1).argsort(dim=-1, descending=True, stable=True)


def index_columns(network: Any) -> None:
    """Change a model with an indexer, in place: its caches hold index keys, and its choice goes by a stated rule."""
    interleaved = type(network).__name__.startswith("Glm")
    network.index_widths = []
    for layer in network.model.layers:
        attention = layer.self_attn
        own = getattr(attention, "indexer", None)
        network.index_widths.append(0 if own is None else own.head_dim)
        if own is not None:
            attention.indexer = Indexer(own, interleaved)
    cache_latent_rows(network)


class ExactAttention(DeepseekV2Attention):  # type: ignore[misc]  # transformers is untyped here
    """DeepSeek-V2's attention without a step in float32; transformers' own rotates queries and keys in float32."""

    def forward(
        self,
        hidden_states: Tensor,
        attention_mask: Tensor,
        past_key_values: Any,
        position_embeddings: Tensor,
        **kwargs: Any,
    ) -> tuple[Tensor, None]:
        """Compute transformers' `forward`, with `position_embeddings` complex128 [B, T, rotary_dim / 2]."""
        rows = hidden_states.shape[:-1]
        if self.q_lora_rank is None:
            query = self.q_proj(hidden_states)
        else:
            query = self.q_b_proj(self.q_a_layernorm(self.q_a_proj(hidden_states)))
        query = query.view(*rows, -1, self.qk_head_dim).transpose(1, 2)
        plain, turning = query.split([self.qk_nope_head_dim, self.qk_rope_head_dim], -1)
        latent, rotated = self.kv_a_proj_with_mqa(hidden_states).split([self.kv_lora_rank, self.qk_rope_head_dim], -1)
        latent = self.kv_a_layernorm(latent)[:, None]
        turning, rotated = (_rotate(part, position_embeddings) for part in (turning, rotated[:, None]))
        key, value = past_key_values.update(latent, rotated, self.layer_idx)
        key, value = self.expand_kv(key, value)
        output, _ = through_interface(
            self, torch.cat((plain, turning), -1), key, value, attention_mask, scaling=self.scaling, **kwargs
        )
        return self.o_proj(output.reshape(*rows, -1)), None


def _rotate(x: Tensor, frequencies: Tensor) -> Tensor:
    """`x` [B, heads, T, rotary_dim], rotated; each pair of neighbouring dimensions is one complex number."""
    pairs = torch.view_as_complex(x.reshape(*x.shape[:-1], -1, 2).contiguous())
    return torch.view_as_real(pairs * frequencies[:, None]).flatten(3)


def _exact_attention(module: nn.Module, _: Any) -> nn.Module:
    module.__class__ = ExactAttention  # the weights and settings of the module stay, and so do its hooks
    return module


class ExactSoftmaxRouter(nn.Module):
    """The router of DeepSeek-V2 in the dtype of its input: the softmax over all experts, the best groups, experts."""

    def __init__(self, module: Any, _: Any) -> None:
        super().__init__()
        self.weight = module.weight
        self.top_k = module.top_k
        self.factor = module.routed_scaling_factor
        grouped = module.topk_method == "group_limited_greedy"
        self.groups: int = module.num_group if grouped else 1
        self.open: int = module.topk_group if grouped else 1

    def forward(self, hidden: Tensor) -> tuple[Tensor, Tensor, Tensor]:
        """The products [T, experts], and the weights and indices [T, k] of the chosen experts of `hidden` [..., H]."""
        products = hidden.reshape(-1, hidden.shape[-1]) @ self.weight.T
        grouped = products.softmax(-1).unflatten(-1, (self.groups, -1))
        best_groups = grouped.amax(-1).topk(self.open, dim=-1)[1]
        is_closed = torch.ones_like(grouped[..., 0], dtype=torch.bool).scatter(-1, best_groups, False)
        weights, experts = grouped.masked_fill(is_closed[..., None], 0.0).flatten(-2).topk(self.top_k, dim=-1)
        return products, weights * self.factor, experts


def _fields(arch: Architecture) -> dict[str, Any]:
    if arch.mlp_bias:
        raise Unsupported(f"{arch.family} with biases in its feed-forward blocks: transformers' experts have none")
    settings = Latent.of(arch)
    if not settings.shared_experts:
        raise Unsupported(f"{arch.family} without a shared expert: transformers' model always has one")
    rope = rope_parameters(arch.rope)
    if arch.rope.kind == "dynamic" and arch.rotary_dim == 2:
        raise Unsupported(f"{arch.family} with 2 dimensions turned by dynamic: transformers divides by these less 2")
    if arch.rope.kind != "default" and arch.rope.mscale_all_dim:
        if arch.rope.kind == "longrope":
            raise Unsupported(f"{arch.family} with longrope and mscale_all_dim: whose factor transformers lacks")
        rope["mscale_all_dim"] = arch.rope.mscale_all_dim
    rotated = int(arch.rotary_dim)
    return {
        **expert_counts(settings),
        "head_dim": rotated,
        "rope_parameters": rope,
        "q_lora_rank": settings.query_rank or None,
        "kv_lora_rank": settings.latent_rank,
        "qk_rope_head_dim": rotated,
        "qk_nope_head_dim": arch.head_dim - rotated,
        "v_head_dim": arch.value_dim,
        **grouped_counts(settings),
    }


def _v3(arch: Architecture) -> dict[str, Any]:
    return {**_fields(arch), "rope_interleave": DeepseekV3Settings.of(arch).interleaved}


def _v2(arch: Architecture) -> dict[str, Any]:
    settings = Latent.of(arch)
    if settings.latent_rank % 2 or arch.head_dim % 2:
        raise Unsupported(f"{arch.family} with an odd latent rank or head: transformers turns pairs in place")
    return {**_fields(arch), "topk_method": "group_limited_greedy" if settings.groups > 1 else "greedy"}


def _kimi(content: dict[str, Any]) -> Any:
    """The config for the config.json `content` of Kimi K2, whose own code is DeepSeek-V3's."""
    left_out = ("model_type", "auto_map", "architectures")
    return DeepseekV3Config(**{key: value for key, value in content.items() if key not in left_out})


DEEPSEEK_V3 = ModelFamily(
    "deepseek_v3",
    DeepseekV3Config,
    DeepseekV3ForCausalLM,
    _v3,
    one_bias=True,
    arrange=stack_experts,
    prepare=cache_latent_rows,
    exact={"DeepseekV3RMSNorm": rms_norm("variance_epsilon"), "DeepseekV3TopkRouter": ExactGroupRouter},
    checkpoint={"kimi_k2": _kimi},
)
DEEPSEEK_V2 = ModelFamily(
    "deepseek_v2",
    DeepseekV2Config,
    DeepseekV2ForCausalLM,
    _v2,
    one_bias=True,
    arrange=stack_experts,
    prepare=cache_latent_rows,
    exact={
        "DeepseekV2RMSNorm": rms_norm("variance_epsilon"),
        "DeepseekV2TopkRouter": ExactSoftmaxRouter,
        "DeepseekV2RotaryEmbedding": lambda _, config: ExactComplexRotary(config),
        "DeepseekV2Attention": _exact_attention,
    },
)


def _indexed(arch: Architecture) -> dict[str, Any]:
    settings = IndexedSettings.of(arch)
    dense = min(int(settings.dense_layers), arch.layers)
    fields = {name: value for name, value in _fields(arch).items() if name != "rope_interleave"}
    fields |= {
        "mlp_layer_types": ["dense"] * dense + ["sparse"] * (arch.layers - dense),
        "index_n_heads": settings.index_heads,
        "index_head_dim": settings.index_width,
        "index_topk": settings.index_columns,
    }
    if arch.family == "glm_moe_dsa":
        fields["indexer_types"] = ["shared" if settings.follows(layer) else "full" for layer in range(arch.layers)]
    elif settings.following_layers:
        raise Unsupported("deepseek_v32 with layers that take the columns of the one before: only glm_moe_dsa has them")
    return fields


def _layer_norm(module: nn.Module, _: Any) -> nn.Module:
    return module  # torch computes it in the dtype of its input


if hasattr(transformers, "DeepseekV32ForCausalLM"):  # later than the oldest release that the engine runs on
    DEEPSEEK_V32 = ModelFamily(
        "deepseek_v32",
        transformers.DeepseekV32Config,
        transformers.DeepseekV32ForCausalLM,
        _indexed,
        one_bias=True,
        arrange=stack_experts,
        prepare=index_columns,
        exact={"DeepseekV32RMSNorm": rms_norm("variance_epsilon"), "DeepseekV32TopkRouter": ExactGroupRouter,
               "LayerNorm": _layer_norm},
    )  # fmt: skip
if hasattr(transformers, "GlmMoeDsaForCausalLM"):
    GLM_MOE_DSA = ModelFamily(
        "glm_moe_dsa",
        transformers.GlmMoeDsaConfig,
        transformers.GlmMoeDsaForCausalLM,
        _indexed,
        one_bias=True,
        arrange=stack_experts,
        prepare=index_columns,
        exact={"GlmMoeDsaRMSNorm": rms_norm("variance_epsilon"), "GlmMoeDsaTopkRouter": ExactGroupRouter,
               "LayerNorm": _layer_norm},
    )  # fmt: skip
