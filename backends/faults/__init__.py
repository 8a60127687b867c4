"""Publicly reported faults of speculative decoding, each a named patch of one engine seam."""

from backends.base import Backend, Unsupported
from backends.engine.seams import Seams
from backends.faults import (
    accepted,
    ascend,
    ascend_atb,
    ascend_masks,
    attended,
    batched,
    chunked,
    committed,
    drafted,
    emitted,
    freed,
    handed,
    kept,
    lowered,
    merged,
    mixed,
    overlapped,
    packed,
    paged,
    parted,
    processed,
    ranked,
    reused,
    sampled,
    scored,
    shared,
    stale,
    stopped,
    synced,
    verified,
)
from backends.faults.fault import Fault

ALL: tuple[Fault, ...] = (
    *drafted.FAULTS,
    *chunked.FAULTS,
    *lowered.FAULTS,
    *attended.FAULTS,
    *ascend.FAULTS,
    *ascend_masks.FAULTS,
    *ascend_atb.FAULTS,
    *handed.FAULTS,
    *packed.FAULTS,
    *parted.FAULTS,
    *merged.FAULTS,
    *scored.FAULTS,
    *processed.FAULTS,
    *accepted.FAULTS,
    *sampled.FAULTS,
    *verified.FAULTS,
    *emitted.FAULTS,
    *stopped.FAULTS,
    *committed.FAULTS,
    *batched.FAULTS,
    *mixed.FAULTS,
    *ranked.FAULTS,
    *overlapped.FAULTS,
    *shared.FAULTS,
    *synced.FAULTS,
    *kept.FAULTS,
    *stale.FAULTS,
    *paged.FAULTS,
    *reused.FAULTS,
    *freed.FAULTS,
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
