"""For each rule of the contract, a call that keeps and a call that breaks it."""

from typing import Any

import torch
from torch import Tensor

from specverify.backends.ascend.encodings import compressed_mask
from specverify.backends.ascend.probe.calls import (
    KV,
    SIZE,
    Arguments,
    B,
    C,
    D,
    Example,
    N,
    T,
    added_norm,
    additive,
    both_rotary,
    dense,
    fusion,
    hidden,
    integers,
    nd,
    norm,
    numbers,
    one_row,
    paged_arguments,
    plain_cache,
    ragged_arguments,
    reshape,
    rotary,
    splitfuse_arguments,
    update,
)

LATENT, ROPE = 512, 64
"""The widths of latent vectors and rotated parts."""


def latent(heads: int = N, rows: int = T, kv_heads: int = 1, wide: int = LATENT, **changes: Any) -> Arguments:
    """Arguments of fused-infer attention, version 2, over latent rows under the mask of a chain."""
    key = numbers(B, kv_heads, C, wide)
    rope = {"query_rope": numbers(B, heads, rows, ROPE), "key_rope": numbers(B, kv_heads, C, ROPE)}
    mask = torch.triu(torch.ones(B, rows, rows, dtype=torch.bool), 1)
    options = {"num_heads": heads, "num_key_value_heads": 1, "scale": 0.05, "input_layout": "BNSD", "sparse_mode": 9}
    return {
        "query": numbers(B, heads, rows, wide),
        "key": key,
        "value": key,
        "atten_mask": mask,
        **rope,
        **options,
        **changes,
    }


def latent_pages(size: int = SIZE, **changes: Any) -> Arguments:
    """The same over pages of `size` columns."""
    key, rope = numbers(4, size, LATENT), numbers(4, size, ROPE)
    table = {"block_table": integers([1, 3], [2, 0]), "block_size": size, "actual_seq_lengths_kv": [C, size + 1]}
    return latent(**{"key": key, "value": key, "key_rope": rope, **table, **changes})


LATENT_EXAMPLES: tuple[Example, ...] = (
    Example("fia.rope-pair", latent, lambda: latent(key_rope=None)),
    Example("fia.latent-sparse-mode", latent, lambda: latent(sparse_mode=1)),
    Example("fia.rope-dtype", latent, lambda: latent(key_rope=numbers(B, 1, C, ROPE).bfloat16())),
    Example("fia.latent-heads", lambda: latent(heads=8), lambda: latent(heads=3)),
    Example("fia.latent-kv-heads", latent, lambda: latent(kv_heads=2)),
    Example("fia.latent-head-dim", latent, lambda: latent(wide=256)),
    Example("fia.rope-shape", latent, lambda: latent(key_rope=numbers(B, 1, C, 32))),
    Example("fia.latent-rows", lambda: latent(rows=16), lambda: latent(rows=17)),
    Example("fia.latent-block-size", lambda: latent_pages(32), lambda: latent_pages(24)),
    Example("fia.tree-mask", latent, lambda: latent(atten_mask=torch.zeros(B, T, C, dtype=torch.bool))),
    Example("fia.tree-length", latent, lambda: latent(actual_seq_lengths_kv=[C, T - 1])),
)


def _narrow(dim: int) -> Arguments:
    """Query, key and value with head dimension `dim`."""
    return {"query": numbers(B, N, T, dim), "key": numbers(B, KV, C, dim), "value": numbers(B, KV, C, dim)}


def _tree_in_compressed() -> Tensor:
    """The compressed causal mask with one tree bit in it, which the kernel cannot read."""
    mask = compressed_mask(torch.device("cpu"))
    mask[5, 3] = True
    return mask


def _blind(*shape: int) -> Tensor:
    """A mask under which row 1 sees no key."""
    mask = hidden(*shape)
    mask[..., 1, :] = True
    return mask


CAUSAL = {"sparse_mode": 3}
"""Sparse mode 3, causal to the bottom right."""

