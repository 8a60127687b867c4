"""Paged cache writes for Ascend: checked slots, and the operators that write."""

import torch

from specverify.backends.ascend.encodings import require_slots
from specverify.backends.engine.kv.base import Pair
from specverify.backends.engine.kv.paged import Paged


class CheckedPaged(Paged):
    """A paged cache that writes by index and checks every slot first.

    The device's own index_put_ and gather check no index.
    """

    def slots(self, begin: int, end: int) -> torch.Tensor:
        """See `Paged.slots`."""
        slots = super().slots(begin, end)
        pages, size = self.pool.layers[0][0].shape[:2]
        require_slots(slots, pages * size)
        return slots


class ScatterPaged(CheckedPaged):
    """A paged cache that writes by npu_scatter_pa_kv_cache into plain caches, as vllm-ascend does."""

    def put(self, layer: int, begin: int, pair: Pair) -> None:
        """Write the pair by its operator; see `Paged.put`."""
        keys, values = (tensor.transpose(0, 1).contiguous() for tensor in pair)
        slots = self.slots(begin, begin + len(keys)).to(torch.int32)
        # A write of no rows launches no operator.
        if len(slots):
            torch.ops.npu.npu_scatter_pa_kv_cache(keys, values, *self.pool.layers[layer], slots, cache_mode="Norm")


class AtbPaged(CheckedPaged):
    """A paged cache that writes by ATB's _npu_reshape_and_cache."""

    def put(self, layer: int, begin: int, pair: Pair) -> None:
        """Write the pair by its operator; see `Paged.put`."""
        keys, values = (tensor.transpose(0, 1).contiguous() for tensor in pair)
        slots = self.slots(begin, begin + len(keys)).to(torch.int32)
        if len(slots):
            torch.ops.atb._npu_reshape_and_cache(keys, values, *self.pool.layers[layer], slots)
