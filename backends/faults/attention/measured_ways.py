"""Faults of attention whose way is chosen call by call.

Each way is right by itself. A fault lies in what the chosen one is handed (`backends/engine/attention/measured`).
"""

from dataclasses import replace
from functools import partial
from typing import Any

from torch import Tensor

from specverify.backends.base import Unsupported
from specverify.backends.engine.attention.measured.choosing import MeasuredAttention, columns_for
from specverify.backends.engine.attention.measured.ways import SDPA, Way
from specverify.backends.engine.columns import AttentionInputs
from specverify.backends.engine.seams import Seams
from specverify.backends.faults.fault import attended_fault

MEASURED_BACKEND = "cpu-measured"

measured_fault = partial(attended_fault, on=MEASURED_BACKEND)


def with_parts(seams: Seams, **parts: Any) -> Seams:
    """`seams` with other `parts` of attention that chooses its way, by the names of `MeasuredAttention`.

    Raises:
        Unsupported: if attention has one way.
    """
    if not isinstance(seams.attend, MeasuredAttention):
        raise Unsupported(f"a fault of attention that chooses its way: plant it in {MEASURED_BACKEND}")
    return replace(seams, attend=replace(seams.attend, **parts))


@measured_fault(
    "way-chosen-by-time-alone",
    "family of vllm-project/vllm-metal #550: the kernel was launched without sinks, whatever the model",
    "a model with attention sinks, or with a soft cap, at sizes where SDPA is the fastest",
)
def inputs_not_asked(seams: Seams) -> Seams:
    """The fastest way runs whatever it takes: sinks and soft caps that it does not compute are dropped."""

    def strip_inputs(way: Way, columns: AttentionInputs) -> AttentionInputs:
        inputs = columns_for(way, columns)
        return replace(inputs, cap=inputs.cap if way.caps else 0.0, sinks=inputs.sinks if way.sinks else None)

    return with_parts(seams, lacks=lambda way, query, columns: None, columns_for=strip_inputs)


@measured_fault(
    "gathered-to-first-lane",
    "family of alibaba/MNN #4898: the length of the KV was taken from another input, so that the rest was cut off",
    "two requests of unequal length in pages",
)
def gathered_to_first(seams: Seams) -> Seams:
    """A way that does not read pages is handed as many columns of each lane as the first lane has."""

    def cut_to_first_lane(way: Way, columns: AttentionInputs) -> AttentionInputs:
        if way.in_pages or columns.paging is None:
            return columns_for(way, columns)
        lengths = columns.paging.lengths
        return columns_for(way, replace(columns, paging=replace(columns.paging, lengths=lengths.clamp(max=lengths[0]))))

    return with_parts(seams, columns_for=cut_to_first_lane)


@measured_fault(
    "gathered-for-first-layer",
    "NVIDIA/TensorRT-LLM #16801: what attention reads was prepared once and shared by all layers",
    "pages, and a target of two layers",
)
def gathered_once(seams: Seams) -> Seams:
    """Columns are gathered from pages once for a block table, so that later layers read the columns of the first."""
    first_gathered: list[tuple[Tensor, AttentionInputs]] = []

    def once(way: Way, columns: AttentionInputs) -> AttentionInputs:
        if way.in_pages or columns.paging is None:
            return columns_for(way, columns)
        # A forward makes one block table for all of its layers.
        if not first_gathered or first_gathered[0][0] is not columns.paging.table:
            first_gathered[:] = [(columns.paging.table, columns_for(way, columns))]
        return replace(columns, key=first_gathered[0][1].key, value=first_gathered[0][1].value)

    return with_parts(seams, columns_for=once)


@measured_fault(
    "tree-causal-by-fastest-way",
    "huggingface/transformers #30311: SDPA ran without the mask where a heuristic found none needed, and drafted "
    "tokens were verified so",
    "two nodes, one of them not below the one before, in a batch of one at sizes where SDPA is the fastest",
)
def causal_for_one_lane(seams: Seams) -> Seams:
    """SDPA over one lane runs as causal attention: a node sees all nodes before it, whatever the tree."""

    def mask_causally(way: Way, columns: AttentionInputs) -> AttentionInputs:
        inputs = columns_for(way, columns)
        if way.name != SDPA or len(inputs.visible) > 1:
            return inputs
        rows, width = inputs.visible.shape[-2:]
        # The rows are the last columns, and each sees what stands before it.
        causal = inputs.visible.new_ones(rows, width).tril(width - rows)
        return replace(inputs, visible=causal.expand_as(inputs.visible).contiguous())

    return with_parts(seams, columns_for=mask_causally)
