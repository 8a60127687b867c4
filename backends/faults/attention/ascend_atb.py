"""Faults of calls to ATB's paged attention, and of slots on Ascend.

The masks are encoded wrongly, or padding rows are written before the cache.
"""

from dataclasses import replace
from typing import Any

import torch
from torch import Tensor

from specverify.backends.ascend.atb import AscendAtb
from specverify.backends.ascend.encodings import additive
from specverify.backends.engine.kv.lanes import BatchCache
from specverify.backends.engine.kv.paged import Paged
from specverify.backends.engine.seams import Seams
from specverify.backends.faults.attention.ascend_calls import fused_attention
from specverify.backends.faults.fault import attended_fault, faults_in, in_place_of

ON = "ascend-fused-atb-emulated"
"""The backend in which the faults of ATB's attention are planted by default."""

in_encoding = in_place_of(
    "attend.encode", AscendAtb, f"a fault of calls to ATB's paged attention: plant it in ascend-fused-atb or {ON}"
)
"""A decorator for the function that makes the mask of a call."""


@attended_fault(
    "ascend-padding-slot-negative",
    "vllm-ascend PR #17214; catalogue BZ-049: padded rows point to a live slot",
    "pages, and a batch of unequal trees",
    on="ascend-fused-emulated",
)
def padding_before_the_cache(seams: Seams) -> Seams:
    """Padding rows are written to slot -1, which lies before the cache: the operator checks no slot."""
    # For its check only: the fault calls an Ascend operator, which needs an Ascend backend.
    fused_attention(seams)

    class NegativeSlots(BatchCache):
        def update(self, key_states: Tensor, value_states: Tensor, layer_idx: int, *_: Any, **__: Any) -> Any:
            for lane, (cache, rows) in enumerate(zip(self.caches, self.rows, strict=True)):
                # A lane with fewer rows than the widest has padding rows, which the engine never writes.
                if rows < self.width and isinstance(cache, Paged):
                    keys, values = (states[lane, :, -1:].transpose(0, 1) for states in (key_states, value_states))
                    slot = torch.tensor([-1], dtype=torch.int32, device=keys.device)
                    pools = cache.pool.layers[layer_idx]
                    torch.ops.npu.npu_scatter_pa_kv_cache(
                        keys.contiguous(), values.contiguous(), *pools, slot, cache_mode="Norm"
                    )
            return super().update(key_states, value_states, layer_idx)

    return replace(seams, kv=replace(seams.kv, lanes=NegativeSlots))


@attended_fault("ascend-boolean-mask-added", "ATB documentation, PagedAttention, mask type SPEC", "any", on=ON)
@in_encoding
def boolean_mask_added(attend: AscendAtb, visible: Tensor, dtype: torch.dtype) -> Tensor:
    """A mask of 0 and 1 is handed to the operator that adds it to the scores."""
    return (~visible).to(dtype)


@attended_fault("ascend-additive-mask-inverted", "ATB documentation, PagedAttention, mask type SPEC", "any", on=ON)
@in_encoding
def additive_mask_inverted(attend: AscendAtb, visible: Tensor, dtype: torch.dtype) -> Tensor:
    """The additive mask hides what is visible."""
    return additive(~visible, dtype)


FAULTS = faults_in(globals())
