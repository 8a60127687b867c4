"""Faults of packed masks: ancestor bits and row starts, wrongly packed or read.

`backends/engine/attention/compact.py` packs each row's visible columns: the start of the visible prefix, and one bit
for each block column, in words of 32 bits.
"""

from dataclasses import replace
from functools import partial

import torch

from specverify.backends.engine.attention.compact import Compact
from specverify.backends.engine.attention.split import Split
from specverify.backends.engine.attention.triton_launch import TritonTree
from specverify.backends.engine.columns import WORD
from specverify.backends.faults.fault import attended_fault, on_result_of

SPLIT, TRITON = "cpu-split", "triton-interpreted"
"""The backends in which these faults are planted by default."""

on_packed_mask = on_result_of(
    "attend.compact", Split | TritonTree, f"the fault lies in packed ancestor bits: plant it in {SPLIT} or {TRITON}"
)
"""A decorator for a function that changes the packed mask, in the torch split or in the Triton kernel."""

attention_fault = partial(attended_fault, on=SPLIT)


@attention_fault(
    "ancestor-words-read-as-first",
    "word boundary of packed masks, as xgrammar's and FlashInfer's are packed",
    "a block of more than 32 columns",
    on=TRITON,
)
@on_packed_mask
def words_read_as_first(packed: Compact) -> Compact:
    """Ancestor bits of columns from 32 on are read from the first word."""
    return replace(packed, bits=packed.bits[..., :1].expand_as(packed.bits).contiguous())


@attention_fault("ancestor-sign-bit-lost", "word boundary of packed masks in int32", "a block of 32 columns or more")
@on_packed_mask
def sign_bit_lost(packed: Compact) -> Compact:
    """The last bit of each word of ancestor bits is lost with its sign."""
    return replace(packed, bits=packed.bits & 0x7FFFFFFF)


@attention_fault("ancestor-bits-of-row-before", "row offset of packed masks", "two nodes", on=TRITON)
@on_packed_mask
def bits_of_row_before(packed: Compact) -> Compact:
    """A row of the block sees what the row before it should."""
    return replace(packed, bits=torch.cat([packed.bits[:, :1], packed.bits[:, :-1]], 1))


@attention_fault("ancestor-bits-of-first-lane", "row offset of packed masks in a batch", "a batch of unequal trees")
@on_packed_mask
def bits_of_first_lane(packed: Compact) -> Compact:
    """The rows of every lane see what those of lane 0 should: the lane's offset is missing."""
    return replace(packed, bits=packed.bits[:1].expand_as(packed.bits).contiguous())


@attention_fault(
    "ancestor-offset-wraps",
    "catalogue BZ-092: mask offset beyond the largest integer of its type",
    "a block of more than 16 rows",
)
@on_packed_mask
def bit_offset_wraps(packed: Compact) -> Compact:
    """The offset of a row's ancestor bits overflows, here after 16 rows."""
    flat = packed.bits.reshape(-1, packed.bits.shape[-1])
    return replace(packed, bits=flat[torch.arange(len(flat)) % 16].reshape(packed.bits.shape))


@attention_fault("ancestor-bits-inverted", "mask polarity differs between operators", "any block")
@on_packed_mask
def bits_inverted(packed: Compact) -> Compact:
    """Ancestor bits mean hidden to who packs and visible to who reads."""
    return replace(packed, bits=~packed.bits)


@attention_fault(
    "earlier-tiles-unmasked",
    "catalogue BZ-145: mask check skipped in tiles below the causal diagonal",
    "a block of more than four rows with two branches",
    on=TRITON,
)
@on_packed_mask
def earlier_tiles_unmasked(packed: Compact) -> Compact:
    """Tiles of the block that lie before the row's own are not masked."""
    rows = packed.bits.shape[1]
    bits = packed.bits.clone()
    for row in range(rows):
        for word in range(bits.shape[2]):
            before = min(max(row // 4 * 4 - word * WORD, 0), WORD)
            # -1 sets all 32 bits; 1 << 32 would not fit an int32.
            bits[:, row, word] |= -1 if before == WORD else (1 << before) - 1
    return replace(packed, bits=bits)


@attention_fault(
    "window-start-of-last-row",
    "catalogue BZ-095: sliding-window start computed from the last draft token",
    "a window, and nodes of different depths",
)
@on_packed_mask
def window_of_last_row(packed: Compact) -> Compact:
    """The window of the row that reaches back least holds for the whole block."""
    first = packed.first.amax(1, keepdim=True)
    return replace(packed, first=first.expand_as(packed.first).contiguous())


@attention_fault("prefix-of-first-lane", "scalar length used for a batch", "a batch of unequal lengths")
@on_packed_mask
def prefix_of_first_lane(packed: Compact) -> Compact:
    """Each lane's prefix ends where lane 0's does, if that is earlier."""
    # A lane's entry is (prefix length, block width, whether some row sees the prefix in part).
    length = packed.lanes[0][0]
    lanes = tuple((min(length, prefix), width, partly) for prefix, width, partly in packed.lanes)
    prefix = packed.prefix.clamp(max=length)
    return replace(packed, prefix=prefix, first=packed.first.clamp(max=length), lanes=lanes)
