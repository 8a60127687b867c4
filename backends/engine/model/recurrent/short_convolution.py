"""The short convolution of LFM2, over a tree of rows.

transformers convolves each row with the rows before it, whatever the mask. Here each row is convolved with the last
inputs of its own path, which the request's states hold.
"""

from typing import Any

import torch
from torch import Tensor
from transformers.models.lfm2.modeling_lfm2 import Lfm2ShortConv

from specverify.backends.engine.kv.lanes import BatchCache
from specverify.backends.engine.kv.recurrent import states_of


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
