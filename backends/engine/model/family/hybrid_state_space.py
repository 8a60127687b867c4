"""Falcon-H1: a Mamba-2 mixer beside attention in every layer."""

from typing import Any

import torch
from torch import Tensor, nn
from transformers import FalconH1Config, FalconH1ForCausalLM
from transformers.models.falcon_h1.modeling_falcon_h1 import FalconH1Mixer

from specverify.backends.engine.kv.lanes import BatchCache
from specverify.backends.engine.kv.recurrent import states_of
from specverify.backends.engine.kv.state_slots import LayerState
from specverify.backends.engine.model.family.base import ModelFamily
from specverify.backends.engine.model.float64_modules import rms_norm
from specverify.reference.architecture import Architecture
from specverify.reference.family.hybrid_state_space import FalconH1Settings


class TreeMixer(FalconH1Mixer):  # type: ignore[misc]  # transformers is untyped here
    """The mixer of transformers, with its weights, over rows that form a tree."""

    def forward(
        self, hidden_states: Tensor, cache_params: BatchCache | None = None, attention_mask: Any = None, **_: Any
    ) -> Tensor:
        """The mixer's output [B, T, hidden] for rows `hidden_states` [B, T, hidden] whose states `cache_params` has.

        Padding rows, of which the caches know nothing, have zeros as what they read.
        """
        assert cache_params is not None
        # As transformers: the state in float32 at least, whatever the working dtype.
        wide_dtype = torch.promote_types(hidden_states.dtype, torch.float32)
        parts = self.in_proj(hidden_states * self.ssm_in_multiplier) * self.mup_vector
        gate, entering, rise = parts.split([self.intermediate_size, self.conv_dim, self.num_heads], dim=-1)
        entering = entering.to(hidden_states.dtype)
        time = nn.functional.softplus(rise + self.dt_bias.to(wide_dtype))
        read = torch.zeros_like(gate)
        for lane, (cache, rows) in enumerate(zip(cache_params.caches, cache_params.rows, strict=True)):
            states = states_of(cache)
            assert states is not None
            first = len(states.parents) - rows
            for row in states.order(first):
                place = lane, row - first
                state_above = states.above(self.layer_idx, row) or self.blank(entering, wide_dtype)
                state, read[place] = self.step(state_above, entering[place], time[place])
                states.put(self.layer_idx, row, state)
        gated = self.norm(read, gate) if self.mamba_rms_norm else read * nn.functional.silu(gate)
        output: Tensor = self.out_proj(gated.to(hidden_states.dtype))
        return output

    def blank(self, entering: Tensor, memory_dtype: torch.dtype) -> LayerState:
        """The state of zeros before the first token, a window like `entering` and a memory of `memory_dtype`."""
        return (
            entering.new_zeros(self.conv_kernel_size - 1, self.conv_dim),
            entering.new_zeros(self.num_heads, self.head_dim, self.ssm_state_size, dtype=memory_dtype),
        )

    def step(self, state: LayerState, entering: Tensor, time: Tensor) -> tuple[LayerState, Tensor]:
        """The state after a row, and what the row reads of it, [heads * head width].

        Args:
            state: The state before it.
            entering: The row's input of the convolution, [channels].
            time: The length of the row's step, [heads].
        """
        window, memory = state
        window_rows = torch.cat([window, entering[None]])
        convolved = (window_rows * self.conv1d.weight[:, 0].T).sum(0)
        convolved = nn.functional.silu(convolved if self.conv1d.bias is None else convolved + self.conv1d.bias).to(
            memory.dtype
        )
        value = convolved[: self.intermediate_size].view(self.num_heads, -1)
        share = self.num_heads // self.n_groups
        into, out_of = (
            part.view(self.n_groups, -1).repeat_interleave(share, 0)
            for part in convolved[self.intermediate_size :].chunk(2)
        )
        decay = (-self.A_log.to(memory.dtype).exp() * time).exp()
        memory = memory * decay[:, None, None] + (time[:, None] * value)[:, :, None] * into[:, None, :]
        read = (memory * out_of[:, None, :]).sum(-1) + self.D.to(memory.dtype)[:, None] * value
        return (window_rows[1:], memory), read.reshape(-1)


