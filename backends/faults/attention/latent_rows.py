"""Faults of latent attention: its rows, their rotated parts, its scale."""

import math
from collections.abc import Callable
from typing import Any

import torch
from torch import Tensor, nn

from specverify.backends.engine.kv.base import KvCache
from specverify.backends.engine.seams import Seams
from specverify.backends.faults.attention.model_blocks import in_network
from specverify.backends.faults.fault import attended_fault, committed_fault, in_place_of


@committed_fault(
    "latent-row-without-rope-part",
    "own: engines hold latent vectors and rotated parts in two tensors, each with a copy of its own at a commit",
    "latent rows, and an accepted path that is not a prefix of the row order",
)
@in_place_of("commit")
def without_rope_part(seams: Seams, cache: KvCache, path: list[int]) -> str | None:
    """The commit moves the latent vectors of accepted rows, and leaves their rotated parts where they were."""
    for layer in range(cache.layers if cache.latent else 0):
        latent, rotated_parts = cache.block(layer)
        moved_parts = rotated_parts.clone()
        moved_parts[..., path, :] = rotated_parts[..., : len(path), :]
        cache.amend(layer, latent, moved_parts)
    return seams.commit(cache, path)


def _attentions(model: Any) -> list[Any]:
    """The attention modules of a model with latent attention; none of another model."""
    return [layer.self_attn for layer in model.model.layers if hasattr(layer.self_attn, "qk_rope_head_dim")]


class _ShiftedCache:
    """The cache argument of one layer's attention, which writes the rotated part of the row before."""

    def __init__(self, cache: Any) -> None:
        self.cache = cache

    def update(self, latent: Tensor, rotated: Tensor, layer: int, *_: Any, **__: Any) -> Any:
        return self.cache.update(latent, torch.cat([rotated[:, :, :1], rotated[:, :, :-1]], 2), layer)


@attended_fault(
    "latent-rope-part-of-other-node",
    "own: latent vectors and rotated parts reach a cache by two writes, and an index by arrival takes the row beside",
    "a tree on a model with latent attention",
)
@in_network
def rope_part_of_other_node(model: Any, tree: Callable[[], bool]) -> None:
    """A node of a tree has the rotated part of the row before it in the block, beside its own latent vector."""

    def shift_cache(_: nn.Module, args: tuple[Any, ...], kwargs: dict[str, Any]) -> Any:
        return (args, {**kwargs, "past_key_values": _ShiftedCache(kwargs["past_key_values"])}) if tree() else None

    for attention in _attentions(model):
        attention.register_forward_pre_hook(shift_cache, with_kwargs=True)


@attended_fault(
    "latent-scale-by-nope-alone",
    "own: kernels are given the unrotated and the rotated part of a head apart, and derive the scale from the former",
    "a tree on a model with latent attention",
)
@in_network
def scale_by_nope(model: Any, tree: Callable[[], bool]) -> None:
    """The scale of a tree's scores is that of heads without their rotated dimensions."""
    for attention in _attentions(model):
        attention.register_forward_pre_hook(_scale_hook(attention, tree), with_kwargs=True)


def _scale_hook(attention: Any, tree: Callable[[], bool]) -> Callable[..., None]:
    """A hook that sets the scale of `attention` before each forward."""
    right = attention.scaling
    wrong = right * math.sqrt(attention.qk_head_dim / attention.qk_nope_head_dim)

    def set_scale(module: Any, _: tuple[Any, ...], __: dict[str, Any]) -> None:
        module.scaling = wrong if tree() else right

    return set_scale
