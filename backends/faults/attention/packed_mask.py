"""Faults of packed masks: ancestor bits and row starts, wrongly packed or read.

`backends/engine/attention/compact.py` packs each row's visible columns: the start of the visible prefix, and one bit
for each block column, in words of 32 bits.
"""

from collections.abc import Callable
from dataclasses import replace

import torch
from torch import Tensor

from specverify.backends.base import Unsupported
from specverify.backends.engine.attention.compact import Compact
from specverify.backends.engine.attention.split import Split
from specverify.backends.engine.attention.triton_launch import TritonTree
from specverify.backends.engine.columns import WORD, AttentionInputs
from specverify.backends.engine.seams import Seams
from specverify.backends.faults.fault import Fault
from specverify.reference.trace import Stage

SPLIT, TRITON = "cpu-split", "triton-interpreted"
"""The backends in which these faults are planted by default."""


def with_changed_mask(seams: Seams, wrong: Callable[[Compact], Compact]) -> Seams:
    """The seams with the packed mask changed by `wrong`, for the torch split or the Triton kernel."""
    attend = seams.attend
    if not isinstance(attend, Split | TritonTree):
        raise Unsupported(f"the fault lies in packed ancestor bits: plant it in {SPLIT} or {TRITON}")
    right = attend.compact

    def compact(query: Tensor, columns: AttentionInputs) -> Compact:
        return wrong(right(query, columns))

    return replace(seams, attend=replace(attend, compact=compact))


def words_read_as_first(seams: Seams) -> Seams:
    """Bits of columns from 32 on are read from word 0."""
    return with_changed_mask(
        seams, lambda packed: replace(packed, bits=packed.bits[..., :1].expand_as(packed.bits).contiguous())
    )


def sign_bit_lost(seams: Seams) -> Seams:
    """Bit 31 of each word, the sign of an int32, is lost."""
    return with_changed_mask(seams, lambda packed: replace(packed, bits=packed.bits & 0x7FFFFFFF))


def bits_of_row_before(seams: Seams) -> Seams:
    """A row reads the bits of the row before it."""

    def wrong(packed: Compact) -> Compact:
        return replace(packed, bits=torch.cat([packed.bits[:, :1], packed.bits[:, :-1]], 1))

    return with_changed_mask(seams, wrong)


def bits_of_first_lane(seams: Seams) -> Seams:
    """The lane's offset is missing, so every lane reads the rows of lane 0."""
    return with_changed_mask(
        seams, lambda packed: replace(packed, bits=packed.bits[:1].expand_as(packed.bits).contiguous())
    )


def bit_offset_wraps(seams: Seams) -> Seams:
    """The offset of a row's words is stored in too few bits, here four, and wraps."""

    def wrong(packed: Compact) -> Compact:
        flat = packed.bits.reshape(-1, packed.bits.shape[-1])
        return replace(packed, bits=flat[torch.arange(len(flat)) % 16].reshape(packed.bits.shape))

    return with_changed_mask(seams, wrong)


def bits_inverted(seams: Seams) -> Seams:
    """The packing writes a set bit for a hidden column, and the kernel reads it as visible."""
    return with_changed_mask(seams, lambda packed: replace(packed, bits=~packed.bits))


def earlier_tiles_unmasked(seams: Seams) -> Seams:
    """Tiles of four columns before the row's own tile are taken as visible, as under a causal mask."""

    def wrong(packed: Compact) -> Compact:
        rows = packed.bits.shape[1]
        bits = packed.bits.clone()
        for row in range(rows):
            for word in range(bits.shape[2]):
                before = min(max(row // 4 * 4 - word * WORD, 0), WORD)
                # -1 sets all 32 bits; 1 << 32 would not fit an int32.
                bits[:, row, word] |= -1 if before == WORD else (1 << before) - 1
        return replace(packed, bits=bits)

    return with_changed_mask(seams, wrong)


def window_of_last_row(seams: Seams) -> Seams:
    """The window's start is that of the row that begins latest, for the whole block."""

    def wrong(packed: Compact) -> Compact:
        first = packed.first.amax(1, keepdim=True)
        return replace(packed, first=first.expand_as(packed.first).contiguous())

    return with_changed_mask(seams, wrong)


def prefix_of_first_lane(seams: Seams) -> Seams:
    """Every lane's prefix is cut to the length of lane 0's, and its block begins there."""

    def wrong(packed: Compact) -> Compact:
        # A lane's entry is (prefix length, block width, whether some row sees the prefix in part).
        length = packed.lanes[0][0]
        lanes = tuple((min(length, prefix), width, partly) for prefix, width, partly in packed.lanes)
        prefix = packed.prefix.clamp(max=length)
        return replace(packed, prefix=prefix, first=packed.first.clamp(max=length), lanes=lanes)

    return with_changed_mask(seams, wrong)


def fault(
    name: str, sentence: str, source: str, trigger: str, plant: Callable[[Seams], Seams], on: str = SPLIT
) -> Fault:
    """A fault of stage attended, planted in the backend `on`."""
    return Fault(name, Stage.ATTENDED, sentence, source, trigger, plant, on=on)


FAULTS = (
    fault(
        "ancestor-words-read-as-first",
        "Ancestor bits of columns from 32 on are read from the first word.",
        "word boundary of packed masks, as xgrammar's and FlashInfer's are packed",
        "a block of more than 32 columns",
        words_read_as_first,
        TRITON,
    ),
    fault(
        "ancestor-sign-bit-lost",
        "The last bit of each word of ancestor bits is lost with its sign.",
        "word boundary of packed masks in int32",
        "a block of 32 columns or more",
        sign_bit_lost,
    ),
    fault(
        "ancestor-bits-of-row-before",
        "A row of the block sees what the row before it should.",
        "row offset of packed masks",
        "two nodes",
        bits_of_row_before,
        TRITON,
    ),
    fault(
        "ancestor-bits-of-first-lane",
        "The rows of every lane see what those of lane 0 should: the lane's offset is missing.",
        "row offset of packed masks in a batch",
        "a batch of unequal trees",
        bits_of_first_lane,
    ),
    fault(
        "ancestor-offset-wraps",
        "The offset of a row's ancestor bits overflows, here after 16 rows.",
        "catalogue BZ-092: mask offset beyond the largest integer of its type",
        "a block of more than 16 rows",
        bit_offset_wraps,
    ),
    fault(
        "ancestor-bits-inverted",
        "Ancestor bits mean hidden to who packs and visible to who reads.",
        "mask polarity differs between operators",
        "any block",
        bits_inverted,
    ),
    fault(
        "earlier-tiles-unmasked",
        "Tiles of the block that lie before the row's own are not masked.",
        "catalogue BZ-145: mask check skipped in tiles below the causal diagonal",
        "a block of more than four rows with two branches",
        earlier_tiles_unmasked,
        TRITON,
    ),
    fault(
        "window-start-of-last-row",
        "The window of the row that reaches back least holds for the whole block.",
        "catalogue BZ-095: sliding-window start computed from the last draft token",
        "a window, and nodes of different depths",
        window_of_last_row,
    ),
    fault(
        "prefix-of-first-lane",
        "Each lane's prefix ends where lane 0's does, if that is earlier.",
        "scalar length used for a batch",
        "a batch of unequal lengths",
        prefix_of_first_lane,
    ),
)
