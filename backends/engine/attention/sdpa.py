"""Attention by torch's scaled dot product attention under the dense boolean mask.

torch picks the kernel; its unfused kernel counts as a fallback and is announced.
"""

from collections.abc import Callable
from dataclasses import dataclass

import torch
from torch import Tensor
from torch.nn.attention import SDPBackend

from specverify.backends.engine.columns import AttentionInputs


def boolean_mask(columns: AttentionInputs) -> Tensor:
    """The mask for the kernel, bool [B, 1, T, C]. True means visible to SDPA; to some other operators, hidden."""
    return columns.visible


def unchanged_scale(scaling: float) -> float:
    """The factor of the scores for the kernel: the model's own, unchanged."""
    return scaling


def repeat_heads(pair: Tensor, groups: int) -> Tensor:
    """Keys or values [B, Hkv, C, D], repeated to [B, H, C, D]: query head h reads KV head h // groups."""
    return pair.repeat_interleave(groups, 1)


@dataclass(frozen=True)
class Sdpa:
    """`torch.nn.functional.scaled_dot_product_attention` as an `Attend`; see `columns.Attend`.

    KV heads are repeated before the call, because with `enable_gqa` and a mask CUDA has only the unfused kernel. If
    torch picks the unfused kernel (`math`) anyway, the call is announced as a fallback. The values of a hidden column
    must be finite: its weight is exactly 0, and 0 times infinity is NaN. The output of a row that sees no column is
    zeros.

    Attributes:
        mask: From the columns to the mask of the kernel.
        scale: From the model's factor of the scores to the kernel's.
        share: From KV heads to query heads.
    """

    mask: Callable[[AttentionInputs], Tensor] = boolean_mask
    scale: Callable[[float], float] = unchanged_scale
    share: Callable[[Tensor, int], Tensor] = repeat_heads

    def __call__(self, query: Tensor, columns: AttentionInputs, scaling: float) -> Tensor:
        """Attention of `query` [B, H, T, D] over `columns`, [B, H, T, D] in the dtype of the query."""
        columns.refuse_cap("SDPA")
        columns.refuse_indexed("SDPA")
        columns.refuse_sinks("SDPA")
        groups = query.shape[1] // columns.key.shape[1]
        key, value = self.share(columns.key, groups), self.share(columns.value, groups)
        mask = self.mask(columns)
        # A private function of torch, since the public call does not say which kernel it runs.
        if torch._fused_sdp_choice(query, key, value, attn_mask=mask) == SDPBackend.MATH.value:
            dtype = str(query.dtype).removeprefix("torch.")
            columns.announce(f"SDPA has no fused kernel for {dtype}, head_dim {query.shape[-1]}: torch runs it as math")
        output = torch.nn.functional.scaled_dot_product_attention(
            query, key, value, attn_mask=mask, scale=self.scale(scaling)
        )
        # Older kernels return NaN for a row without columns, and the next layer's keys would carry NaN to other rows.
        return output.masked_fill(~columns.visible.any(-1, keepdim=True), 0)
