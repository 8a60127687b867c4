"""Attention kernels: functions from queries, keys, values and a mask to an output.

The kernel runs in the forwards that verify a tree; prefills and drafts run our written-out attention.
"""

from dataclasses import replace

import torch
from torch import Tensor

from specverify.backends.adapt.component.contract import Component, Contract
from specverify.backends.engine.attention.eager import eager
from specverify.backends.engine.columns import AttentionInputs
from specverify.backends.engine.seams import Seams
from specverify.reference.trace import Stage

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


class AttentionKernel:
    """An attention kernel in our engine."""

    def __init__(self, component: Component) -> None:
        self._component = component

    def plant_into(self, seams: Seams) -> Seams:
        """The engine with this kernel in its verify forwards."""
        return replace(seams, attend=self._attend, prefill_attend=eager, draft_attend=eager)

    def _attend(self, query: Tensor, columns: AttentionInputs, scaling: float) -> Tensor:
        """See `specverify.backends.engine.columns.Attend`."""
        lanes = [self._lane(query, columns, scaling, lane) for lane in range(len(query))]
        return torch.stack(lanes).to(query)

    def _lane(self, query: Tensor, columns: AttentionInputs, scaling: float, lane: int) -> Tensor:
        """The output for one lane, [heads, rows, head_dim]."""
        heads, rows, width = query.shape[1:]
        answer = self._component(
            # Copies: a kernel that writes to its inputs must not change the engine's cache.
            query=query[lane].clone(),
            key=columns.key[lane].clone(),
            value=columns.value[lane].clone(),
            mask=columns.visible[lane, 0].clone(),
            scaling=scaling,
            prefix=int(columns.prefix[lane]),
            softcap=columns.cap,
        )
        axes = (("heads", heads), ("rows", rows), ("head_dim", width))
        return self._component.tensor("output", answer, "float", axes)
