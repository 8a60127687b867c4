"""Argument builders for the calls that satisfy or break a rule of the contract.

Tests of the emulation and the probe of a device use them.
"""

from collections.abc import Callable
from dataclasses import dataclass
from typing import Any

import torch
from torch import Tensor

Arguments = dict[str, Any]

B, N, KV, T, C, D, SIZE = 2, 4, 2, 3, 20, 32, 128
"""Batch, heads, KV heads, query rows, columns, head dimension and block size of the calls."""

VERSION_2_NAMES = {
    "num_heads": "num_query_heads",
    "scale": "softmax_scale",
    "actual_seq_lengths": "actual_seq_qlen",
    "actual_seq_lengths_kv": "actual_seq_kvlen",
    "softmax_lse_flag": "return_softmax_lse",
}
"""Arguments of version 1 that have other names in version 2 of fused-infer attention."""


@dataclass(frozen=True)
class Example:
    """The calls of one rule.

    Attributes:
        rule: The rule's id.
        right: Arguments of a call that satisfies the rule.
        wrong: Arguments of a call that breaks the rule and no rule that is checked before it.
        foreign: Whether the wrong call reads or writes memory that is not its own; it must never run on a device.
    """

    rule: str
    right: Callable[[], Arguments]
    wrong: Callable[[], Arguments]
    foreign: bool = False


def arguments(operator: str, named_values: Arguments) -> Arguments:
    """`named_values` under the argument names of `operator`; version 2 of fused-infer attention has its own names."""
    if operator == "npu_fused_infer_attention_score_v2":
        return {VERSION_2_NAMES.get(name, name): value for name, value in named_values.items()}
    return named_values


def numbers(*shape: int, dtype: torch.dtype = torch.float16) -> Tensor:
    """Normally distributed numbers, the same at each call."""
    return torch.randn(shape, generator=torch.Generator().manual_seed(sum(shape))).to(dtype)


def hidden(*shape: int, dtype: torch.dtype = torch.bool) -> Tensor:
    """A mask that hides the last column only."""
    mask = torch.zeros(shape, dtype=dtype)
    mask[..., -1] = True
    return mask


def integers(*values: Any, dtype: torch.dtype = torch.int32) -> Tensor:
    """An index tensor."""
    return torch.tensor(values, dtype=dtype)


def dense(**changes: Any) -> Arguments:
    """Arguments of fused-infer attention over gathered columns."""
    plain = {"query": numbers(B, N, T, D), "key": numbers(B, KV, C, D), "value": numbers(B, KV, C, D)}
    return {**plain, "num_heads": N, "num_key_value_heads": KV, "scale": 0.2, "input_layout": "BNSD", **changes}


def one_row(**changes: Any) -> Arguments:
    """Arguments of fused-infer attention with one query row, which goes to another kernel."""
    return dense(query=numbers(B, N, 1, D), **changes)


def paged_arguments(**changes: Any) -> Arguments:
    """Arguments of fused-infer attention over pages."""
    table = integers([1, 3], [2, 0])
    cells = numbers(4, SIZE, KV * D)
    page_arguments = {"block_table": table, "block_size": SIZE, "actual_seq_lengths_kv": [C, SIZE + 1]}
    return dense(**{"key": cells, "value": cells, **page_arguments, **changes})


def ragged_arguments(**changes: Any) -> Arguments:
    """Arguments of fused-infer attention in layout TND, with requests one after another."""
    plain = {"query": numbers(T, N, 64), "key": numbers(C, KV, 64), "value": numbers(C, KV, 64), "input_layout": "TND"}
    return dense(**{**plain, "actual_seq_lengths": [1, T], "actual_seq_lengths_kv": [5, C], **changes})


def fusion(**changes: Any) -> Arguments:
    """Arguments of npu_fusion_attention."""
    wide = torch.float32
    plain = {name: numbers(B, KV, C, D, dtype=wide) for name in ("key", "value")}
    return {"query": numbers(B, N, T, D, dtype=wide), **plain, "head_num": N, "input_layout": "BNSD", **changes}


def nd(**changes: Any) -> Arguments:
    """Arguments of npu_scatter_nd_update_."""
    return {"input": numbers(8, 4), "indices": integers([1], [5]), "updates": numbers(2, 4), **changes}


def plain_cache(**changes: Any) -> Arguments:
    """Arguments of npu_scatter_pa_kv_cache for plain caches."""
    plain = {
        "key": numbers(3, KV, D),
        "value": numbers(3, KV, D),
        "cache_mode": "Norm",
        "slot_mapping": integers(5, 0, 9),
    }
    return {**plain, "key_cache": numbers(2, 16, KV, D), "value_cache": numbers(2, 16, KV, D), **changes}


def update(**changes: Any) -> Arguments:
    """Arguments of scatter_update_."""
    data = {"input": numbers(2, KV, 8, 4), "updates": numbers(2, KV, 2, 4)}
    return {**data, "indices": integers(0, 6), "axis": -2, **changes}


def reshape(**changes: Any) -> Arguments:
    """Arguments of _npu_reshape_and_cache."""
    plain = {"key": numbers(3, KV, D), "value": numbers(3, KV, D), "slot_indices": integers(5, 0, 9)}
    return {**plain, "key_cache": numbers(2, 16, KV, D), "value_cache": numbers(2, 16, KV, D), **changes}


def rotary(**changes: Any) -> Arguments:
    """Arguments of npu_rotary_mul."""
    return {"input": numbers(B, N, T, D), "r1": numbers(1, 1, T, D), "r2": numbers(1, 1, T, D), **changes}


def both_rotary(**changes: Any) -> Arguments:
    """Arguments of npu_apply_rotary_pos_emb."""
    tables = {"cos": numbers(B, T, 1, 64), "sin": numbers(B, T, 1, 64)}
    return {"query": numbers(B, T, N, 64), "key": numbers(B, T, KV, 64), **tables, **changes}


def norm(**changes: Any) -> Arguments:
    """Arguments of npu_rms_norm."""
    return {"input": numbers(T, 16), "gamma": numbers(16), **changes}


def added_norm(**changes: Any) -> Arguments:
    """Arguments of npu_add_rms_norm."""
    return {"x1": numbers(T, 16), "x2": numbers(T, 16), "gamma": numbers(16), **changes}


def additive(tokens: int = B * T, width: int = 2 * SIZE) -> Tensor:
    """A mask of splitfuse that hides the second column."""
    mask = torch.zeros(tokens, width, dtype=torch.float16)
    mask[:, 1] = float("-inf")
    return mask


def splitfuse_arguments(**changes: Any) -> Arguments:
    """Arguments of _npu_paged_attention_splitfuse."""
    cells = {"key_cache": numbers(4, SIZE, KV, D), "value_cache": numbers(4, SIZE, KV, D)}
    lists = {"block_table": integers([1, 3], [2, 0]), "context_lens": integers(C, SIZE + 1), "seq_len": integers(T, T)}
    heads = {"num_kv_heads": KV, "num_heads": N, "scale_value": 0.2}
    tokens = {"query": numbers(B * T, N, D), "mask": additive(), "out": torch.zeros(B * T, N, D, dtype=torch.float16)}
    return {**tokens, **cells, **lists, **heads, **changes}


def operator_of(namespaces: Any, name: str) -> Callable[..., Any]:
    """The operator called `name` in `namespaces`, which is `torch.ops` or an object in its place.

    Raises:
        AttributeError: where there is no such operator.
    """
    # ATB's operators alone have names that begin with an underscore.
    space = "atb" if name.startswith("_npu") else "npu"
    return getattr(getattr(namespaces, space), name)  # type: ignore[no-any-return]
