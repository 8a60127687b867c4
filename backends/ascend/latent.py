"""Tree attention over latent rows by the second version of fused-infer attention.

In sparse mode 9 that operator takes the mask of a tree. Its latent vectors have 512 dimensions, its rotated parts 64;
narrower ones are filled with zeros, which change no score, and the output is cut.
"""

from dataclasses import dataclass

import torch
from torch import Tensor

from specverify.backends.ascend.operands import Operands
from specverify.backends.ascend.operators.fused_infer.latent import HEADS, LATENT_DIM, MOST_ROWS, ROPE_DIM, TREE


@dataclass(frozen=True)
class LatentCall:
    """The arguments of one call over latent rows.

    Attributes:
        query: The absorbed query, [B, N, T, L].
        query_rope: Its rotated part, [B, N, T, R].
        key: Latent vectors, which are the values too: gathered, [B, 1, C, L], or with a table [pages, size, 1, L].
        key_rope: Rotated parts, likewise with R dimensions.
        mask: bool, True = masked, [B, T, T], over the last T keys of each lane; None for one row, which sees all keys.
        lengths: The key length of each lane.
        table: int32 [B, most pages of a lane], or None for gathered columns.
        scale: The factor of the scores; the operator's own default is 1.
        sparse_mode: 9 with the mask of a tree, and 0 without a mask.
    """

    query: Tensor
    query_rope: Tensor
    key: Tensor
    key_rope: Tensor
    mask: Tensor | None
    lengths: list[int]
    table: Tensor | None
    scale: float
    sparse_mode: int


def can_take(query: Tensor, operands: Operands) -> bool:
    """Whether the operator takes these rows.

    Args:
        query: [B, N, T, L + R].
        operands: Keys with L + R dimensions and values with L.
    """
    heads = query.shape[1]
    rows = query.shape[2]
    latent = operands.value.shape[-1]
    sizes = heads in HEADS and rows <= MOST_ROWS and latent <= LATENT_DIM and query.shape[-1] - latent <= ROPE_DIM
    half = query.dtype in (torch.float16, torch.bfloat16)
    return half and sizes and all(_behind_prefix(operands, lane, rows) for lane in range(len(operands.lengths)))


def _behind_prefix(operands: Operands, lane: int, rows: int) -> bool:
    """Whether the rows of a lane see all its columns before the last `rows`, which mode 9 does not mask."""
    length = operands.lengths[lane]
    visible = operands.visible[lane, 0]
    if length < rows:
        return False
    sees_prefix = visible[:, : length - rows].all(-1)
    # A row that sees one column beside rows that see all of the prefix is padding: its output is read by nobody.
    return bool((sees_prefix | (visible.sum(-1) == 1)).all() and sees_prefix.any())


def tree_visibility(operands: Operands, rows: int) -> Tensor:
    """The visibility among the last `rows` columns of each lane, bool [B, 1, rows, rows]."""
    return torch.stack([operands.visible[lane, :, :, end - rows : end] for lane, end in enumerate(operands.lengths)])


def ask_latent(query: Tensor, operands: Operands, mask: Tensor | None, scaling: float) -> LatentCall:
    """The call for `query` [B, N, T, L + R] over `operands`, whose keys begin with its values of L dimensions."""
    width = operands.value.shape[-1]
    mode = 0 if mask is None else TREE
    return LatentCall(
        query[..., :width],
        query[..., width:],
        operands.key[..., :width],
        operands.key[..., width:],
        mask,
        operands.lengths,
        operands.table,
        scaling,
        mode,
    )


def infer_latent(call: LatentCall) -> Tensor:
    """Run npu_fused_infer_attention_score_v2 over latent rows; [B, N, T, L]."""
    key, parts = _pad_width(call.key, LATENT_DIM), _pad_width(call.key_rope, ROPE_DIM)
    size = 0
    if call.table is not None:
        size = key.shape[1]
        # A paged cache is read as [pages, size, D], as the key has one head.
        key, parts = key.flatten(2), parts.flatten(2)
    out: Tensor = torch.ops.npu.npu_fused_infer_attention_score_v2(
        _pad_width(call.query, LATENT_DIM),
        key,
        key,
        query_rope=_pad_width(call.query_rope, ROPE_DIM),
        key_rope=parts,
        atten_mask=call.mask,
        actual_seq_kvlen=call.lengths,
        block_table=call.table,
        block_size=size,
        num_query_heads=call.query.shape[1],
        num_key_value_heads=1,
        softmax_scale=call.scale,
        input_layout="BNSD",
        sparse_mode=call.sparse_mode,
    )[0]
    return out[..., : call.query.shape[-1]]


def _pad_width(tensor: Tensor, width: int) -> Tensor:
    return torch.nn.functional.pad(tensor, (0, width - tensor.shape[-1])).contiguous()
