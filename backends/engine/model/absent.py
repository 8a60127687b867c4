"""The model of a draft on a rank that has no part of it.

Block tables are the same on all ranks, as a scheduler makes them for all. Such a rank therefore keeps the lengths and
the pages of the draft's cache, and one number for each column, which nothing reads.
"""

from specverify.backends.engine.kv.base import CacheSpec
from specverify.backends.engine.model.causal_lm import CausalLm
from specverify.backends.engine.model.head import HeadModel


class AbsentModel:
    """A stand-in for the model of a draft; it needs a cache of one head of width 1, and runs nothing."""

    def __init__(self, model: CausalLm | HeadModel) -> None:
        self._model = model
        if isinstance(model, HeadModel):
            self.reads = model.reads

    def room(self, capacity: int, rows: int) -> CacheSpec:
        """See `CausalLm.room`."""
        room = self._model.room(capacity, rows)
        return CacheSpec(room.reaches, 1, 1, capacity, rows, room.device, room.dtype)
