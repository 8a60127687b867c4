"""Backends of the engine with torch's fused attention: SDPA and FlexAttention, on the CPU and on NVIDIA devices."""

from dataclasses import replace

import torch

from backends.base import Unavailable
from backends.engine.attention.flashinfer import installed
from backends.engine.attention.flex import Flex
from backends.engine.attention.sdpa import Sdpa
from backends.engine.backend import EngineBackend
from backends.engine.columns import Attend
from backends.engine.composition import SEAMS
from backends.engine.kv.lanes import PagedLanes
from backends.engine.kv.seams import KvSeams
from backends.engine.model.graphs import CudaRecorder, Recorder


def cpu_sdpa() -> EngineBackend:
    """Open `cpu-fused`."""
    return _with(Sdpa(), "cpu-fused", "cpu")


def cpu_flex() -> EngineBackend:
    """Open `cpu-fused-flex`."""
    return _with(Flex(), "cpu-fused-flex", "cpu")


def cpu_flex_compiled() -> EngineBackend:
    """Open `cpu-fused-flex-compiled`."""
    return _with(Flex(compiled=True), "cpu-fused-flex-compiled", "cpu")


def cuda_sdpa() -> EngineBackend:
    """Open `cuda-fused-sdpa`.

    Raises:
        Unavailable: where torch sees no CUDA device.
    """
    _need_cuda("cuda-fused-sdpa", "cpu-fused")
    return _with(Sdpa(), "cuda-fused-sdpa", "cuda")


def cuda_flex() -> EngineBackend:
    """Open `cuda-fused-flex`, compiled.

    Raises:
        Unavailable: where torch sees no CUDA device.
    """
    _need_cuda("cuda-fused-flex", "cpu-fused-flex")
    return _with(Flex(compiled=True), "cuda-fused-flex", "cuda")


def cuda_flashinfer() -> EngineBackend:
    """Open `cuda-fused-flashinfer`.

    Raises:
        Unavailable: where torch sees no CUDA device, or FlashInfer is not installed.
    """
    _need_cuda("cuda-fused-flashinfer", "cpu-fused")
    try:
        attend = installed("cuda")
    except ImportError as why:
        raise Unavailable(f"cuda-fused-flashinfer needs FlashInfer (pip install flashinfer-python): {why}") from why
    pages = KvSeams(lanes=PagedLanes, single=PagedLanes)
    seams = replace(SEAMS, attend=attend, draft_attend=attend, kv=pages)
    return EngineBackend("cuda-fused-flashinfer", "cuda", seams, ("bfloat16", "float16"))


def cuda_graphs() -> EngineBackend:
    """Open `cuda-fused-graphs`.

    Raises:
        Unavailable: where torch sees no CUDA device.
    """
    _need_cuda("cuda-fused-graphs", "cpu-fused")
    return _with(Sdpa(), "cuda-fused-graphs", "cuda", CudaRecorder())


def _with(attend: Attend, name: str, device: str, recorder: Recorder | None = None) -> EngineBackend:
    return EngineBackend(name, device, replace(SEAMS, attend=attend, draft_attend=attend), recorder=recorder)


def _need_cuda(name: str, twin: str) -> None:
    if torch.cuda.is_available():
        return
    built = "no CUDA device is visible" if torch.version.cuda else f"torch {torch.__version__} is built without CUDA"
    raise Unavailable(f"{name} needs an NVIDIA device: {built}; on the CPU, {twin} runs the same attention")
