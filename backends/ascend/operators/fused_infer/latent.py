"""npu_fused_infer_attention_score_v2 over latent rows (MLA), emulated on the CPU.

The query is the absorbed one, beside its rotated part. The key is the latent vector of a row, beside the rotated part
that all heads share; the value is the latent vector again. Sparse mode 9 takes the mask of a tree. Layouts with a batch
axis and D = 512 are emulated, over gathered columns and over pages. Layout TND, D = 128 and quantisation are not.
"""

from dataclasses import dataclass

import torch
from torch import Tensor

from specverify.backends.ascend.operators.fused_infer.call import Call
from specverify.backends.ascend.operators.masked import attend, check_compressed, mode_mask
from specverify.backends.ascend.operators.pages import Cache, cache_of, check_ids
from specverify.backends.ascend.operators.rules import NotEmulated, demand, demand_defined
from specverify.backends.ascend.operators.shapes import LAYOUTS, RANKS, from_bnsd, to_bnsd

LATENT_DIM, ROPE_DIM = 512, 64
"""The widths of a latent vector and of a rotated part that the operator takes."""

MOST_ROWS = 16
"""The most query rows of a request."""

TREE = 9
"""The sparse mode that takes the mask of a tree."""

HEADS = tuple(2**power for power in range(8))
"""The numbers of query heads that the operator takes."""

MODES = (0, 3, 4, TREE)
"""The sparse modes of calls with rotated parts."""

LARGEST_BLOCK = 1024
"""The most columns of a block."""


@dataclass(frozen=True)
class Rope:
    """The rotated parts of a call.

    Attributes:
        query: As the call's query, with 64 dimensions.
        key: As the call's key, with 64 dimensions.
    """

    query: Tensor
    key: Tensor


def latent_attention(call: Call, rope: Rope) -> tuple[Tensor, Tensor]:
    """Attention in the layout of the call, and its log-sum-exp, float32 [B, N, S, 1].

    Raises:
        AscendContractError, AscendUndefinedBehaviour, NotEmulated: see `rules`.
    """
    _refuse_unknown(call)
    layout, output_layout = LAYOUTS[call.input_layout]
    _check_dtypes(call, rope, RANKS[layout])
    heads = call.num_heads
    message = f"num_heads({heads}) with rope and D = 512 is none of {', '.join(map(str, HEADS))}"
    demand(heads in HEADS, "fia.latent-heads", message)
    is_divisible = layout != "BSH" or call.query.shape[-1] % heads == 0 == rope.query.shape[-1] % heads
    demand(is_divisible, "fia.heads", f"H of query or query_rope is no multiple of num_heads({heads})")
    query, rotated_query = (to_bnsd(tensor, layout, heads) for tensor in (call.query, rope.query))
    batch, num_heads, rows, dim = query.shape
    demand(num_heads == heads, "fia.heads", f"num_heads({heads}) != N({num_heads}) of the query")
    message = f"num_key_value_heads({call.kv_heads}) with rope and D = 512 must be 1"
    demand(call.kv_heads == 1, "fia.latent-kv-heads", message)
    demand(dim == LATENT_DIM, "fia.latent-head-dim", f"D({dim}) of a query with rope must be 512")
    fits = rotated_query.shape == (batch, heads, rows, ROPE_DIM)
    demand(fits, "fia.rope-shape", f"query_rope {list(rope.query.shape)}: as the query, with 64 dimensions")
    message = f"Q_S({rows}) with rope and D = 512 must be 1 to {MOST_ROWS}"
    demand(1 <= rows <= MOST_ROWS, "fia.latent-rows", message)
    pages, parts, room = _cells(call, rope, layout, batch)
    key_lengths = _lengths(call, batch, room)
    mask = _mask(call, batch, rows, key_lengths)
    out, lse = torch.empty_like(query), torch.empty(batch, heads, rows, 1)
    joined_query = torch.cat([query, rotated_query], -1)
    for lane, length in enumerate(key_lengths):
        if not length:
            out[lane] = 0.0
            lse[lane] = float("inf")
            continue
        table = None if call.block_table is None else call.block_table[lane]
        key, value = _columns(pages, lane, table, length)
        part, _ = _columns(parts, lane, table, length)
        hidden = mode_mask(call.sparse_mode, rows, length, 0, 0, False) if call.sparse_mode == 3 else None
        if mask is not None:
            # Every row sees all keys before the last Q_S.
            hidden = torch.nn.functional.pad(mask[lane], (length - rows, 0))
        joined_key = torch.cat([key, part], -1)
        lane_out, lane_lse = attend(
            joined_query[lane], joined_key, value, hidden, call.scale, call.inner_precise, "fia"
        )
        out[lane] = lane_out
        lse[lane, ..., 0] = lane_lse
    return from_bnsd(out, output_layout), lse


Pair = tuple[Tensor, Tensor]
"""Keys and values [B, 1, C, D], gathered."""


def _refuse_unknown(call: Call) -> None:
    """Refuse what the operator takes beside rotated parts and the emulation does not compute."""
    demand(call.input_layout in LAYOUTS, "fia.layout", f"Layout {call.input_layout} is not supported!")
    if call.input_layout in ("TND", "BNSD_BSND", "BSH_BNSD", "BSND_BNSD") or call.actual_seq_lengths is not None:
        raise NotEmulated(f"query_rope in layout {call.input_layout}, or with actual_seq_qlen")
    mode = call.sparse_mode
    demand(mode in MODES, "fia.latent-sparse-mode", f"sparse_mode {mode} with rope is none of {MODES}")
    masked = mode == 0 and call.atten_mask is not None
    if mode == 4 or masked or call.inner_precise not in (0, 1):
        raise NotEmulated(f"query_rope in sparse_mode {mode} with its mask, or inner_precise {call.inner_precise}")


