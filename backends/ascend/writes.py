"""Pages written as Ascend needs it: every slot checked before the launch, and the operators that write."""

import torch

from backends.ascend.encodings import require_slots
from backends.engine.kv.base import Pair
from backends.engine.kv.paged import Paged


class CheckedPaged(Paged):
    """Writes by index, after a look at every slot: the device's own index_put_ and gather look at none."""

    def slots(self, begin: int, end: int) -> torch.Tensor:
        """See `Paged.slots`."""
        slots = super().slots(begin, end)
        pages, size = self.pool.layers[0][0].shape[:2]
        require_slots(slots, pages * size)
        return slots


class ScatterPaged(CheckedPaged):
    """Writes by npu_scatter_pa_kv_cache, as vllm-ascend does, in plain caches."""

    def _put(self, layer: int, begin: int, pair: Pair) -> None:
        keys, values = (one.transpose(0, 1).contiguous() for one in pair)
        slots = self.slots(begin, begin + len(keys)).to(torch.int32)
        if len(slots):
            torch.ops.npu.npu_scatter_pa_kv_cache(keys, values, *self.pool.layers[layer], slots, cache_mode="Norm")


class AtbPaged(CheckedPaged):
    """Writes by ATB's _npu_reshape_and_cache."""

    def _put(self, layer: int, begin: int, pair: Pair) -> None:
        keys, values = (one.transpose(0, 1).contiguous() for one in pair)
        slots = self.slots(begin, begin + len(keys)).to(torch.int32)
        if len(slots):
            torch.ops.atb._npu_reshape_and_cache(keys, values, *self.pool.layers[layer], slots)
