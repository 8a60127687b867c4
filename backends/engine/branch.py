"""Branch and commit on transformers caches: speculate in a replica, then bring the accepted rows home."""

import torch
from torch import Tensor
from transformers import DynamicCache

from backends.engine.causal_lm import cached_length


def replicate(committed: DynamicCache) -> DynamicCache:
    """A branch cache that shares no storage with `committed`."""
    return cache_of([(layer.keys.clone(), layer.values.clone()) for layer in committed.layers])


def cache_of(layers: list[tuple[Tensor, Tensor]]) -> DynamicCache:
    """A cache holding `layers`, each a pair of keys and values [1, Hkv, length, D].

    Made without a config, so that every layer keeps every column and windows stay the mask's business: a sliding
    layer of transformers evicts prefix on append, after which no commit is possible.
    """
    cache = DynamicCache()
    for index, (keys, values) in enumerate(layers):
        cache.update(keys, values, index)
    return cache


def commit(committed: DynamicCache, branch: DynamicCache, path: list[int], how: str) -> tuple[DynamicCache, str | None]:
    """Return the cache after keeping the branch rows `path` (tree rows, root first), and why a fast way was not taken.

    Args:
        committed: Cache of P columns as it was before the step.
        branch: Its replica with the R rows of the tree appended.
        path: Rows to keep, in the order of their positions.
        how: `path`, `fast` or `length` as KvLayout.commit says.
    """
    start = cached_length(committed)
    if how == "length":
        if path == list(range(len(path))):
            return by_length(branch, start + len(path)), None
        return by_path(branch, start, path), "the accepted path is not a prefix of the row order"
    if how == "fast":
        why = _cannot_share(committed, branch)
        if why is None:
            return sharing_prefix(committed, branch, start, path), None
        return by_path(branch, start, path), why
    return by_path(branch, start, path), None


def by_length(branch: DynamicCache, length: int) -> DynamicCache:
    """Keep the first `length` columns: all that a chain needs."""
    return cache_of(
        [(layer.keys[..., :length, :].clone(), layer.values[..., :length, :].clone()) for layer in branch.layers]
    )


def by_path(branch: DynamicCache, start: int, path: list[int]) -> DynamicCache:
    """Full reorder: gather prefix and accepted rows out of the branch."""
    kept = []
    for layer in branch.layers:
        index = torch.cat([torch.arange(start), start + torch.tensor(path, dtype=torch.long)]).to(layer.keys.device)
        kept.append((layer.keys.index_select(-2, index), layer.values.index_select(-2, index)))
    return cache_of(kept)


def sharing_prefix(committed: DynamicCache, branch: DynamicCache, start: int, path: list[int]) -> DynamicCache:
    """Fast reorder: leave the committed prefix where it is and append the accepted rows alone."""
    for index, layer in enumerate(branch.layers):
        rows = start + torch.tensor(path, dtype=torch.long, device=layer.keys.device)
        committed.update(layer.keys.index_select(-2, rows), layer.values.index_select(-2, rows), index)
    return committed


def _cannot_share(committed: DynamicCache, branch: DynamicCache) -> str | None:
    """Why the committed prefix may not be reused under the branch's rows, or None if every layer agrees."""
    if not committed.layers:
        return "there is no committed prefix to share"
    if len(committed.layers) != len(branch.layers):
        return f"{len(committed.layers)} committed layers under {len(branch.layers)} of the branch"
    start = cached_length(committed)
    for index, (mine, other) in enumerate(zip(committed.layers, branch.layers, strict=True)):
        if mine.keys.shape[-2] != start or mine.values.shape[-2] != start:
            return f"layer {index} holds {mine.keys.shape[-2]} columns, layer 0 {start}"
        if mine.keys.shape[:-2] != other.keys.shape[:-2] or mine.keys.dtype != other.keys.dtype:
            return f"layer {index} of the branch has another shape or dtype"
        if other.keys.shape[-2] < start:
            return f"layer {index} of the branch is shorter than the prefix"
    return None
