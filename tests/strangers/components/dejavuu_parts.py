"""dejavuu's parts as components: tree positions and mask, acceptance with and without a sampler, and the KV gather."""

from typing import Any

import numpy as np
import torch
from dejavuu.core import tree as trees
from dejavuu.core.sampling import Sampler
from dejavuu.core.verifier import gather_kv
from dejavuu.drafters import DraftTree
from torch import Tensor

from specverify.adapt import component


def above(parent: Tensor) -> list[int]:
    """Its own parents: -1 above the root."""
    return [-1, *parent[1:].tolist()]


def layout(parent: Tensor, committed: int) -> dict[str, Any]:
    """`depths`, `positions` and `mask`; the mask is an additive bias, 0 where a column is seen."""
    ancestors = above(parent)
    return {
        "depth": trees.depths(ancestors),
        "position": trees.positions(ancestors, committed)[0],
        "mask": trees.mask(ancestors, committed)[0, 0] == 0,
    }


def accept(tokens: Tensor, parent: Tensor, logits: Tensor) -> tuple[list[int], int]:
    """`accept` without a sampler."""
    emitted, _, path = trees.accept(DraftTree(tokens.tolist(), above(parent)), logits.numpy())
    return path, emitted[-1]


def sampled(tokens: Tensor, parent: Tensor, p: Tensor) -> tuple[list[int], int]:
    """`accept` with its sampler, seeded anew for each call; it draws from the target and takes a child by chance."""
    seed = int(torch.randint(0, 2**31, ()))
    with np.errstate(divide="ignore"):
        logits = np.log(p.numpy().astype(np.float64))
    emitted, _, path = trees.accept(DraftTree(tokens.tolist(), above(parent)), logits, Sampler(seed=seed))
    return path, emitted[-1]


def gather(keys: Tensor, values: Tensor, committed: int, path: list[int]) -> tuple[Any, Any]:
    """`gather_kv` of all layers."""
    cache_pairs = [
        (layer_keys.numpy()[None], layer_values.numpy()[None])
        for layer_keys, layer_values in zip(keys, values, strict=True)
    ]
    kept_pairs = gather_kv(cache_pairs, committed, path)
    return tuple(np.stack([pair[side][0] for pair in kept_pairs]) for side in (0, 1))  # type: ignore[return-value]


open_layout = component(tree_builder=layout, name="dejavuu-tree", trees="ordered")
open_accept = component(verify=accept, name="dejavuu-accept", trees="ordered")
open_sampled = component(sampler=sampled, name="dejavuu-sampled", trees="ordered", rules=("eagle",), draws=("top-k",))
open_gather = component(commit=gather, name="dejavuu-gather")
