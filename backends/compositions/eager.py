"""`cpu-eager` and `cuda-eager`: the engine with its written-out attention."""

import torch

from backends.base import Unavailable
from backends.engine.backend import EngineBackend


def open_cpu() -> EngineBackend:
    """Open `cpu-eager`."""
    return EngineBackend("cpu-eager", "cpu")


def open_cuda() -> EngineBackend:
    """Open `cuda-eager`.

    Raises:
        Unavailable: where torch sees no CUDA device.
    """
    if not torch.cuda.is_available():
        built = (
            "no CUDA device is visible" if torch.version.cuda else f"torch {torch.__version__} is built without CUDA"
        )
        raise Unavailable(f"cuda-eager needs an NVIDIA device: {built}")
    return EngineBackend("cuda-eager", "cuda")
