"""The engine's eager attention, reached through transformers' attention interface under the name below."""

from collections.abc import Callable
from typing import Any

import torch
from torch import Tensor, nn
from transformers import AttentionInterface, AttentionMaskInterface

INTERFACE = "specverify"
"""Name under which the engine's attention is registered with transformers."""

Attend = Callable[[Tensor, Tensor, Tensor, Tensor, float], Tensor]
"""attend(query [B, H, T, D], key [B, Hkv, C, D], value as key, visible bool [B, 1, T, C], scaling) -> [B, H, T, D]."""


def eager(query: Tensor, key: Tensor, value: Tensor, visible: Tensor, scaling: float) -> Tensor:
    """Softmax attention over the visible columns, written out.

    Grouped queries share a KV head. Hidden columns get minus infinity, hence weight 0 exactly; a row that sees nothing
    is NaN, which is loud, where a finite floor would be a silent mean. The softmax runs in float32 for 16-bit inputs,
    as transformers' eager attention does, and in the working dtype otherwise.
    """
    groups = query.shape[1] // key.shape[1]
    key, value = key.repeat_interleave(groups, 1), value.repeat_interleave(groups, 1)
    scores = (query @ key.transpose(-1, -2)) * scaling
    scores = scores.masked_fill(~visible, float("-inf"))
    wide = torch.float32 if query.dtype in (torch.bfloat16, torch.float16) else query.dtype
    return torch.softmax(scores, -1, dtype=wide).to(query.dtype) @ value


def through_interface(
    module: nn.Module,
    query: Tensor,
    key: Tensor,
    value: Tensor,
    attention_mask: Tensor,
    scaling: float,
    attend: Attend,
    logical: Tensor | None = None,
    **_: Any,
) -> tuple[Tensor, None]:
    """What transformers calls in each layer; `attend` travels with the forward, so that two engines never share one.

    A module with a `temperature` (Llama 4, see irope.py) has its queries scaled by the rows' positions, `logical`.
    """
    temperature = getattr(module, "temperature", None)
    if temperature is not None:
        query = temperature(query, logical)
    return attend(query, key, value, attention_mask, scaling).transpose(1, 2).contiguous(), None


def _mask_as_given(attention_mask: Tensor | None = None, **_: Any) -> Tensor | None:
    """Leave masks alone: every forward of the engine brings its own dense 4-D mask.

    Registered because transformers passes no mask at all to an attention function without a mask function.
    """
    return attention_mask


AttentionInterface.register(INTERFACE, through_interface)
AttentionMaskInterface.register(INTERFACE, _mask_as_given)
