"""`cpu-split`, `triton-interpreted`, `cuda-fused`: attention split at the end of the prefix, in torch and Triton."""

from dataclasses import replace

import torch

from backends.base import Unavailable
from backends.engine.attention.split import Split
from backends.engine.attention.triton_launch import compiled, interpreted
from backends.engine.backend import EngineBackend
from backends.engine.columns import Attend
from backends.engine.composition import SEAMS
from backends.engine.kv.lanes import PagedLanes
from backends.engine.kv.seams import KvSeams
from backends.engine.seams import Seams

KERNEL_DTYPES = ("float32", "bfloat16", "float16")


def composed(attend: Attend, beside: Attend | None = None) -> Seams:
    """The engine with `attend`, which reads pages where they lie; `beside`, if given, takes drafts and prefills."""
    pages = KvSeams(lanes=PagedLanes, single=PagedLanes)
    return replace(SEAMS, attend=attend, prefill_attend=beside, draft_attend=beside or attend, kv=pages)


def open_torch() -> EngineBackend:
    """Open `cpu-split`."""
    return EngineBackend("cpu-split", "cpu", composed(Split()))


def open_interpreted() -> EngineBackend:
    """Open `triton-interpreted`: every verify forward runs our kernel, operation by operation, in NumPy.

    Drafts and prefills take the split in torch: to the interpreter a tile costs milliseconds whatever its size, and
    two thirds of all attention of a small case is prefill.

    Raises:
        Unavailable: where Triton is not installed, or has no interpreter.
    """
    try:
        kernel = interpreted()
    except ImportError as why:
        raise Unavailable(f"triton-interpreted needs Triton (pip install 'triton>=3.0', on Linux): {why}") from why
    seams = composed(kernel, Split())
    return EngineBackend("triton-interpreted", "cpu", seams, KERNEL_DTYPES, emulated=True, variant_interval=4)


def open_cuda() -> EngineBackend:
    """Open `cuda-fused`: our kernel on the GPU, drafts and prefills too.

    Raises:
        Unavailable: where torch sees no CUDA device, or Triton is not installed.
    """
    if not torch.cuda.is_available():
        built = (
            "no CUDA device is visible" if torch.version.cuda else f"torch {torch.__version__} is built without CUDA"
        )
        raise Unavailable(f"cuda-fused needs an NVIDIA device: {built}; triton-interpreted runs its kernel on the CPU")
    try:
        kernel = compiled()
    except ImportError as why:
        raise Unavailable(f"cuda-fused needs Triton (pip install 'triton>=3.0'): {why}") from why
    return EngineBackend("cuda-fused", "cuda", composed(kernel), KERNEL_DTYPES)
