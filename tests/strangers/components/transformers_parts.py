"""transformers' own parts as components: two attentions, and the acceptance of its assisted generation."""

from types import SimpleNamespace
from typing import Any

import torch
from torch import Tensor
from transformers.generation.utils import _speculative_sampling
from transformers.integrations.sdpa_attention import sdpa_attention_forward
from transformers.models.llama.modeling_llama import eager_attention_forward

from specverify.adapt import component


def sdpa(query: Tensor, key: Tensor, value: Tensor, mask: Tensor, scaling: float) -> Tensor:
    """`sdpa_attention_forward` under a boolean mask."""
    layer: Any = SimpleNamespace(num_key_value_groups=len(query) // len(key), is_causal=False)
    out, _ = sdpa_attention_forward(layer, query[None], key[None], value[None], mask[None, None], scaling=scaling)
    return out[0].transpose(0, 1)  # type: ignore[no-any-return]


def eager(query: Tensor, key: Tensor, value: Tensor, mask: Tensor, scaling: float) -> Tensor:
    """Llama's written-out attention under an additive mask."""
    layer: Any = SimpleNamespace(num_key_value_groups=len(query) // len(key), training=False)
    added = torch.zeros(mask.shape, dtype=query.dtype).masked_fill_(~mask, torch.finfo(query.dtype).min)
    out, _ = eager_attention_forward(layer, query[None], key[None], value[None], added[None, None], scaling)
    return out[0].transpose(0, 1)  # type: ignore[no-any-return]


def speculative_sampling(tokens: Tensor, p: Tensor, q: Tensor) -> tuple[list[int], int]:
    """`_speculative_sampling`, which accepts a drafted chain; a tree without drafted tokens has nothing to verify."""
    drafted = len(tokens) - 1
    if not drafted:
        return [0], int(torch.multinomial(p[0], 1))
    # It takes logits of both models: row i of the draft's stands before token i + 1, which is row i + 1 of `q`.
    sampled_tokens, count = _speculative_sampling(tokens[None, 1:], q[None, 1:].log(), drafted, p[None].log())
    return list(range(int(count) + 1)), int(sampled_tokens[0, -1])


open_sdpa = component(attention=sdpa, name="transformers-sdpa")
open_eager = component(attention=eager, name="transformers-eager")
open_sampler = component(sampler=speculative_sampling, name="transformers-sampling", trees="chains")
