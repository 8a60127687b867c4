"""Compact visibility straight from the words of trees, without a dense mask.

The words of each request's rows become the compact form of the whole batch, in the layer's own columns.
"""

from dataclasses import dataclass

import torch

from specverify.backends.engine.attention.compact import Compact
from specverify.backends.engine.columns import WORD, RowWords


@dataclass(frozen=True)
class Lane:
    """One request's rows in a forward of T rows.

    Attributes:
        words: The columns that its rows see.
        dropped: Columns at the beginning of its prefix that the layer no longer holds.
        width: Columns of its cache in this layer, without the columns of rows that pad the batch.
        spare: Rows that pad the batch.
        alone: Whether a padding row has a column of its own behind the cache's, which it sees.
    """

    words: RowWords
    dropped: int
    width: int
    spare: int
    alone: bool

    @property
    def prefix(self) -> int:
        """Columns of the prefix that the layer holds."""
        return self.words.committed - self.dropped

    @property
    def block(self) -> int:
        """Columns of the block, up to the last one that a row sees."""
        if self.spare and self.alone:
            return self.width - self.prefix + self.spare
        return len(self.words.first)

    @property
    def partly(self) -> bool:
        """Whether some row does not see all of the prefix."""
        return self.prefix > 0 and (self.spare > 0 or self.words.padded or self.words.earliest > self.dropped)


def pack_lanes(lanes: list[Lane], device: torch.device) -> Compact:
    """The compact form of the masks of all lanes, with the numbers that `compact.pack` finds in dense masks."""
    rows = max(len(lane.words.first) + lane.spare for lane in lanes)
    words = max(1, *(-(-lane.block // WORD) for lane in lanes))
    first, bits = [], []
    for lane in lanes:
        num_rows = len(lane.words.first)
        begin = (lane.words.first - lane.dropped).clamp(min=0)
        first.append(torch.nn.functional.pad(begin, (0, rows - num_rows), value=lane.prefix))
        lane_bits = torch.nn.functional.pad(lane.words.bits, (0, words - lane.words.bits.shape[1], 0, rows - num_rows))
        if lane.spare and lane.alone:
            place = lane.width - lane.prefix + torch.arange(rows - num_rows, device=device)
            mark = torch.arange(words, device=device) == (place // WORD)[:, None]
            # A shift by 31 of an int32 is the word whose sign alone is set.
            lane_bits[num_rows:] = torch.where(
                mark, (torch.ones_like(place, dtype=torch.int32) << place % WORD)[:, None], 0
            )
        bits.append(lane_bits)
    facts = [[lane.prefix, lane.block] for lane in lanes]
    counts = torch.tensor(facts, dtype=torch.int32).to(device, non_blocking=True)
    return Compact(
        torch.stack(first).int().contiguous(),
        counts[:, 0].contiguous(),
        counts[:, 1].contiguous(),
        torch.stack(bits).int().contiguous(),
        tuple((lane.prefix, lane.block, lane.partly) for lane in lanes),
    )
