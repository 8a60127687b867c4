"""Attention of a single request as Ascend's kernels define it.

A mask selects a finite minimum in place of a score, and sparse modes add masks of their own.
"""

from functools import lru_cache

import torch
from torch import Tensor

from specverify.backends.ascend.operators.rules import demand, demand_defined

WIDE_OPEN = 2147483647
"""The default of pre_tokens and next_tokens, which means no band."""

COMPRESSED_SIZE = 2048
"""The side of the one mask that sparse modes 2, 3 and 4 take."""


def attend(
    query: Tensor, key: Tensor, value: Tensor, masked: Tensor | None, scale: float, precise: int, family: str
) -> tuple[Tensor, Tensor]:
    """Attention of one request.

    A masked score becomes a finite minimum, never minus infinity. A row whose keys are all masked therefore gives the
    mean of the values, or zero where bit 1 of `precise` asks for it. The softmax runs in float32; its weights are
    rounded to the dtype of the inputs before they are multiplied with the values.

    Args:
        query: [N, S1, D].
        key: [Nkv, S2, D].
        value: As `key`.
        masked: bool [S1, S2] or [N, S1, S2], True where a key is masked out; None for no mask.
        scale: The factor of the scores.
        precise: inner_precise of the call.
        family: The prefix of the rule about rows that see no key.

    Returns:
        Output [N, S1, D] in the query's dtype, and the log-sum-exp, float32 [N, S1].
    """
    heads, groups = query.shape[0], query.shape[0] // key.shape[0]
    rows, columns, dim = query.shape[1], key.shape[1], query.shape[2]
    # Queries of one KV head lie one after another: a view in place of a copy of keys for each of them.
    grouped_query = query.float().reshape(key.shape[0], groups * rows, dim)
    scores = (grouped_query @ key.float().transpose(-1, -2)).view(heads, rows, columns) * scale
    dead = None
    if masked is not None:
        # With bit 0 of inner_precise, float16 scores have the minimum of float16.
        least = -65504.0 if query.dtype == torch.float16 and precise & 1 else torch.finfo(torch.float32).min
        scores = scores.masked_fill(masked, least)
        dead = masked.all(-1).expand(heads, rows)
    most = scores.amax(-1, keepdim=True)
    weights = torch.exp(scores - most)
    total = weights.sum(-1, keepdim=True)
    # Rounding the weights, and dividing by their float32 sum afterwards, follows the kernel.
    weighted_values = weights.to(query.dtype).float().view(key.shape[0], groups * rows, columns) @ value.float()
    out = weighted_values.view(heads, rows, value.shape[-1]) / total
    lse = (torch.log(total) + most).squeeze(-1)
    if dead is not None and bool(dead.any()):
        if precise & 2 and family == "fia":
            out, lse = out.masked_fill(dead[..., None], 0.0), lse.masked_fill(dead, float("inf"))
        else:
            row = int(dead.any(0).nonzero()[0])
            demand_defined(False, f"{family}.row-fully-masked", f"query row {row} has every key masked")
    return out.to(query.dtype), lse


@lru_cache(maxsize=1)
def compressed_mask() -> Tensor:
    """The compressed causal mask: bool [2048, 2048], True strictly above the diagonal."""
    return torch.triu(torch.ones(COMPRESSED_SIZE, COMPRESSED_SIZE, dtype=torch.bool), 1)


def check_compressed(mask: Tensor | None, sparse_mode: int, family: str) -> None:
    """Refuse every mask but the compressed causal one."""
    demand(
        mask is not None, f"{family}.mask-required", f"attenMask should not be null when sparse_mode is {sparse_mode}."
    )
    assert mask is not None
    side = (COMPRESSED_SIZE, COMPRESSED_SIZE)
    demand(
        tuple(mask.shape) in (side, (1, *side), (1, 1, *side)),
        f"{family}.mask-2048",
        f"attenMask shape must be (2048, 2048) or (1, 2048, 2048) or (1, 1, 2048, 2048) when sparse mode = "
        f"{sparse_mode}, but got {list(mask.shape)}",
    )
    demand_defined(
        torch.equal(mask.reshape(side).bool(), compressed_mask()),
        f"{family}.mask-2048-content",
        "the mask of sparse modes 2, 3 and 4 is 1 strictly above the diagonal and nothing else",
    )


def mode_mask(sparse_mode: int, rows: int, columns: int, before: int, after: int, has_mask: bool) -> Tensor | None:
    """The mask bool [rows, columns] that the sparse mode adds by itself; None for no mask.

    Modes 0 and 4 keep a band of `before` keys on the left and `after` keys on the right of the diagonal. The diagonal
    begins at the top left in mode 0, where the band needs a mask in the call (`has_mask`), and ends at the bottom right
    in mode 4. Mode 2 is causal from the top left, so it ignores a cached prefix; mode 3 is causal to the bottom right.
    """
    if sparse_mode == 1 or (sparse_mode == 0 and (not has_mask or min(before, after) >= max(rows, columns))):
        return None
    row, column = torch.arange(rows)[:, None], torch.arange(columns)[None]
    offset = 0 if sparse_mode in (0, 2) else columns - rows
    ahead = column - row - offset
    return ahead > 0 if sparse_mode in (2, 3) else (ahead > after) | (-ahead > before)
