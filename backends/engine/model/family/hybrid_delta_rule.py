"""Qwen3-Next: gated delta rule in most layers, gated attention in the others."""

from typing import Any

import torch
from torch import Tensor, nn
from transformers import Qwen3NextConfig, Qwen3NextForCausalLM
from transformers.models.qwen3_next.modeling_qwen3_next import Qwen3NextGatedDeltaNet

from specverify.backends.base import Unsupported
from specverify.backends.engine.kv.lanes import BatchCache
from specverify.backends.engine.kv.recurrent import LayerState, states_of
from specverify.backends.engine.model.family.base import ModelFamily
from specverify.backends.engine.model.family.experts import ExactRouter, expert_counts, stack_experts
from specverify.backends.engine.model.float64_modules import rms_norm
from specverify.reference.architecture import Architecture
from specverify.reference.family.hybrid_delta_rule import Qwen3NextSettings

LEAST = 1e-6
"""Added to the sum of squares by which queries and keys are normed."""


class TreeDeltaNet(Qwen3NextGatedDeltaNet):  # type: ignore[misc]  # transformers is untyped here
    """The layer of transformers, with its weights, over rows that form a tree."""

    def forward(self, hidden_states: Tensor, cache_params: BatchCache, attention_mask: Any = None, **_: Any) -> Tensor:
        """The layer's output [B, T, hidden] for rows `hidden_states` [B, T, hidden] whose states `cache_params` has.

        Padding rows, of which the caches know nothing, have zeros as their output.
        """
        lanes, (batch, width) = cache_params, hidden_states.shape[:2]
        parts = self.fix_query_key_value_ordering(self.in_proj_qkvz(hidden_states), self.in_proj_ba(hidden_states))
        query, key, value, gate, rate, rise = parts
        entering = torch.cat([part.reshape(batch, width, -1) for part in (query, key, value)], -1)
        # As transformers: the decay in float32 whatever the working dtype, and the memory with it.
        wide_dtype = torch.promote_types(hidden_states.dtype, torch.float32)
        decay = (-self.A_log.to(wide_dtype).exp() * nn.functional.softplus(rise.to(wide_dtype) + self.dt_bias)).exp()
        rate = rate.sigmoid().to(wide_dtype)
        read = hidden_states.new_zeros(batch, width, self.num_v_heads, self.head_v_dim)
        for lane, (cache, rows) in enumerate(zip(lanes.caches, lanes.rows, strict=True)):
            states = states_of(cache)
            assert states is not None
            first = len(states.parents) - rows
            for row in states.order(first):
                place = lane, row - first
                state_above = states.above(self.layer_idx, row) or self.blank(entering, wide_dtype)
                state, answer = self.step(state_above, entering[place], decay[place], rate[place])
                states.put(self.layer_idx, row, state)
                read[place] = answer
        normed = self.norm(read.reshape(-1, self.head_v_dim), gate.reshape(-1, self.head_v_dim))
        output: Tensor = self.out_proj(normed.reshape(batch, width, -1))
        return output

    def blank(self, entering: Tensor, memory_dtype: torch.dtype) -> LayerState:
        """The state of zeros before the first token, a window like `entering` and a memory of `memory_dtype`."""
        return (
            entering.new_zeros(self.conv_kernel_size - 1, self.conv_dim),
            entering.new_zeros(self.num_v_heads, self.head_k_dim, self.head_v_dim, dtype=memory_dtype),
        )

    def step(self, state: LayerState, entering: Tensor, decay: Tensor, rate: Tensor) -> tuple[LayerState, Tensor]:
        """The state after a row, and the answer of the memory to its query, [value heads, value width].

        Args:
            state: The state before it.
            entering: The row's input of the convolution, [channels].
            decay: The share of the memory that stays, [value heads].
            rate: The share of the error that is corrected, [value heads].
        """
        window, memory = state
        window_rows = torch.cat([window, entering[None]])
        convolved = nn.functional.silu((window_rows * self.conv1d.weight[:, 0].T).sum(0)).to(memory.dtype)
        query, key, value = torch.tensor_split(convolved, (self.key_dim, 2 * self.key_dim))
        group = self.num_v_heads // self.num_k_heads
        query, key = (_normalise(part.view(self.num_k_heads, -1)).repeat_interleave(group, 0) for part in (query, key))
        memory = memory * decay[:, None, None]
        error = value.view(self.num_v_heads, -1) - (memory * key[:, :, None]).sum(1)
        memory = memory + key[:, :, None] * (rate[:, None] * error)[:, None]
        answer = (memory * query[:, :, None]).sum(1) / self.head_k_dim**0.5
        return (window_rows[1:], memory), answer.to(entering.dtype)


def _normalise(x: Tensor) -> Tensor:
    return x * torch.rsqrt((x * x).sum(-1, keepdim=True) + LEAST)


def over_trees(network: Any) -> None:
    """Let every layer of `network` with the gated delta rule run its rows as a tree, in place."""
    for module in network.modules():
        if type(module) is Qwen3NextGatedDeltaNet:
            module.__class__ = TreeDeltaNet  # the weights and settings of the module stay


def _fields(arch: Architecture) -> dict[str, Any]:
    """The fields of the config that other families lack."""
    if not arch.qk_norm:
        raise Unsupported("qwen3_next without norms of queries and keys: transformers' model always has them")
    settings = Qwen3NextSettings.of(arch)
    kinds = ("full_attention", "linear_attention")
    return {
        "layer_types": [kinds[layer in arch.recurrent] for layer in range(arch.layers)],
        "linear_num_key_heads": settings.key_heads,
        "linear_num_value_heads": settings.value_heads,
        "linear_key_head_dim": settings.key_width,
        "linear_value_head_dim": settings.value_width,
        "linear_conv_kernel_dim": settings.conv_width,
        **expert_counts(settings),
        "num_experts": settings.experts,
        "shared_expert_intermediate_size": settings.shared_size,
        "decoder_sparse_step": settings.sparse_step,
        "mlp_only_layers": [],
    }


class ExactGatedNorm(nn.Module):
    """The norm behind the delta rule in the dtype of its input: the normed row, its weight, and silu of the gate."""

    def __init__(self, module: Any, _: Any) -> None:
        super().__init__()
        self.weight = module.weight
        self.eps = module.variance_epsilon

    def forward(self, hidden: Tensor, gate: Tensor) -> Tensor:
        """Return `hidden` [..., width], normed, times weight and silu of `gate` [..., width]."""
        normed = hidden * torch.rsqrt(hidden.pow(2).mean(-1, keepdim=True) + self.eps)
        scaled: Tensor = self.weight * normed * nn.functional.silu(gate)
        return scaled


QWEN3_NEXT = ModelFamily(
    "qwen3_next",
    Qwen3NextConfig,
    Qwen3NextForCausalLM,
    _fields,
    one_bias=True,
    rename=lambda name: name.replace(".linear_attn.gain", ".linear_attn.norm.weight"),
    arrange=stack_experts,
    prepare=over_trees,
    exact={
        "Qwen3NextRMSNorm": rms_norm("eps", offset=1.0),
        "Qwen3NextRMSNormGated": ExactGatedNorm,
        "Qwen3NextTopKRouter": ExactRouter,
    },
)
