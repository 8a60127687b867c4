"""Bytes that a way of `bench decode` holds: weights and KV caches; resident memory of the process."""

import resource
import sys
from collections.abc import Iterator
from typing import Any

import torch
from torch import Tensor

MB = 2**20


def weight_bytes(network: Any) -> int:
    """Bytes of the parameters and buffers of a torch module, those that are shared counted once."""
    return storage_bytes([*network.parameters(), *network.buffers()])


def draft_parameters(drafting: object) -> list[Tensor]:
    """The weights that a draft brings along: a causal model's, a head's, or none for a draft without weights."""
    network, weights = getattr(drafting, "model", None), getattr(drafting, "weights", None)
    if isinstance(network, torch.nn.Module):
        return list(network.parameters())
    return list(weights.values()) if isinstance(weights, dict) else []


def num_parameters(tensors: list[Tensor]) -> int:
    """The number of numbers in `tensors`, those that are shared counted once."""
    sizes = {tensor.data_ptr(): tensor.numel() for tensor in tensors}
    return sum(sizes.values())


def storage_bytes(tensors: list[Tensor]) -> int:
    """Bytes of the storages behind `tensors`, each storage once."""
    sizes = {tensor.untyped_storage().data_ptr(): tensor.untyped_storage().nbytes() for tensor in tensors}
    return sum(sizes.values())


def cache_bytes(caches: list[Any]) -> int:
    """Bytes of all tensors that the KV caches reach through their attributes: pools, buffers and branches."""
    return storage_bytes(list(_tensors(caches, set())))


def _tensors(value: Any, visited: set[int]) -> Iterator[Tensor]:
    if isinstance(value, Tensor):
        yield value
    elif isinstance(value, dict):
        for item in value.values():
            yield from _tensors(item, visited)
    elif isinstance(value, (list, tuple)):
        for item in value:
            yield from _tensors(item, visited)
    elif type(value).__module__.startswith("specverify.backends.engine.kv") and id(value) not in visited:
        # Caches alone are remembered: they live on, while the number of a list made here goes to the next one.
        visited.add(id(value))
        yield from _tensors(vars(value), visited)


def resident_bytes() -> int:
    """The peak of resident memory of this process, since its start.

    macOS tells bytes, other systems KiB (getrusage(2)).
    """
    peak = resource.getrusage(resource.RUSAGE_SELF).ru_maxrss
    return int(peak) if sys.platform == "darwin" else int(peak) * 1024
