"""Qwen3-Next: gated delta rule in most layers, gated attention in the others."""

from collections.abc import Callable
from typing import Any

import torch
from torch import Tensor, nn
from transformers import Qwen3NextConfig, Qwen3NextForCausalLM
from transformers.models.qwen3_next.modeling_qwen3_next import Qwen3NextGatedDeltaNet

from specverify.backends.base import Unsupported
from specverify.backends.engine.kv.lanes import BatchCache
from specverify.backends.engine.kv.recurrent import states_of
from specverify.backends.engine.kv.state_slots import LayerState
from specverify.backends.engine.model.family.base import ModelFamily
from specverify.backends.engine.model.family.experts import ExactRouter, expert_counts, stack_experts
from specverify.backends.engine.model.float64_modules import rms_norm
from specverify.reference.architecture import Architecture
from specverify.reference.family.hybrid_delta_rule import DeltaRuleSettings, Qwen3NextSettings

LEAST = 1e-6
"""Added to the sum of squares by which queries and keys are normed."""


class TreeRows:
    """The layer of transformers, with its weights, over rows that form a tree.

    It stands before a class of transformers among the bases of a class, which says how a row enters it.
    """

    def enter(self, rows: Tensor) -> tuple[Tensor, Tensor, Tensor, Tensor]:
        """The projections of `rows` [B, T, hidden] that enter the delta rule.

        Returns:
            The inputs of the convolution [B, T, channels], the gates of what is read [B, T, value heads, value width],
            and for rates and decays what comes before the sigmoid and the softplus, [B, T, value heads].
        """
        raise NotImplementedError

    def forward(
        self: Any, hidden_states: Tensor, cache_params: BatchCache, attention_mask: Any = None, **_: Any
    ) -> Tensor:
        """The layer's output [B, T, hidden] for rows `hidden_states` [B, T, hidden] whose states `cache_params` has.

        Padding rows, of which the caches know nothing, have zeros as their output.
        """
        lanes, (batch, width) = cache_params, hidden_states.shape[:2]
        entering, gate, rate, rise = self.enter(hidden_states)
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

    def blank(self: Any, entering: Tensor, memory_dtype: torch.dtype) -> LayerState:
        """The state of zeros before the first token, a window like `entering` and a memory of `memory_dtype`."""
        return (
            entering.new_zeros(self.conv_kernel_size - 1, self.conv_dim),
            entering.new_zeros(self.num_v_heads, self.head_k_dim, self.head_v_dim, dtype=memory_dtype),
        )

    def step(self: Any, state: LayerState, entering: Tensor, decay: Tensor, rate: Tensor) -> tuple[LayerState, Tensor]:
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
        query, key = (self.share(_normalise(part.view(self.num_k_heads, -1))) for part in (query, key))
        memory = self.correct(memory, key, value.view(self.num_v_heads, -1), decay, rate)
        answer = (memory * query[:, :, None]).sum(1) / self.head_k_dim**0.5
        return (window_rows[1:], memory), answer.to(entering.dtype)

    def share(self: Any, rows: Tensor) -> Tensor:
        """Queries or keys [key heads, key width] for each value head: neighbouring ones share a key head."""
        shared: Tensor = rows.repeat_interleave(self.num_v_heads // self.num_k_heads, 0)
        return shared

    def correct(self, memory: Tensor, key: Tensor, value: Tensor, decay: Tensor, rate: Tensor) -> Tensor:
        """The memory [value heads, key width, value width] after a row: it decays, then its answer is corrected.

        Args:
            memory: The memory before the row.
            key: [value heads, key width].
            value: What the memory is to answer to the key, [value heads, value width].
            decay: See `step`.
            rate: See `step`.
        """
        memory = memory * decay[:, None, None]
        error = value - (memory * key[:, :, None]).sum(1)
        return memory + key[:, :, None] * (rate[:, None] * error)[:, None]


def _normalise(x: Tensor) -> Tensor:
    return x * torch.rsqrt((x * x).sum(-1, keepdim=True) + LEAST)


class TreeJointRows(TreeRows):
    """The layer of Qwen3-Next over rows that form a tree: its projections lay the parts of a key head side by side."""

    def enter(self: Any, rows: Tensor) -> tuple[Tensor, Tensor, Tensor, Tensor]:
        """See `TreeRows.enter`."""
        parts = self.fix_query_key_value_ordering(self.in_proj_qkvz(rows), self.in_proj_ba(rows))
        query, key, value, gate, rate, rise = parts
        return torch.cat([part.flatten(2) for part in (query, key, value)], -1), gate, rate, rise


def over_trees(kind: type[nn.Module], rows: type[TreeRows]) -> Callable[[Any], None]:
    """A function that lets the layers of class `kind` of a network run their `rows` as a tree, in place.

    The weights and settings of a module stay.
    """
    tree_kind = type(f"Tree{kind.__name__}", (rows, kind), {"__doc__": rows.__doc__})

    def prepare(network: Any) -> None:
        for module in network.modules():
            if type(module) is kind:
                module.__class__ = tree_kind

    return prepare


def delta_rule_counts(arch: Architecture) -> dict[str, Any]:
    """The fields of the config that families with the gated delta rule share."""
    if not arch.qk_norm:
        raise Unsupported(f"{arch.family} without norms of queries and keys: transformers' model always has them")
    settings = DeltaRuleSettings.of(arch)
    kinds = ("full_attention", "linear_attention")
    return {
        "layer_types": [kinds[layer in arch.recurrent] for layer in range(arch.layers)],
        "linear_num_key_heads": settings.key_heads,
        "linear_num_value_heads": settings.value_heads,
        "linear_key_head_dim": settings.key_width,
        "linear_value_head_dim": settings.value_width,
        "linear_conv_kernel_dim": settings.conv_width,
    }


def _fields(arch: Architecture) -> dict[str, Any]:
    """The fields of the config that other families lack."""
    settings = Qwen3NextSettings.of(arch)
    return {
        **delta_rule_counts(arch),
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


def rename_gain(name: str) -> str:
    """Transformers calls the gain behind the delta rule the weight of a norm."""
    return name.replace(".linear_attn.gain", ".linear_attn.norm.weight")


QWEN3_NEXT = ModelFamily(
    "qwen3_next",
    Qwen3NextConfig,
    Qwen3NextForCausalLM,
    _fields,
    one_bias=True,
    rename=rename_gain,
    arrange=stack_experts,
    prepare=over_trees(Qwen3NextGatedDeltaNet, TreeJointRows),
    exact={
        "Qwen3NextRMSNorm": rms_norm("eps", offset=1.0),
        "Qwen3NextRMSNormGated": ExactGatedNorm,
        "Qwen3NextTopKRouter": ExactRouter,
    },
)