def _check_dtypes(call: Call, rope: Rope, rank: int) -> None:
    """The rules of dtypes, ranks and memory."""
    query, key, value = call.query, call.key, call.value
    message = f"Layout {call.input_layout}, queryDims({query.dim()}) must be {rank}!"
    demand(query.dim() == rope.query.dim() == rank, "fia.layout", message)
    half = (torch.float16, torch.bfloat16)
    demand(query.dtype in half, "fia.dtype", f"query dtype {query.dtype} is not float16 or bfloat16")
    same_dtype = key.dtype == value.dtype == query.dtype
    demand(same_dtype, "fia.kv-dtype", f"key {key.dtype} and value {value.dtype} with a query of {query.dtype}")
    same_dtype = rope.query.dtype == query.dtype and rope.key.dtype == key.dtype
    demand(same_dtype, "fia.rope-dtype", f"query_rope {rope.query.dtype} and key_rope {rope.key.dtype}")
    for tensor in (query, key, value, rope.query, rope.key, call.atten_mask):
        demand(tensor is None or tensor.is_contiguous(), "fia.contiguous", "a tensor is not contiguous")


def _cells(call: Call, rope: Rope, layout: str, batch: int) -> tuple[Cache | Pair, Cache | Pair, int]:
    """Latent vectors and rotated parts, each as a cache of pages or gathered, and the room of a request."""
    parts = f"key_rope {list(rope.key.shape)} beside a key {list(call.key.shape)}: 64 dimensions, and else its axes"
    if call.block_table is not None:
        message = "actual seq length kv can't be null when blockTable is not null"
        demand(call.actual_seq_lengths_kv is not None, "fia.table-lengths", message)
        check_ids(call.block_table, batch)
        size = call.block_size
        message = f"blockSize={size} with rope and D = 512: a multiple of 16, at most {LARGEST_BLOCK}"
        demand(0 < size <= LARGEST_BLOCK and size % 16 == 0, "fia.latent-block-size", message)
        pages = cache_of(call.key, call.value, 1, LATENT_DIM, size, layout)
        demand(rope.key.shape == (*call.key.shape[:-1], ROPE_DIM), "fia.rope-shape", parts)
        return pages, cache_of(rope.key, rope.key, 1, ROPE_DIM, size, layout), call.block_table.shape[1] * size
    message = f"without Page Attention value'dim{call.value.dim()} should equal query's dim{call.query.dim()}!"
    demand(call.value.dim() == call.query.dim() and call.key.shape == call.value.shape, "fia.rank", message)
    demand(rope.key.shape == (*call.key.shape[:-1], ROPE_DIM), "fia.rope-shape", parts)
    key, value, part = (to_bnsd(tensor, layout, 1) for tensor in (call.key, call.value, rope.key))
    fits = key.shape[0] == batch and key.shape[3] == LATENT_DIM
    demand(fits, "fia.latent-head-dim", f"key {list(call.key.shape)} with rope: B of the query, D = 512")
    demand(key.shape[1] == 1, "fia.latent-kv-heads", f"key N({key.shape[1]}) with rope and D = 512 must be 1")
    return (key, value), (part, part), key.shape[2]


def _columns(cells: Cache | Pair, request: int, table: Tensor | None, length: int) -> Pair:
    """Keys and values [1, length, D] of one request."""
    if isinstance(cells, Cache):
        assert table is not None
        return cells.columns(table, length)
    key, value = cells
    return key[request, :, :length], value[request, :, :length]


def _lengths(call: Call, batch: int, room: int) -> list[int]:
    """The number of keys of each request."""
    entries = call.actual_seq_lengths_kv
    if entries is None:
        return [room] * batch
    message = f"actualSeqLengthsKv has {len(entries)} entries for {batch} requests"
    demand(len(entries) == 1 or len(entries) >= batch, "fia.lengths-count", message)
    key_lengths = ([int(entry) for entry in entries] * (batch if len(entries) == 1 else 1))[:batch]
    message = f"actualSeqLengthsKv {key_lengths} not in 0..{room}"
    demand(all(0 <= length <= room for length in key_lengths), "fia.lengths-range", message)
    return key_lengths


def _mask(call: Call, batch: int, rows: int, key_lengths: list[int]) -> Tensor | None:
    """The mask of a tree as bool [B, S, S], True = masked; None in other modes."""
    mask = call.atten_mask
    if call.sparse_mode == 3:
        check_compressed(mask, 3, "fia")
    if call.sparse_mode != TREE:
        return None
    message = f"attenMask must be (B = {batch}, Q_S = {rows}, Q_S = {rows}) when sparse mode = 9"
    demand(mask is not None and tuple(mask.shape) == (batch, rows, rows), "fia.tree-mask", message)
    assert mask is not None
    flags = (torch.bool, torch.int8, torch.uint8)
    demand(mask.dtype in flags, "fia.mask-dtype", f"invalid maskType dtype[{mask.dtype}]")
    is_binary = mask.dtype == torch.bool or bool((mask == (mask != 0)).all())
    demand_defined(is_binary, "fia.mask-values", "the mask holds numbers other than 0 and 1")
    demand(
        all(rows <= length for length in key_lengths),
        "fia.tree-length",
        f"Q_S({rows}) exceeds a key length of {key_lengths}",
    )
    return mask.bool()
