"""Functions that are planted as they are: greedy verify kernels, attention kernels and cache commits.

An attention kernel runs in the forwards that verify a tree; prefills and drafts run our written-out attention. A cache
commit keeps the accepted rows of the target's cache after each verification, and those of the draft model's likewise.
"""

from dataclasses import replace

import torch
from torch import Tensor

from specverify.backends.adapt.component.contract import Component, Contract
from specverify.backends.engine.attention.eager import eager
from specverify.backends.engine.columns import AttentionInputs
from specverify.backends.engine.kv.base import KvCache
from specverify.backends.engine.kv.branch import Branch
from specverify.backends.engine.lower_tree import TreeTensors
from specverify.backends.engine.seams import Seams
from specverify.reference.trace import Stage

VERIFY = Contract(
    kind="verify",
    stage=Stage.ACCEPTED,
    offers={
        "tokens": "int64 [nodes]: the token of each node",
        "parent": "int64 [nodes]: the row of each node's parent; the root is row 0 and its own parent",
        "next_token": "int64 [nodes]: the first child of each node, 0 for none",
        "next_sibling": "int64 [nodes]: the next sibling of each node in row order, 0 for none",
        "logits": "float [nodes, vocabulary]: the target's logits after each node",
        "best": "int64 [nodes]: the target's best token after each node, the lowest id of equals",
    },
    needs=(("tokens",), ("parent", "next_token", "logits", "best"), ("logits", "best")),
    returns="the accepted rows from the root (0) downwards, and the token after the last of them",
    judged_by=("acceptance.greedy-walk", "acceptance.support", "acceptance.*"),
)

ATTENTION = Contract(
    kind="attention",
    stage=Stage.ATTENDED,
    offers={
        "query": "float [heads, rows, head_dim]: the rotated queries of the tree's rows",
        "key": "float [kv_heads, columns, head_dim]: rotated keys, the committed columns first, then one for each row",
        "value": "float [kv_heads, columns, head_dim]: values, likewise",
        "mask": "bool [rows, columns]: whether the row sees the column",
        "scaling": "the factor of query times key",
        "prefix": "the number of committed columns",
        "softcap": "the soft cap c of a score s, c * tanh(s / c), before the mask; 0.0 for none",
    },
    needs=(("query",), ("key",), ("value",), ("mask",), ("scaling",)),
    returns="float [heads, rows, head_dim]",
    judged_by=("attention.*",),
)

COMMIT = Contract(
    kind="commit",
    stage=Stage.COMMITTED,
    offers={
        "keys": "float [layers, kv_heads, columns, head_dim]: the committed columns, then one for each row of the tree",
        "values": "float [layers, kv_heads, columns, head_dim]: likewise",
        "committed": "the number of committed columns",
        "path": "a list of the rows to keep, from the root (0) downwards",
    },
    needs=(("keys",), ("values",), ("committed",), ("path",)),
    returns="keys and values [layers, kv_heads, committed + len(path), head_dim]",
    judged_by=("cache.commit-equivalence", "cache.untouched-slots", "cache.*"),
)


def with_greedy_verify(component: Component, seams: Seams) -> Seams:
    """The engine with a greedy verify kernel."""

    def walk(tensors: TreeTensors, logits: Tensor) -> tuple[list[int], int]:
        nodes = len(logits)
        answer = component(
            tokens=tensors.token[:nodes],
            parent=tensors.parent[:nodes],
            next_token=tensors.next_token[:nodes],
            next_sibling=tensors.next_sibling[:nodes],
            logits=logits.clone(),
            best=logits.argmax(-1),
        )
        return component.walk(answer, nodes, logits.shape[-1])

    return replace(seams, walk=walk)


def with_attention(component: Component, seams: Seams) -> Seams:
    """The engine with an attention kernel in its verify forwards."""

    def attend(query: Tensor, columns: AttentionInputs, scaling: float) -> Tensor:
        lanes = [_attend_lane(component, query, columns, scaling, lane) for lane in range(len(query))]
        return torch.stack(lanes).to(query)

    return replace(seams, attend=attend, prefill_attend=eager, draft_attend=eager)


def _attend_lane(component: Component, query: Tensor, columns: AttentionInputs, scaling: float, lane: int) -> Tensor:
    """The output for one lane, [heads, rows, head_dim]."""
    heads, rows, width = query.shape[1:]
    answer = component(
        # Copies: a kernel that writes to its inputs must not change the engine's cache.
        query=query[lane].clone(),
        key=columns.key[lane].clone(),
        value=columns.value[lane].clone(),
        mask=columns.visible[lane, 0].clone(),
        scaling=scaling,
        prefix=int(columns.prefix[lane]),
        softcap=columns.cap,
    )
    return component.tensor("output", answer, "float", (("heads", heads), ("rows", rows), ("head_dim", width)))


def with_cache_commit(component: Component, seams: Seams) -> Seams:
    """The engine with a cache commit, on the branch layout."""
    commit, roll_back = seams.commit, seams.roll_back
    return replace(
        seams,
        commit=lambda cache, path: commit(cache, _gather_columns(component, cache, path)),
        roll_back=lambda cache, rows: roll_back(cache, _gather_columns(component, cache, rows)),
    )


def _gather_columns(component: Component, cache: KvCache, path: list[int]) -> list[int]:
    """Replace the branch by the columns that the function returns; the rows to commit are then the first ones."""
    if not path or not cache.rows:
        return path
    assert isinstance(cache, Branch)  # the declaration has no other layout
    keys, values = (torch.stack([pair[side] for pair in cache.branch]) for side in (0, 1))
    layers, heads, _, width = keys.shape
    answer = component(keys=keys, values=values, committed=cache.length, path=list(path))
    if not isinstance(answer, (tuple, list)) or len(answer) != 2:
        raise component.wrong_answer(answer, "a pair: keys and values")
    columns = cache.length + len(path)
    axes = (("layers", layers), ("kv_heads", heads), ("committed + len(path)", columns), ("head_dim", width))
    cache_sides = [
        component.tensor(name, tensor, "float", axes).to(keys)
        for name, tensor in zip(("keys", "values"), answer, strict=True)
    ]
    cache.branch = [(cache_sides[0][layer], cache_sides[1][layer]) for layer in range(layers)]
    cache.rows = len(path)
    return list(range(len(path)))
