"""Memory of the device: what tensors of this process held at most, and what all processes have left."""

from typing import Any

import torch

from specverify.bench.memory import MB


def begin_peak(device: str) -> None:
    """Let the peak of this process's tensors begin anew, where torch counts it."""
    module = torch.get_device_module(device)
    if hasattr(module, "reset_peak_memory_stats"):
        module.reset_peak_memory_stats()


def memory_figures(device: str) -> dict[str, float]:
    """MiB: `peak_mb` of this process's tensors since `begin_peak`, and `free_mb` of the device now.

    Backends of drawn cases run in processes of their own, whose memory `free_mb` alone shows.
    """
    module: Any = torch.get_device_module(device)
    figures = {}
    if hasattr(module, "max_memory_allocated"):
        figures["peak_mb"] = round(module.max_memory_allocated() / MB, 3)
    if hasattr(module, "mem_get_info"):
        figures["free_mb"] = round(module.mem_get_info()[0] / MB, 1)
    return figures