def with_factors(network: Any) -> None:
    """Give every mixer of `network` the factors of its projection, in float32 at least: they are in no state dict."""
    for module in network.modules():
        if isinstance(module, FalconH1Mixer):
            inner = module.intermediate_size
            shared = module.groups_time_state_size
            wide_dtype = torch.promote_types(module.in_proj.weight.dtype, torch.float32)
            factors = torch.tensor(network.config.ssm_multipliers, dtype=wide_dtype)
            sizes = torch.tensor([inner, inner, shared, shared, module.num_heads])
            module.mup_vector = factors.repeat_interleave(sizes)


def over_trees(network: Any) -> None:
    """Let every mixer of `network` run its rows as a tree, in place."""
    with_factors(network)  # a checkpoint opens with factors of its working dtype
    for module in network.modules():
        if type(module) is FalconH1Mixer:
            module.__class__ = TreeMixer  # the weights and settings of the module stay


def _fields(arch: Architecture) -> dict[str, Any]:
    """The fields of the config that other families lack."""
    settings = FalconH1Settings.of(arch)
    return {
        "mlp_bias": arch.mlp_bias,
        "mamba_d_ssm": settings.inner,
        "mamba_n_heads": settings.mixer_heads,
        "mamba_d_head": settings.mixer_width,
        "mamba_n_groups": settings.mixer_groups,
        "mamba_d_state": settings.state_width,
        "mamba_d_conv": settings.conv_width,
        "mamba_conv_bias": settings.conv_bias,
        "mamba_proj_bias": settings.mixer_bias,
        "projectors_bias": settings.mixer_output_bias,
        "mamba_rms_norm": settings.gated_norm,
        "mamba_norm_before_gate": settings.norm_before_gate,
        "mlp_multipliers": [settings.gate_multiplier, settings.down_multiplier],
        "ssm_multipliers": list(settings.part_multipliers),
        "embedding_multiplier": settings.embedding_multiplier,
        "lm_head_multiplier": settings.logits_multiplier,
        "key_multiplier": settings.key_multiplier,
        "attention_in_multiplier": settings.attention_in_multiplier,
        "attention_out_multiplier": settings.attention_out_multiplier,
        "ssm_in_multiplier": settings.mixer_in_multiplier,
        "ssm_out_multiplier": settings.mixer_out_multiplier,
    }


class ExactGroupNorm(nn.Module):
    """The norm of the mixer's output in the dtype of its input: each group is normed, before or after its gate."""

    def __init__(self, module: Any, _: Any) -> None:
        super().__init__()
        self.weight = module.weight
        self.eps = module.variance_epsilon
        self.groups = module.n_groups
        self.first = module.norm_before_gate

    def forward(self, hidden: Tensor, gate: Tensor) -> Tensor:
        """Return `hidden` [..., width], normed by group, times weight, and times silu of `gate` [..., width]."""
        gate_values = nn.functional.silu(gate)
        rows = hidden if self.first else hidden * gate_values
        rows = rows.reshape(*rows.shape[:-1], self.groups, -1)
        normed: Tensor = (rows * (rows.pow(2).mean(-1, keepdim=True) + self.eps).rsqrt()).flatten(-2) * self.weight
        return normed * gate_values if self.first else normed


FALCON_H1 = ModelFamily(
    "falcon_h1",
    FalconH1Config,
    FalconH1ForCausalLM,
    _fields,
    one_bias=True,
    rename=lambda name: name.replace(".mlp.", ".feed_forward.").replace("model.norm.", "model.final_layernorm."),
    complete=with_factors,
    prepare=over_trees,
    exact={"FalconH1RMSNorm": rms_norm("variance_epsilon"), "FalconH1RMSNormGated": ExactGroupNorm},
)
