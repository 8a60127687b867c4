"""For each rule of attention over latent rows, a right call and a wrong one."""

from typing import Any

import torch

from specverify.backends.ascend.probe.calls import SIZE, Arguments, B, C, Example, N, T, integers, numbers

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
