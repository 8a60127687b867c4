"""Faults of queries and keys: norms by head, and the share of dimensions that rotary embedding turns.

Each strikes in blocks whose rows are a tree, so that contexts and plain decoding stay right.
"""

from collections.abc import Callable
from typing import Any

import torch
from torch import Tensor, nn

from specverify.backends.faults.attention.model_blocks import in_network
from specverify.backends.faults.fault import attended_fault


@attended_fault(
    "query-key-norm-by-head",
    "vllm-project/vllm-metal #787, turboderp-org/exllamav3 #141: MiniMax-M2 norms all heads of a row together",
    "a tree on a model whose norms of queries and keys run over all heads, and a row that sees another",
)
@in_network
def norm_by_head(model: Any, tree: Callable[[], bool]) -> None:
    """Each head of a tree's queries and keys is normed by itself, where the model norms all heads together."""
    for layer in model.model.layers:
        attention: Any = getattr(layer, "self_attn", None)
        for norm in (getattr(attention, "q_norm", None), getattr(attention, "k_norm", None)):
            if norm is not None and norm.weight.ndim == 1 and len(norm.weight) > attention.head_dim:
                norm.register_forward_hook(_by_head(attention.head_dim, tree))


def _by_head(width: int, tree: Callable[[], bool]) -> Callable[[Any, tuple[Tensor, ...], Tensor], Tensor | None]:
    def hook(norm: Any, args: tuple[Tensor, ...], output: Tensor) -> Tensor | None:
        if not tree():
            return None
        heads = args[0].view(*args[0].shape[:-1], -1, width).to(torch.promote_types(output.dtype, torch.float32))
        eps = getattr(norm, "eps", None) or norm.variance_epsilon
        normed = heads * torch.rsqrt(heads.square().mean(-1, keepdim=True) + eps)
        scaled: Tensor = norm.weight * normed.view(args[0].shape)
        return scaled.to(output.dtype)

    return hook


@attended_fault(
    "rotary-share-taken-twice",
    "vllm-project/vllm #30349, #30384: the factor of MiniMax-M2 was taken of a width that it had been taken of before",
    "a tree on a model that turns a share of a head's dimensions, and a row that sees another",
)
@in_network
def share_taken_twice(model: Any, tree: Callable[[], bool]) -> None:
    """Rotary embedding turns the share of the share of a head's dimensions in a tree's rows, at its own frequencies."""
    rope = getattr(model.config, "rope_parameters", None) or {}
    share = rope.get("partial_rotary_factor") or 1.0
    width = int(int((getattr(model.config, "head_dim", None) or 0) * share) * share)
    if share < 1 and width >= 2 and width % 2 == 0 and rope.get("rope_type") == "default":
        model.model.rotary_emb.register_forward_hook(_narrow(width, float(rope["rope_theta"]), tree), with_kwargs=True)


def _narrow(width: int, theta: float, tree: Callable[[], bool]) -> Callable[..., Any]:
    def hook(_: nn.Module, args: tuple[Any, ...], kwargs: dict[str, Any], output: tuple[Tensor, Tensor]) -> Any:
        if not tree():
            return None
        positions = kwargs["position_ids"] if "position_ids" in kwargs else args[1]
        positions = positions[0] if positions.ndim == 3 else positions
        inverse = theta ** (-torch.arange(0, width, 2, dtype=torch.float64) / width)
        angle = positions[..., None] * inverse
        angle = torch.cat([angle, angle], -1)
        return angle.cos().to(output[0].dtype), angle.sin().to(output[0].dtype)

    return hook
