"""Ascend backends: eager, fused, and fused by ATB, each on the device and on the emulation of its operators."""

from dataclasses import replace

from backends.ascend.atb import AscendAtb
from backends.ascend.device import missing, without_nnal
from backends.ascend.eager import ascend_eager
from backends.ascend.fused import AscendFused
from backends.ascend.operators.install import install
from backends.ascend.writes import AtbPaged, CheckedPaged, ScatterPaged
from backends.base import Unavailable
from backends.engine.backend import EngineBackend
from backends.engine.columns import Attend
from backends.engine.composition import SEAMS
from backends.engine.kv.paged import Paged
from backends.engine.seams import Seams

THREE = ("float32", "bfloat16", "float16")
"""The dtypes of the device's matrix products; it has none in float64."""

HALVES = ("bfloat16", "float16")
"""The dtypes of ATB's paged attention."""


def open_eager() -> EngineBackend:
    """Open `ascend-eager`.

    Raises:
        Unavailable: where torch_npu or a device is missing.
    """
    return _on_device("ascend-eager", _seams(ascend_eager, CheckedPaged), THREE)


def open_fused() -> EngineBackend:
    """Open `ascend-fused`; raises as `open_eager`."""
    return _on_device("ascend-fused", _seams(AscendFused(), ScatterPaged), THREE)


def open_atb() -> EngineBackend:
    """Open `ascend-fused-atb`; raises as `open_eager`, and where NNAL is missing."""
    return _on_device("ascend-fused-atb", _seams(AscendAtb(), AtbPaged), HALVES, nnal=True)


def emulate_eager() -> EngineBackend:
    """Open `ascend-eager-emulated`."""
    return _emulated("ascend-eager-emulated", _seams(ascend_eager, CheckedPaged), THREE)


def emulate_fused() -> EngineBackend:
    """Open `ascend-fused-emulated`."""
    return _emulated("ascend-fused-emulated", _seams(AscendFused(), ScatterPaged), THREE)


def emulate_atb() -> EngineBackend:
    """Open `ascend-fused-atb-emulated`."""
    return _emulated("ascend-fused-atb-emulated", _seams(AscendAtb(), AtbPaged), HALVES)


def _seams(attend: Attend, paged: type[Paged]) -> Seams:
    return replace(SEAMS, attend=attend, draft_attend=attend, kv=replace(SEAMS.kv, paged=paged))


def _on_device(name: str, seams: Seams, dtypes: tuple[str, ...], nnal: bool = False) -> EngineBackend:
    why = missing() or (without_nnal() if nnal else None)
    if why is not None:
        raise Unavailable(f"{name} needs an Ascend device: {why}; {name}-emulated runs its documented contract here")
    return EngineBackend(name, "npu", seams, dtypes)


def _emulated(name: str, seams: Seams, dtypes: tuple[str, ...]) -> EngineBackend:
    install()
    return EngineBackend(name, "cpu", seams, dtypes, emulated=True)
