"""The arguments of one call of npu_fused_infer_attention_score.

Both versions of the operator fill this record.
"""

from collections.abc import Sequence
from dataclasses import dataclass

from torch import Tensor


@dataclass(frozen=True)
class Call:
    """The arguments of one call that the emulation computes, by the names of version 1; see the operator's schema."""

    query: Tensor
    key: Tensor
    value: Tensor
    atten_mask: Tensor | None
    actual_seq_lengths: Sequence[int] | None
    actual_seq_lengths_kv: Sequence[int] | None
    block_table: Tensor | None
    num_heads: int
    scale: float
    pre_tokens: int
    next_tokens: int
    input_layout: str
    num_key_value_heads: int
    sparse_mode: int
    inner_precise: int
    block_size: int
    softmax_lse_flag: bool

    @property
    def kv_heads(self) -> int:
        """The number of KV heads; 0 in the call means as many as query heads."""
        return self.num_key_value_heads or self.num_heads
