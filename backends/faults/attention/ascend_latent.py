"""Faults of calls to Ascend's fused attention over latent rows.

The operator accepts each of these calls without an error.
"""

from dataclasses import replace

from specverify.backends.ascend.encodings import compressed_mask
from specverify.backends.ascend.fused import AscendFused
from specverify.backends.ascend.latent import LatentCall
from specverify.backends.ascend.operators.fused_infer.latent import LATENT_DIM, ROPE_DIM
from specverify.backends.faults.attention.ascend_calls import REFUSAL, ascend_fault
from specverify.backends.faults.fault import faults_in, on_result_of

V2 = "torch_npu docs, npu_fused_infer_attention_score_v2"
"""The documentation page of the operator."""

ROWS = "latent rows in 16 bits, "
"""The part of a trigger that every fault here needs."""

on_latent_call = on_result_of("attend.ask_latent", AscendFused, REFUSAL)
"""A decorator for a function that changes a call over latent rows."""


@ascend_fault(
    "ascend-latent-mask-transposed", V2 + ": (B, Q_S, Q_S), two axes of one size", ROWS + "a tree of two nodes"
)
@on_latent_call
def mask_by_columns(call: LatentCall) -> LatentCall:
    """The mask of sparse mode 9 has a node's descendants where its ancestors belong."""
    return call if call.mask is None else replace(call, mask=call.mask.transpose(1, 2).contiguous())


@ascend_fault(
    "ascend-latent-sparse-mode-3",
    "family of vllm-ascend PR #8408: a tree under the mask of a chain",
    ROWS + "two branches",
)
@on_latent_call
def chain(call: LatentCall) -> LatentCall:
    """Latent rows of a tree are verified under sparse mode 3, the chain's: siblings see each other."""
    return call if call.mask is None else replace(call, mask=compressed_mask(call.query.device), sparse_mode=3)


@ascend_fault(
    "ascend-latent-rope-of-column-before",
    V2 + ": key and key_rope are two tensors with slots of their own",
    ROWS + "two columns",
)
@on_latent_call
def parts_of_column_before(call: LatentCall) -> LatentCall:
    """key_rope is shifted by one column against the key: a node has the rotated part of the row before."""
    return replace(call, key_rope=call.key_rope.roll(1, 2 if call.table is None else 1))


@ascend_fault(
    "ascend-latent-scale-of-row",
    V2 + ": softmax_scale; DeepSeek-V2, arXiv 2405.04434, section 2.1.2",
    ROWS + "a context",
)
@on_latent_call
def scale_of_row(call: LatentCall) -> LatentCall:
    """The scale is taken from the width of a latent row, not from that of the model's heads."""
    return replace(call, scale=float((LATENT_DIM + ROPE_DIM) ** -0.5))


FAULTS = faults_in(globals())
