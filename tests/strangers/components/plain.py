"""Small components of each kind, right and with one planted fault: what a stranger's first function looks like."""

from collections.abc import Callable
from typing import Any

import torch
from torch import Tensor

from specverify.adapt import component


def tree_builder(fault: str = "") -> Callable[..., Any]:
    """Mask and positions; faults: sibling (a node sees its older sibling), row (positions count rows)."""

    def lower(parent: Tensor, committed: int) -> dict[str, Any]:
        nodes = len(parent)
        mask, depth = torch.eye(nodes, dtype=torch.bool), [0] * nodes
        for node in range(1, nodes):
            ancestor = node
            while ancestor:
                ancestor = int(parent[ancestor])
                mask[node, ancestor] = True
                depth[node] += 1
        if fault == "sibling":
            for node in range(2, nodes):
                mask[node, node - 1] = mask[node, node - 1] | bool(parent[node] == parent[node - 1])
        return {"mask": mask, "position": [committed + (row if fault == "row" else depth[row]) for row in range(nodes)]}

    return lower


def verify(fault: str = "") -> Callable[..., Any]:
    """The greedy walk; faults: first (only the first child is tried), bonus (the root's best token is emitted)."""

    def walk(tokens: Tensor, parent: Tensor, best: Tensor) -> tuple[list[int], int]:
        path = [0]
        while True:
            below = [node for node in range(1, len(tokens)) if parent[node] == path[-1]]
            below = below[:1] if fault == "first" else below
            hit = next((node for node in below if tokens[node] == best[path[-1]]), None)
            if hit is None:
                return path, int(best[0 if fault == "bonus" else path[-1]])
            path.append(hit)

    return walk


def tried(tokens: Tensor, parent: Tensor, p: Tensor, q: Tensor, below: Callable[[int, Tensor], Any], fault: str) -> Any:
    """The accepted rows, and the law of the token after them; `below` says whether a node's coin is below a number."""
    path, law = [0], p[0]
    while True:
        law, hit = p[path[-1]], None
        for node in (child for child in range(1, len(tokens)) if parent[child] == path[-1]):
            ratio = law[tokens[node]] / q[node, tokens[node]]
            if below(node, ratio):
                hit = node
                break
            residual = (law - (0 if fault == "residual" else 1) * q[node]).clamp(min=0)
            law = residual / residual.sum() if residual.sum() > 0 else p[path[-1]]
        if hit is None:
            return path, law
        path.append(hit)


def sampler(fault: str = "") -> Callable[..., Any]:
    """Multi-round acceptance on draws of its own; faults: residual (p in place of it), eager (accepts too often)."""

    def accept(tokens: Tensor, parent: Tensor, p: Tensor, q: Tensor) -> tuple[list[int], int]:
        factor = 1.05 if fault == "eager" else 1.0
        path, law = tried(tokens, parent, p, q, lambda _, ratio: torch.rand(()) < factor * ratio, fault)
        return path, int(torch.multinomial(law, 1))

    return accept


def coined(fault: str = "") -> Callable[..., Any]:
    """The same on given coins; faults: residual, shifted (the coin of the row before)."""

    def accept(
        tokens: Tensor, parent: Tensor, p: Tensor, q: Tensor, accept_coins: Tensor, bonus_coin: Tensor
    ) -> tuple[list[int], int]:
        shift = int(fault == "shifted")
        path, law = tried(tokens, parent, p, q, lambda node, ratio: bool(accept_coins[node - shift] < ratio), fault)
        edges = law.cumsum(-1) / law.sum()
        return path, min(int((edges <= bonus_coin).sum()), int((law > 0).nonzero().max()))

    return accept


def attention(fault: str = "") -> Callable[..., Any]:
    """Written-out attention; faults: unmasked (no mask within the tree), unscaled."""

    def attend(query: Tensor, key: Tensor, value: Tensor, mask: Tensor, scaling: float, prefix: int) -> Tensor:
        group = len(query) // len(key)
        key, value = key.repeat_interleave(group, 0), value.repeat_interleave(group, 0)
        if fault == "unmasked":
            mask = torch.cat([mask[:, :prefix], torch.ones_like(mask[:, prefix:])], 1)
        scores = query @ key.transpose(-1, -2) * (1.0 if fault == "unscaled" else scaling)
        return scores.masked_fill(~mask, float("-inf")).softmax(-1) @ value

    return attend


def commit(fault: str = "") -> Callable[..., Any]:
    """The gather of the accepted columns; faults: truncated (the first rows are kept), keys (values stay in place)."""

    def keep(keys: Tensor, values: Tensor, committed: int, path: list[int]) -> tuple[Tensor, Tensor]:
        right = [*range(committed), *(committed + row for row in path)]
        first = list(range(len(right)))
        rows = first if fault == "truncated" else right
        return keys[:, :, rows], values[:, :, first if fault == "keys" else rows]

    return keep


DRAWN = ("top-k", "with-replacement")
"""How siblings may be named for samplers that take q as the law of each sibling."""

open_tree_builder = component(tree_builder=tree_builder())
open_verify = component(verify=verify())
open_sampler = component(sampler=sampler(), draws=DRAWN)
open_coined = component(sampler=coined(), draws=DRAWN)
open_attention = component(attention=attention())
open_commit = component(commit=commit())

FAULTS: dict[str, tuple[str, Callable[[], Any]]] = {
    "tree_builder-sibling": ("structure.mask-is-ancestry", lambda: component(tree_builder=tree_builder("sibling"))),
    "tree_builder-row": ("structure.positions-are-depth", lambda: component(tree_builder=tree_builder("row"))),
    "verify-first": ("acceptance.greedy-walk", lambda: component(verify=verify("first"))),
    "verify-bonus": ("acceptance.greedy-walk", lambda: component(verify=verify("bonus"))),
    "sampler-residual": ("acceptance.law-", lambda: component(sampler=sampler("residual"), draws=DRAWN)),
    "sampler-eager": ("acceptance.law-", lambda: component(sampler=sampler("eager"), draws=DRAWN)),
    "coined-residual": ("acceptance.sampled-walk", lambda: component(sampler=coined("residual"), draws=DRAWN)),
    "coined-shifted": ("acceptance.sampled-walk", lambda: component(sampler=coined("shifted"), draws=DRAWN)),
    "attention-unmasked": ("attention.", lambda: component(attention=attention("unmasked"))),
    "attention-unscaled": ("attention.context-exact", lambda: component(attention=attention("unscaled"))),
    "commit-truncated": ("cache.commit-equivalence", lambda: component(commit=commit("truncated"))),
    "commit-keys": ("cache.commit-equivalence", lambda: component(commit=commit("keys"))),
}
"""Each planted fault: the beginning of the invariant that must name it, and its component."""
