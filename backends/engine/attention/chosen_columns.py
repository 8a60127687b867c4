"""The tap that takes the columns chosen by an indexer out of a model's forwards.

Every layer that attends to chosen columns reaches attention with a mask that shows each row these columns alone.
"""

from collections.abc import Iterator
from contextlib import contextmanager
from contextvars import ContextVar

from torch import Tensor

ChosenMasks = dict[int, Tensor]
"""By layer whose columns an indexer chose, the mask of the rows of one forward, bool [B, 1, T, C]."""

_MASKS: ContextVar[ChosenMasks | None] = ContextVar("_MASKS", default=None)
"""Where the forward of this thread puts its masks; None where nobody asks."""


@contextmanager
def tap_columns() -> Iterator[ChosenMasks]:
    """The masks of the forwards that this thread runs inside the `with`; a later forward replaces them."""
    masks: ChosenMasks = {}
    token = _MASKS.set(masks)
    try:
        yield masks
    finally:
        _MASKS.reset(token)


def note_columns(layer: int, mask: Tensor) -> None:
    """Put `mask`, which shows each row of `layer` the columns that it attends to, where the forward is asked."""
    masks = _MASKS.get()
    if masks is not None:
        masks[layer] = mask.detach()
