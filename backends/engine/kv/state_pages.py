"""The hidden states that pages carry for a draft that reads them, one for each column.

They stand in pages of the same allocator as keys and values, so that whatever happens to a page (copy on write, a hit
of the prefix cache, the second tier, an eviction) happens to the states of its columns too.
"""

import torch
from torch import Tensor

from specverify.backends.engine.kv.paged import Cells, slots_of
from specverify.backends.engine.kv.pages import Blocks


class StatePool(Cells):
    """The pages of hidden states, [pages, size, width]."""

    def __init__(self, width: int, pages: int, size: int, dtype: torch.dtype, device: torch.device) -> None:
        self.layers = [(torch.zeros((pages, size, width), dtype=dtype, device=device),)]


class StatePages:
    """The hidden states of one request in `pool`, found through the block table `blocks`."""

    def __init__(self, pool: StatePool, blocks: Blocks) -> None:
        self.pool = pool
        self.blocks = blocks
        blocks.copy.append(pool.copy)

    def write(self, begin: int, states: Tensor) -> None:
        """Write the states [rows, width] of the columns from `begin` on."""
        cells = self.cells
        cells[slots_of(self.blocks, begin, begin + len(states), cells.device)] = states

    def read(self, end: int) -> Tensor:
        """A copy of the states of the first `end` columns, [end, width]."""
        cells = self.cells
        return cells[slots_of(self.blocks, 0, end, cells.device)]

    @property
    def cells(self) -> Tensor:
        """The states of all slots, [pages * size, width]."""
        return self.pool.layers[0][0].flatten(0, 1)
