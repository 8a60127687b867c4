"""Publicly reported faults of speculative decoding, each a named patch of one engine seam."""

from backends.base import Backend, Unsupported
from backends.engine.seams import Seams
from backends.faults.attention import (
    ascend_atb,
    ascend_calls,
    ascend_masks,
    forward_metadata,
    kernel,
    packed_mask,
    split_parts,
    triton_launch,
)
from backends.faults.cache import commit, contiguous_layouts, page_release, paged_writes, shared_pages, stale_columns
from backends.faults.drafting import draft_cache, proposal, tensor_parallel
from backends.faults.fault import Fault
from backends.faults.lowering import chunks, tree_tensors
from backends.faults.output import emission, stop_conditions
from backends.faults.sampling import coins, greedy_walk, logit_rows, logits_processing, rejection, verify_kernel
from backends.faults.serving import batches, leaked_state, mixed_batches, overlap

ALL: tuple[Fault, ...] = (
    *proposal.FAULTS,
    *chunks.FAULTS,
    *tree_tensors.FAULTS,
    *kernel.FAULTS,
    *ascend_calls.FAULTS,
    *ascend_masks.FAULTS,
    *ascend_atb.FAULTS,
    *forward_metadata.FAULTS,
    *packed_mask.FAULTS,
    *split_parts.FAULTS,
    *triton_launch.FAULTS,
    *logit_rows.FAULTS,
    *logits_processing.FAULTS,
    *greedy_walk.FAULTS,
    *rejection.FAULTS,
    *coins.FAULTS,
    *verify_kernel.FAULTS,
    *emission.FAULTS,
    *stop_conditions.FAULTS,
    *commit.FAULTS,
    *batches.FAULTS,
    *mixed_batches.FAULTS,
    *tensor_parallel.FAULTS,
    *overlap.FAULTS,
    *leaked_state.FAULTS,
    *draft_cache.FAULTS,
    *contiguous_layouts.FAULTS,
    *stale_columns.FAULTS,
    *paged_writes.FAULTS,
    *shared_pages.FAULTS,
    *page_release.FAULTS,
)


def named(name: str) -> Fault:
    """The fault of that name.

    Raises:
        KeyError: when there is none; its message names the closest thing to a list.
    """
    for fault in ALL:
        if fault.name == name:
            return fault
    raise KeyError(f"no fault is called {name!r}; `specverify list faults` names them")


def plant(backend: Backend, fault: Fault) -> None:
    """Put `fault` into a backend that runs our engine, for as long as the object lives.

    Raises:
        Unsupported: for a backend without seams.
    """
    seams = getattr(backend, "seams", None)
    if not isinstance(seams, Seams):
        raise Unsupported(f"backend {backend.declaration.name} exposes no engine seams: no fault can be planted in it")
    backend.seams = fault.plant(seams)  # type: ignore[attr-defined]
