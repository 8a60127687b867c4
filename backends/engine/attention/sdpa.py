"""Sdpa: torch's scaled dot product attention under the dense boolean mask, whatever kernel torch picks for it."""

from collections.abc import Callable
from dataclasses import dataclass

import torch
from torch import Tensor
from torch.nn.attention import SDPBackend

from backends.engine.columns import AttentionInputs


def shown(columns: AttentionInputs) -> Tensor:
    """The mask as the kernel takes it, bool [B, 1, T, C]: True is visible (for SDPA; other operators mean hidden)."""
    return columns.visible


def as_it_is(scaling: float) -> float:
    """The factor of the scores, as the model gives it."""
    return scaling


def shared(pair: Tensor, groups: int) -> Tensor:
    """Keys or values [B, Hkv, C, D] for `groups` query heads each, [B, H, C, D]: head h reads KV head h // groups."""
    return pair.repeat_interleave(groups, 1)


@dataclass(frozen=True)
class Sdpa:
    """`torch.nn.functional.scaled_dot_product_attention` as an `Attend`; see `columns.Attend`.

    KV heads are repeated before the call: with `enable_gqa` and a mask, CUDA has no kernel but the unfused one. Where
    torch picks that one anyway (`math`), the call is announced as a fallback. A hidden column must be finite: its
    weight is 0 exactly, and 0 times infinity is not a number. A row that sees nothing comes out as zeros.

    Attributes:
        mask: What the kernel is given as mask.
        scale: The model's scaling to the kernel's.
        share: KV heads to query heads.
    """

    mask: Callable[[AttentionInputs], Tensor] = shown
    scale: Callable[[float], float] = as_it_is
    share: Callable[[Tensor, int], Tensor] = shared

    def __call__(self, query: Tensor, columns: AttentionInputs, scaling: float) -> Tensor:
        """[B, H, T, D] in the query's dtype."""
        columns.refuse_cap("SDPA")
        groups = query.shape[1] // columns.key.shape[1]
        key, value = self.share(columns.key, groups), self.share(columns.value, groups)
        mask = self.mask(columns)
        if torch._fused_sdp_choice(query, key, value, attn_mask=mask) == SDPBackend.MATH.value:
            dtype = str(query.dtype).removeprefix("torch.")
            columns.announce(f"SDPA has no fused kernel for {dtype}, head_dim {query.shape[-1]}: torch runs it as math")
        mixed = torch.nn.functional.scaled_dot_product_attention(
            query, key, value, attn_mask=mask, scale=self.scale(scaling)
        )
        # Older kernels make NaN of a row without columns, and the next layer's keys would carry it to others.
        return mixed.masked_fill(~columns.visible.any(-1, keepdim=True), 0)
