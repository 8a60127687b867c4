"""Tree attention over latent rows by the second version of fused-infer attention.

In sparse mode 9 that operator takes the mask of a tree. Its latent vectors have 512 dimensions, its rotated parts 64;
narrower ones are filled with zeros, which change no score, and the output is cut.
"""

from dataclasses import dataclass

import torch
from torch import Tensor

from backends.ascend.operands import Operands
from backends.ascend.operators.fused_infer.latent import HEADS, LATENT_DIM, MOST_ROWS, ROPE_DIM, TREE


@dataclass(frozen=True)
class LatentAsked:
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
        sparse_mode: 9 with a mask, which is that of a tree, and 0 without.
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


def takes(query: Tensor, held: Operands) -> bool:
    """Whether the operator takes these rows.

    Args:
        query: [B, N, T, L + R].
        held: Keys with L + R dimensions and values with L.
    """
    heads, rows, latent = query.shape[1], query.shape[2], held.value.shape[-1]
    sizes = heads in HEADS and rows <= MOST_ROWS and latent <= LATENT_DIM and query.shape[-1] - latent <= ROPE_DIM
    half = query.dtype in (torch.float16, torch.bfloat16)
    return half and sizes and all(_behind_prefix(held, lane, rows) for lane in range(len(held.lengths)))


def _behind_prefix(held: Operands, lane: int, rows: int) -> bool:
    """Whether the rows of a lane see all its columns before the last `rows`, which mode 9 does not mask."""
    length, visible = held.lengths[lane], held.visible[lane, 0]
    if length < rows:
        return False
    whole = visible[:, : length - rows].all(-1)
    # A row that sees one column beside rows that see all of the prefix is padding: its output is read by nobody.
    return bool((whole | (visible.sum(-1) == 1)).all() and whole.any())


def of_tree(held: Operands, rows: int) -> Tensor:
    """The visibility among the last `rows` columns of each lane, bool [B, 1, rows, rows]."""
    return torch.stack([held.visible[lane, :, :, end - rows : end] for lane, end in enumerate(held.lengths)])


def ask_latent(query: Tensor, held: Operands, mask: Tensor | None, scaling: float) -> LatentAsked:
    """The call for `query` [B, N, T, L + R] over `held`, whose keys begin with its values of L dimensions."""
    at = held.value.shape[-1]
    (asked, turned), (latent, parts) = ((one[..., :at], one[..., at:]) for one in (query, held.key))
    mode = 0 if mask is None else TREE
    return LatentAsked(asked, turned, latent, parts, mask, held.lengths, held.table, scaling, mode)


def infer_latent(asked: LatentAsked) -> Tensor:
    """Run npu_fused_infer_attention_score_v2 over latent rows; [B, N, T, L]."""
    key, parts = _filled(asked.key, LATENT_DIM), _filled(asked.key_rope, ROPE_DIM)
    size = 0
    if asked.table is not None:
        size = key.shape[1]
        # A paged cache is read as [pages, size, D], as the key has one head.
        key, parts = key.flatten(2), parts.flatten(2)
    out: Tensor = torch.ops.npu.npu_fused_infer_attention_score_v2(
        _filled(asked.query, LATENT_DIM),
        key,
        key,
        query_rope=_filled(asked.query_rope, ROPE_DIM),
        key_rope=parts,
        atten_mask=asked.mask,
        actual_seq_kvlen=asked.lengths,
        block_table=asked.table,
        block_size=size,
        num_query_heads=asked.query.shape[1],
        num_key_value_heads=1,
        softmax_scale=asked.scale,
        input_layout="BNSD",
        sparse_mode=asked.sparse_mode,
    )[0]
    return out[..., : asked.query.shape[-1]]


def _filled(tensor: Tensor, width: int) -> Tensor:
    return torch.nn.functional.pad(tensor, (0, width - tensor.shape[-1])).contiguous()
