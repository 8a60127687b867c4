"""Faults of calls to Ascend's fused attention over latent rows.

The operator accepts each of these calls without an error.
"""

from collections.abc import Callable
from dataclasses import replace

from torch import Tensor

from specverify.backends.ascend.encodings import compressed_mask
from specverify.backends.ascend.latent import LatentCall
from specverify.backends.ascend.operands import Operands
from specverify.backends.ascend.operators.fused_infer.latent import LATENT_DIM, ROPE_DIM
from specverify.backends.engine.seams import Seams
from specverify.backends.faults.attention.ascend_calls import fault, fused_attention


def _with_changed_calls(change: Callable[[LatentCall], LatentCall]) -> Callable[[Seams], Seams]:
    """A fault whose calls over latent rows are changed by `change`."""

    def plant(seams: Seams) -> Seams:
        right = fused_attention(seams).ask_latent

        def ask(query: Tensor, operands: Operands, mask: Tensor | None, scaling: float) -> LatentCall:
            return change(right(query, operands, mask, scaling))

        return replace(seams, attend=replace(fused_attention(seams), ask_latent=ask))

    return plant


def _mask_by_columns(call: LatentCall) -> LatentCall:
    """The mask with rows and columns exchanged: a node sees its descendants."""
    return call if call.mask is None else replace(call, mask=call.mask.transpose(1, 2).contiguous())


def _chain(call: LatentCall) -> LatentCall:
    """The compressed causal mask of sparse mode 3 in place of the tree's."""
    return call if call.mask is None else replace(call, mask=compressed_mask(call.query.device), sparse_mode=3)


def _parts_of_column_before(call: LatentCall) -> LatentCall:
    """Each latent vector beside the rotated part of the column before, in its page where it lies in one."""
    return replace(call, key_rope=call.key_rope.roll(1, 2 if call.table is None else 1))


def _scale_of_row(call: LatentCall) -> LatentCall:
    """The scale of a head as wide as a latent row."""
    return replace(call, scale=float((LATENT_DIM + ROPE_DIM) ** -0.5))


V2 = "torch_npu docs, npu_fused_infer_attention_score_v2"
"""The documentation page of the operator."""

ROWS = "latent rows in 16 bits, "
"""The part of a trigger that every fault here needs."""

FAULTS = (
    fault(
        "ascend-latent-mask-transposed",
        "The mask of sparse mode 9 has a node's descendants where its ancestors belong.",
        V2 + ": (B, Q_S, Q_S), two axes of one size",
        ROWS + "a tree of two nodes",
        _with_changed_calls(_mask_by_columns),
    ),
    fault(
        "ascend-latent-sparse-mode-3",
        "Latent rows of a tree are verified under sparse mode 3, the chain's: siblings see each other.",
        "family of vllm-ascend PR #8408: a tree under the mask of a chain",
        ROWS + "two branches",
        _with_changed_calls(_chain),
    ),
    fault(
        "ascend-latent-rope-of-column-before",
        "key_rope is shifted by one column against the key: a node has the rotated part of the row before.",
        V2 + ": key and key_rope are two tensors with slots of their own",
        ROWS + "two columns",
        _with_changed_calls(_parts_of_column_before),
    ),
    fault(
        "ascend-latent-scale-of-row",
        "The scale is taken from the width of a latent row, not from that of the model's heads.",
        V2 + ": softmax_scale; DeepSeek-V2, arXiv 2405.04434, section 2.1.2",
        ROWS + "a context",
        _with_changed_calls(_scale_of_row),
    ),
)
