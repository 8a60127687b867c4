"""Faults of latent attention: its rows, their rotated parts, its scale, its indexer of columns."""

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
    attentions = (getattr(layer, "self_attn", None) for layer in model.model.layers)
    return [attention for attention in attentions if hasattr(attention, "qk_rope_head_dim")]


class _ShiftedCache:
    """The cache argument of one layer's attention, which writes the rotated part of the row before."""

    def __init__(self, cache: Any) -> None:
        self.cache = cache

    def update(self, latent: Tensor, rotated: Tensor, layer: int, *_: Any, **__: Any) -> Any:
        return self.cache.update(latent, torch.cat([rotated[:, :, :1], rotated[:, :, :-1]], 2), layer)

    def update_indexer(self, keys: Tensor, layer: int) -> Any:
        return self.cache.update_indexer(keys, layer)


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


@committed_fault(
    "index-keys-of-rejected-rows-stay",
    "own: engines hold index keys in a cache of their own, and a rollback that leaves it keeps those of rejected rows",
    "a model with an indexer, and an accepted path that is not a prefix of the row order",
)
@in_place_of("commit")
def index_keys_stay(seams: Seams, cache: KvCache, path: list[int]) -> str | None:
    """The commit moves keys and values of accepted rows, and leaves their index keys where they were."""
    for layer, width in enumerate(getattr(cache, "index_widths", ())):
        keys, values = cache.block(layer)
        if width and keys.shape[-2]:
            moved_keys = keys.clone()
            moved_keys[..., path, -width:] = keys[..., : len(path), -width:]
            cache.amend(layer, moved_keys, values)
    return seams.commit(cache, path)


def _indexers(model: Any) -> list[Any]:
    """The indexers of a model's layers; none of another model."""
    attentions = [layer.self_attn for layer in model.model.layers if hasattr(layer, "self_attn")]
    indexers = (getattr(attention, "indexer", None) for attention in attentions)
    return [indexer for indexer in indexers if indexer is not None]


@attended_fault(
    "indexed-columns-of-first-row",
    "vllm-project/vllm PR #47238: rows of a verified block read the chosen columns of another row in a shared buffer",
    "a tree on a model with an indexer, behind more columns than it leaves",
)
@in_network
def columns_of_first_row(model: Any, tree: Callable[[], bool]) -> None:
    """All rows of a tree attend to the columns that the indexer chose for the first row, and each to itself."""

    def first_row(_: nn.Module, args: tuple[Any, ...], kwargs: dict[str, Any], chosen: Tensor) -> Tensor | None:
        if not tree():
            return None
        rows, columns = chosen.shape[1], args[3].shape[-1]
        # A row that saw no column at all would be no number: the last column in place of each row's own.
        own = torch.arange(columns - rows, columns, device=chosen.device)[None, :, None].expand(len(chosen), -1, 1)
        return torch.cat([chosen[:, :1].expand(-1, rows, -1), own], -1)

    for indexer in _indexers(model):
        indexer.register_forward_hook(first_row, with_kwargs=True)


@attended_fault(
    "indexer-turned-as-attention",
    "sgl-project/sglang issue #13530: the indexer's rotary embedding turns other pairs than that of attention",
    "a tree on a model whose indexer turns other pairs than its attention, behind more columns than it leaves",
)
@in_network
def turned_as_attention(model: Any, tree: Callable[[], bool]) -> None:
    """The indexer turns neighbours in a tree's rows where the model's turns halves, and the other way round."""
    for indexer in _indexers(model):
        indexer.register_forward_pre_hook(_turning(indexer, tree))


def _turning(indexer: Any, tree: Callable[[], bool]) -> Callable[..., None]:
    right = indexer.interleaved

    def turn(module: Any, _: tuple[Any, ...]) -> None:
        module.interleaved = right != tree()

    return turn


@attended_fault(
    "indexer-products-not-rectified",
    "ml-explore/mlx-lm PR #531: the indexer of DeepSeek-V3.2 sums the products of its heads as they are",
    "a model with an indexer, behind more columns than it leaves",
)
@in_network
def not_rectified(model: Any, _: Callable[[], bool]) -> None:
    """The indexer sums products of queries and index keys without rectifying them, so that negative ones count."""
    for indexer in _indexers(model):
        indexer.rectify = _unchanged


def _unchanged(products: Tensor) -> Tensor:
    return products


@attended_fault(
    "indexer-fed-queries-before-norm",
    "THUDM/slime issue #2165: the norm of compressed queries is fused into the next projection, and the indexer reads "
    "what enters it",
    "a model with an indexer, behind more columns than it leaves",
)
@in_network
def queries_before_norm(model: Any, _: Callable[[], bool]) -> None:
    """The indexer makes its queries of compressed queries that no norm has scaled."""
    for attention in _attentions(model):
        if getattr(attention, "indexer", None) is not None:
            attention.indexer.register_forward_pre_hook(_without_norm(attention), with_kwargs=True)


def _without_norm(attention: Any) -> Callable[..., Any]:
    """A hook of the indexer of `attention` that puts compressed queries before their norm in their place."""

    def replace_queries(_: nn.Module, args: tuple[Any, ...], kwargs: dict[str, Any]) -> Any:
        hidden, _compressed, *rest = args
        return (hidden, attention.q_a_proj(hidden), *rest), kwargs

    return replace_queries


@attended_fault(
    "indexer-takes-last-of-equals",
    "own: kernels choose the greatest scores in parallel, and leave open which of equal ones they take",
    "a tree on a model with an indexer, with equal scores at the border of the choice",
)
@in_network
def last_of_equals(model: Any, tree: Callable[[], bool]) -> None:
    """Among columns with equal scores the indexer takes the last ones for a tree's rows."""
    for indexer in _indexers(model):
        indexer.best = _last_best(indexer.best, indexer, tree)


def _last_best(right: Callable[[Tensor], Tensor], indexer: Any, tree: Callable[[], bool]) -> Callable[[Tensor], Tensor]:
    def best(scores: Tensor) -> Tensor:
        if not tree():
            return right(scores)
        flipped: Tensor = scores.flip(-1).sort(dim=-1, descending=True, stable=True)[1]
        return scores.shape[-1] - 1 - flipped[..., : indexer.module.index_topk]

    return best


@attended_fault(
    "indexer-counts-hidden-columns",
    "own: the mask of a tree reaches attention and not the indexer, which chooses among siblings as well",
    "a tree with siblings on a model with an indexer",
)
@in_network
def counts_hidden_columns(model: Any, tree: Callable[[], bool]) -> None:
    """The indexer chooses a tree's columns among all, so that hidden ones take the place of those that a row sees."""

    def open_mask(_: nn.Module, args: tuple[Any, ...], kwargs: dict[str, Any]) -> Any:
        hidden, compressed, tables, mask, *rest = args
        rows = mask.shape[1]
        opened = mask.clone()
        # The rows of the block see each other, and each itself last.
        opened[..., -rows:] = True
        return ((hidden, compressed, tables, opened, *rest), kwargs) if tree() else None

    for indexer in _indexers(model):
        indexer.register_forward_pre_hook(open_mask, with_kwargs=True)
