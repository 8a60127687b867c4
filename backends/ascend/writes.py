"""Paged cache writes for Ascend: checked slots, and the operators that write.

A write of no numbers launches no operator: no rows, or a layer that keeps no columns because it reads those of another.
"""

import torch
from torch import Tensor

from specverify.backends.ascend.encodings import require_slots
from specverify.backends.ascend.operators.versions import takes
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


SCATTER = "npu_scatter_pa_kv_cache"
"""The operator that writes keys and values at once."""


def scatter(keys: Tensor, values: Tensor, key_cache: Tensor, value_cache: Tensor, slots: Tensor) -> None:
    """Write keys and values [tokens, heads, D] to `slots`, int32 [tokens], of caches [blocks, block size, heads, D].

    The operator for both writes plain caches if it is told so. Without `cache_mode`, as in torch_npu 2.7 and 2.9, its
    documentation leaves open which caches it takes; 2.6 lacks it. There each cache is written by its slots.
    """
    if takes(SCATTER, "cache_mode"):
        torch.ops.npu.npu_scatter_pa_kv_cache(keys, values, key_cache, value_cache, slots, cache_mode="Norm")
        return
    for rows, cache in ((keys, key_cache), (values, value_cache)):
        torch.ops.npu.npu_scatter_nd_update_(cache.flatten(0, 1), slots[:, None], rows)


class ScatterPaged(CheckedPaged):
    """A paged cache that writes by npu_scatter_pa_kv_cache into plain caches, as vllm-ascend does."""

    def put(self, layer: int, begin: int, pair: Pair) -> None:
        """Write the pair by its operator; see `Paged.put`."""
        keys, values = (tensor.transpose(0, 1).contiguous() for tensor in pair)
        slots = self.slots(begin, begin + len(keys)).to(torch.int32)
        if keys.numel():
            scatter(keys, values, *self.pool.layers[layer], slots)


class AtbPaged(CheckedPaged):
    """A paged cache that writes by ATB's _npu_reshape_and_cache."""

    def put(self, layer: int, begin: int, pair: Pair) -> None:
        """Write the pair by its operator; see `Paged.put`."""
        keys, values = (tensor.transpose(0, 1).contiguous() for tensor in pair)
        slots = self.slots(begin, begin + len(keys)).to(torch.int32)
        if keys.numel():
            torch.ops.atb._npu_reshape_and_cache(keys, values, *self.pool.layers[layer], slots)
