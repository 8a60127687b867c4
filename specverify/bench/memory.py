"""Bytes that a way of `bench decode` holds: weights, KV caches, and the peak."""

import resource
import sys
from collections.abc import Iterator
from pathlib import Path
from typing import Any

import torch
from torch import Tensor

MB = 2**20

RESET_PEAK = "5"
"""The word that makes Linux forget the peak of resident memory (proc(5), clear_refs)."""


def weight_bytes(network: Any) -> int:
    """Bytes of the parameters and buffers of a torch module, those that are shared counted once."""
    return storage_bytes([*network.parameters(), *network.buffers()])


def drafting_bytes(drafting: object) -> int:
    """Bytes of the weights that a draft brings along: a causal model's, a head's, or 0 for a draft without weights."""
    network, weights = getattr(drafting, "model", None), getattr(drafting, "weights", None)
    if isinstance(network, torch.nn.Module):
        return weight_bytes(network)
    return storage_bytes(list(weights.values())) if isinstance(weights, dict) else 0


def storage_bytes(tensors: list[Tensor]) -> int:
    """Bytes of the storages behind `tensors`, each storage once."""
    sizes = {tensor.untyped_storage().data_ptr(): tensor.untyped_storage().nbytes() for tensor in tensors}
    return sum(sizes.values())


def cache_bytes(caches: list[Any]) -> int:
    """Bytes of all tensors that the KV caches reach through their attributes: pools, buffers and branches."""
    return storage_bytes(list(_tensors(caches, set())))


def _tensors(value: Any, visited: set[int]) -> Iterator[Tensor]:
    if id(value) in visited:
        return
    visited.add(id(value))
    if isinstance(value, Tensor):
        yield value
    elif isinstance(value, dict):
        for item in value.values():
            yield from _tensors(item, visited)
    elif isinstance(value, (list, tuple)):
        for item in value:
            yield from _tensors(item, visited)
    elif type(value).__module__.startswith("specverify.backends.engine.kv"):
        yield from _tensors(list(vars(value).values()), visited)


class Peak:
    """The most memory that was in use since `start`: of the device, or resident memory of this process.

    Args:
        device: The type of the torch device.
    """

    def __init__(self, device: str) -> None:
        self._cuda = device == "cuda"
        self._is_known = self._cuda

    def start(self) -> None:
        """Forget the peak so far; systems other than Linux cannot, and then no peak is told."""
        if self._cuda:
            torch.cuda.reset_peak_memory_stats()
            return
        try:
            Path("/proc/self/clear_refs").write_text(RESET_PEAK)
            self._is_known = True
        except OSError:  # no Linux, or a container that forbids it: `mb` says None
            self._is_known = False

    def mb(self) -> float | None:
        """The peak since `start` in MiB; None where it is not known."""
        if not self._is_known:
            return None
        return float(torch.cuda.max_memory_allocated() if self._cuda else resident_bytes()) / MB


def resident_bytes() -> int:
    """The peak of resident memory of this process, since its start or since it was last forgotten.

    macOS tells bytes, other systems KiB (getrusage(2)).
    """
    peak = resource.getrusage(resource.RUSAGE_SELF).ru_maxrss
    return int(peak) if sys.platform == "darwin" else int(peak) * 1024
