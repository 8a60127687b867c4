"""LFM2: a gated short convolution in most layers, attention in the others."""

from typing import Any

import torch
from torch import Tensor
from transformers import Lfm2Config, Lfm2ForCausalLM
from transformers.models.lfm2.modeling_lfm2 import Lfm2ShortConv

from specverify.backends.base import Unsupported
from specverify.backends.engine.kv.lanes import BatchCache
from specverify.backends.engine.kv.recurrent import states_of
from specverify.backends.engine.model.family.base import ModelFamily
from specverify.backends.engine.model.float64_modules import rms_norm
from specverify.reference.architecture import Architecture
from specverify.reference.family.hybrid_short_convolution import Lfm2Settings


class TreeShortConv(Lfm2ShortConv):  # type: ignore[misc]  # transformers is untyped here
    """The layer of transformers, with its weights, over rows that form a tree."""

    def forward(
        self, hidden_states: Tensor, past_key_values: BatchCache, attention_mask: Any = None, **_: Any
    ) -> Tensor:
        """The layer's output [B, T, hidden] for rows [B, T, hidden] whose states the caches of the batch have.

        Padding rows, of which the caches know nothing, are convolved to zeros.
        """
        entering, leaving, value = self.in_proj(hidden_states).chunk(3, dim=-1)
        entering = entering * value
        convolved = torch.zeros_like(entering)
        for lane, (cache, rows) in enumerate(zip(past_key_values.caches, past_key_values.rows, strict=True)):
            states = states_of(cache)
            assert states is not None
            first = len(states.parents) - rows
            for row in states.order(first):
                state_above = states.above(self.layer_idx, row)
                window = (
                    entering.new_zeros(self.conv_kernel_size - 1, entering.shape[-1])
                    if state_above is None
                    else state_above[0]
                )
                window_rows = torch.cat([window, entering[lane, row - first][None]])
                states.put(self.layer_idx, row, (window_rows[1:], entering.new_zeros(0, 0, 0)))
                convolved[lane, row - first] = (window_rows * self.conv.weight[:, 0].T).sum(0)
        output: Tensor = self.out_proj(leaving * convolved)
        return output


def over_trees(network: Any) -> None:
    """Let every short convolution of `network` run its rows as a tree, in place."""
    for module in network.modules():
        if type(module) is Lfm2ShortConv:
            module.__class__ = TreeShortConv  # the weights and settings of the module stay


NAMES = {
    "self_attn.o_proj": "self_attn.out_proj",
    "self_attn.q_norm": "self_attn.q_layernorm",
    "self_attn.k_norm": "self_attn.k_layernorm",
    "mlp.gate_proj": "feed_forward.w1",
    "mlp.up_proj": "feed_forward.w3",
    "mlp.down_proj": "feed_forward.w2",
    "model.norm": "model.embedding_norm",
}
"""Parts of names in `specverify.reference.weights`, and those of transformers."""


def _rename(name: str) -> str:
    for name_here, name_there in NAMES.items():
        name = name.replace(f"{name_here}.", f"{name_there}.")
    return name


def _fields(arch: Architecture) -> dict[str, Any]:
    """The fields of the config that other families lack."""
    if not arch.qk_norm:
        raise Unsupported("lfm2 without norms of queries and keys: transformers' model always has them")
    return {
        "norm_eps": arch.norm_eps,
        "layer_types": ["conv" if layer in arch.recurrent else "full_attention" for layer in range(arch.layers)],
        "conv_L_cache": Lfm2Settings.of(arch).conv_width,
        "conv_bias": False,
        "block_auto_adjust_ff_dim": False,
    }


LFM2 = ModelFamily(
    "lfm2",
    Lfm2Config,
    Lfm2ForCausalLM,
    _fields,
    rename=_rename,
    prepare=over_trees,
    exact={"Lfm2RMSNorm": rms_norm("variance_epsilon")},
)