EXAMPLES: tuple[Example, ...] = (
    Example("fia.layout", dense, lambda: dense(input_layout="BSH")),
    Example("fia.dtype", dense, lambda: dense(query=numbers(B, N, T, D).float())),
    Example("fia.kv-dtype", dense, lambda: dense(key=numbers(B, KV, C, D).bfloat16())),
    Example("fia.contiguous", dense, lambda: dense(key=numbers(B, C, KV, D).transpose(1, 2))),
    Example("fia.rank", dense, lambda: dense(value=numbers(B, KV, C - 1, D))),
    Example("fia.heads", dense, lambda: dense(num_heads=2 * N)),
    # 0 means as many KV heads as query heads, which the key of `dense` does not have.
    Example("fia.gqa", dense, lambda: dense(num_key_value_heads=0)),
    Example("fia.head-dim-16", lambda: dense(**_narrow(48)), lambda: dense(**_narrow(24))),
    Example("fia.head-dim-512", lambda: dense(**_narrow(512)), lambda: dense(**_narrow(528))),
    Example(
        "fia.mask-dtype",
        lambda: dense(atten_mask=hidden(T, C)),
        lambda: dense(atten_mask=hidden(T, C).to(torch.float16)),
    ),
    Example(
        "fia.mask-values",
        lambda: dense(atten_mask=hidden(T, C, dtype=torch.int8)),
        lambda: dense(atten_mask=2 * hidden(T, C, dtype=torch.int8)),
    ),
    Example("fia.mask-dim", lambda: dense(atten_mask=hidden(B, T, C)), lambda: dense(atten_mask=hidden(1, B, 1, T, C))),
    Example(
        "fia.mask-shape",
        lambda: dense(atten_mask=hidden(B, 1, T, C)),
        lambda: dense(atten_mask=hidden(B, 1, T, C - 1)),
    ),
    Example(
        "fia.mask-heads",
        lambda: dense(atten_mask=hidden(B, 1, T, C)),
        lambda: dense(atten_mask=hidden(B, N, T, C)),
    ),
    Example(
        "fia.one-row-mask-batch",
        lambda: one_row(atten_mask=hidden(B, 1, 1, C)),
        lambda: one_row(atten_mask=hidden(1, 1, 1, C)),
    ),
    Example(
        "fia.one-row-mask-length",
        lambda: one_row(atten_mask=hidden(B, 1, 1, C)),
        lambda: one_row(atten_mask=hidden(B, 1, 1, C - 1)),
    ),
    Example(
        "fia.one-row-mask-512",
        lambda: one_row(atten_mask=hidden(B, 1, 1, 512)),
        lambda: one_row(atten_mask=hidden(B, 1, 1, 513)),
    ),
    Example("fia.sparse-mode", dense, lambda: dense(sparse_mode=9, atten_mask=hidden(T, C))),
    Example("fia.mask-required", lambda: dense(sparse_mode=1, atten_mask=hidden(T, C)), lambda: dense(sparse_mode=1)),
    Example(
        "fia.mask-2048",
        lambda: dense(**CAUSAL, atten_mask=compressed_mask(torch.device("cpu"))),
        lambda: dense(**CAUSAL, atten_mask=hidden(T, C)),
    ),
    Example(
        "fia.mask-2048-content",
        lambda: dense(**CAUSAL, atten_mask=compressed_mask(torch.device("cpu"))),
        lambda: dense(**CAUSAL, atten_mask=_tree_in_compressed()),
    ),
    Example("fia.inner-precise", lambda: dense(inner_precise=2), lambda: one_row(inner_precise=2)),
    Example(
        "fia.row-fully-masked",
        lambda: dense(atten_mask=_blind(T, C), inner_precise=2),
        lambda: dense(atten_mask=_blind(T, C)),
    ),
    Example(
        "fia.lengths-count",
        lambda: dense(actual_seq_lengths_kv=[C]),
        lambda: dense(
            query=numbers(3, N, T, D),
            key=numbers(3, KV, C, D),
            value=numbers(3, KV, C, D),
            actual_seq_lengths_kv=[C, C],
        ),
    ),
    Example(
        "fia.lengths-range",
        lambda: dense(actual_seq_lengths_kv=[C, C]),
        lambda: dense(actual_seq_lengths_kv=[C, C + 1]),
    ),
    Example(
        "fia.table-int32",
        paged_arguments,
        lambda: paged_arguments(block_table=integers([1, 3], [2, 0], dtype=torch.int64)),
    ),
    Example("fia.table-shape", paged_arguments, lambda: paged_arguments(block_table=integers([1, 3]))),
    Example("fia.table-lengths", paged_arguments, lambda: paged_arguments(actual_seq_lengths_kv=None)),
    Example(
        "fia.block-size",
        paged_arguments,
        lambda: paged_arguments(
            key=numbers(4, 16, KV * D), value=numbers(4, 16, KV * D), block_size=16, actual_seq_lengths_kv=[C, 17]
        ),
    ),
    Example(
        "fia.block-size-one-row",
        lambda: paged_arguments(
            query=numbers(B, N, 1, D),
            key=numbers(4, 16, KV * D),
            value=numbers(4, 16, KV * D),
            block_size=16,
            actual_seq_lengths_kv=[C, 17],
        ),
        lambda: paged_arguments(
            query=numbers(B, N, 1, D),
            key=numbers(4, 8, KV * D),
            value=numbers(4, 8, KV * D),
            block_size=8,
            actual_seq_lengths_kv=[9, 9],
        ),
    ),
    Example(
        "fia.cache-shape",
        paged_arguments,
        lambda: paged_arguments(key=numbers(4, SIZE, KV, D), value=numbers(4, SIZE, KV, D)),
    ),
    Example(
        "fia.cache-width",
        paged_arguments,
        lambda: paged_arguments(
            query=numbers(B, 128, T, 512),
            num_heads=128,
            num_key_value_heads=128,
            key=numbers(1, SIZE, 128 * 512),
            value=numbers(1, SIZE, 128 * 512),
            block_table=integers([0], [0]),
            actual_seq_lengths_kv=[1, 1],
        ),
    ),
    # The cache has blocks 0 to 3.
    Example(
        "fia.block-id", paged_arguments, lambda: paged_arguments(block_table=integers([1, 3], [2, 4])), foreign=True
    ),
    Example("fia.tnd-lengths", ragged_arguments, lambda: ragged_arguments(actual_seq_lengths=None)),
    Example("fia.tnd-cumulative", ragged_arguments, lambda: ragged_arguments(actual_seq_lengths=[1, T - 1])),
    Example(
        "fia.tnd-head-dim",
        ragged_arguments,
        lambda: ragged_arguments(query=numbers(T, N, 256), key=numbers(C, KV, 256), value=numbers(C, KV, 256)),
    ),
    Example("fia.tnd-sparse", ragged_arguments, lambda: ragged_arguments(sparse_mode=1, atten_mask=hidden(T, C))),
    Example("fia.tnd-mask", ragged_arguments, lambda: ragged_arguments(atten_mask=hidden(T, C))),
    Example(
        "fia.tnd-rows",
        lambda: ragged_arguments(**CAUSAL, atten_mask=compressed_mask(torch.device("cpu"))),
        lambda: ragged_arguments(
            **CAUSAL, atten_mask=compressed_mask(torch.device("cpu")), actual_seq_lengths_kv=[C - 1, C]
        ),
    ),
    *LATENT_EXAMPLES,
    Example("fa.layout", fusion, lambda: fusion(input_layout="NBSD")),
    Example("fa.dtype", fusion, lambda: fusion(value=numbers(B, KV, C, D).double())),
    Example("fa.heads", fusion, lambda: fusion(head_num=2 * N)),
    Example("fa.head-dim", fusion, lambda: fusion(key=numbers(B, KV, C, 2 * D).float())),
    Example(
        "fa.mask-dtype",
        lambda: fusion(atten_mask=hidden(T, C, dtype=torch.uint8)),
        lambda: fusion(atten_mask=hidden(T, C, dtype=torch.int8)),
    ),
    Example(
        "fa.mask-shape",
        lambda: fusion(atten_mask=hidden(B, N, T, C)),
        lambda: fusion(atten_mask=hidden(B, 1, T, C + 1)),
    ),
    Example("fa.mask-required", lambda: fusion(sparse_mode=1, atten_mask=hidden(T, C)), lambda: fusion(sparse_mode=1)),
    Example(
        "fa.mask-2048",
        lambda: fusion(**CAUSAL, atten_mask=compressed_mask(torch.device("cpu"))),
        lambda: fusion(**CAUSAL, atten_mask=hidden(T, C)),
    ),
    Example(
        "fa.mask-2048-content",
        lambda: fusion(**CAUSAL, atten_mask=compressed_mask(torch.device("cpu"))),
        lambda: fusion(**CAUSAL, atten_mask=_tree_in_compressed()),
    ),
    Example("fa.sparse-mode", fusion, lambda: fusion(sparse_mode=7, atten_mask=hidden(T, C))),
    Example("fa.row-fully-masked", lambda: fusion(atten_mask=hidden(T, C)), lambda: fusion(atten_mask=_blind(T, C))),
    Example("nd.indices", nd, lambda: nd(indices=integers(1, 5))),
    Example("nd.dtype", nd, lambda: nd(updates=numbers(2, 4).float())),
    Example("nd.shape", nd, lambda: nd(updates=numbers(3, 4))),
    Example("nd.range", nd, lambda: nd(indices=integers([1], [-1])), foreign=True),
    Example("nd.duplicate", nd, lambda: nd(indices=integers([1], [1]))),
    Example("pa.mode", plain_cache, lambda: plain_cache(cache_mode="PA_NZ")),
    Example("pa.shape", plain_cache, lambda: plain_cache(slot_mapping=integers(5, 0))),
    Example("pa.dtype", plain_cache, lambda: plain_cache(key_cache=numbers(2, 16, KV, D).float())),
    Example("pa.slot-dtype", plain_cache, lambda: plain_cache(slot_mapping=integers(5, 0, 9).to(torch.int16))),
    Example("pa.contiguous", plain_cache, lambda: plain_cache(key=numbers(KV, 3, D).transpose(0, 1))),
    Example("pa.slot-range", plain_cache, lambda: plain_cache(slot_mapping=integers(5, -1, 9)), foreign=True),
    Example("pa.slot-duplicate", plain_cache, lambda: plain_cache(slot_mapping=integers(5, 5, 9))),
    Example("su.dtype", update, lambda: update(updates=numbers(2, KV, 2, 4).float())),
    Example("su.rank", update, lambda: update(updates=numbers(2, KV, 2, 3))),
    Example("su.range", update, lambda: update(indices=integers(0, 7)), foreign=True),
    Example("rc.slot-int32", reshape, lambda: reshape(slot_indices=integers(5, 0, 9, dtype=torch.int64))),
    Example("rc.shape", reshape, lambda: reshape(key=numbers(3, KV * D))),
    Example("rc.dtype", reshape, lambda: reshape(key_cache=numbers(2, 16, KV, D).bfloat16())),
    Example("rc.slot-negative", reshape, lambda: reshape(slot_indices=integers(5, -1, 9))),
    Example("rc.slot-range", reshape, lambda: reshape(slot_indices=integers(5, 0, 32)), foreign=True),
    Example("rc.slot-duplicate", reshape, lambda: reshape(slot_indices=integers(5, 5, 9))),
    Example("rot.shape", rotary, lambda: rotary(r1=numbers(1, 1, 1, D), r2=numbers(1, 1, 1, D))),
    Example(
        "rot.head-dim",
        rotary,
        lambda: {"input": numbers(1, 1, 1, 896), "r1": numbers(1, 1, 1, 896), "r2": numbers(1, 1, 1, 896)},
    ),
    Example("rot.mode", lambda: rotary(rotary_mode="interleave"), lambda: rotary(rotary_mode="quarter")),
    Example(
        "arp.head-dim",
        both_rotary,
        lambda: both_rotary(
            query=numbers(B, T, N, 32), key=numbers(B, T, KV, 32), cos=numbers(B, T, 1, 32), sin=numbers(B, T, 1, 32)
        ),
    ),
    Example("arp.layout", both_rotary, lambda: both_rotary(layout="BNSD")),
    Example("arp.dtype", both_rotary, lambda: both_rotary(cos=numbers(B, T, 1, 64).float())),
    Example("arp.shape", both_rotary, lambda: both_rotary(cos=numbers(B, T, N, 64))),
    Example("rms.gamma", lambda: norm(gamma=numbers(16).float()), lambda: norm(gamma=numbers(8))),
    Example("add-rms.inputs", added_norm, lambda: added_norm(x2=numbers(1, 16))),
    Example("sf.dtype", splitfuse_arguments, lambda: splitfuse_arguments(query=numbers(B * T, N, D).float())),
    Example("sf.mask-dtype", splitfuse_arguments, lambda: splitfuse_arguments(mask=additive() < 0)),
    Example("sf.mask-shape", splitfuse_arguments, lambda: splitfuse_arguments(mask=additive(width=SIZE))),
    Example("sf.mask-values", splitfuse_arguments, lambda: splitfuse_arguments(mask=(additive() < 0).half())),
    Example(
        "sf.int32",
        splitfuse_arguments,
        lambda: splitfuse_arguments(block_table=integers([1, 3], [2, 0], dtype=torch.int64)),
    ),
    Example("sf.tokens", splitfuse_arguments, lambda: splitfuse_arguments(seq_len=integers(T, T + 1))),
    Example(
        "sf.block",
        splitfuse_arguments,
        lambda: splitfuse_arguments(key_cache=numbers(4, 24, KV, D), value_cache=numbers(4, 24, KV, D)),
    ),
    Example("sf.heads", splitfuse_arguments, lambda: splitfuse_arguments(num_kv_heads=N)),
    Example(
        "sf.block-id",
        splitfuse_arguments,
        lambda: splitfuse_arguments(block_table=integers([1, 3], [2, 4])),
        foreign=True,
    ),
    Example(
        "sf.row-fully-masked",
        splitfuse_arguments,
        lambda: splitfuse_arguments(mask=torch.full((B * T, 2 * SIZE), float("-inf"), dtype=torch.float16)),
    ),
)
"""An example for each rule, in the order of the rules."""
