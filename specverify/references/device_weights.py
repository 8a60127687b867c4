"""State dicts on a device: copies of small models, and checkpoints in their narrowest dtype.

A weight of a checkpoint lies on the device in a dtype that holds its numbers exactly, which is the checkpoint's own or
the working dtype. On the CPU a weight that an engine holds as it is stored is mapped from its file, so that its pages
are those of every process that maps the file. Products widen a narrow matrix to float64 in blocks. Perturbed weights
are made in float64 when they are read, a layer at a time.
"""

import math
import zlib
from collections.abc import Iterator, Mapping
from dataclasses import dataclass, fields
from typing import cast

import numpy as np
import torch

from specverify.reference.files.fields import UnreadableCheckpoint
from specverify.reference.files.stored import StoredTensor, not_finite
from specverify.reference.oracle.amplification import Change, perturb_weights
from specverify.reference.oracle.formulas.layer import TANH_ROUNDINGS
from specverify.reference.oracle.parameters import LAYER, Parameters, WeightsByLayer
from specverify.reference.trace import Array
from specverify.references.device_array import BLOCK, DeviceArray, on_host

NARROW = (torch.bfloat16, torch.float16, torch.float32)
"""The dtypes narrower than float64, the narrowest first."""


@dataclass(frozen=True, eq=False)
class DeviceParameters(Parameters):
    """Parameters whose weights are DeviceArrays."""

    def host_copy(self, array: Array) -> Array:
        """See `Parameters`."""
        return on_host(array)


def device_parameters(parameters: Parameters, state: Mapping[str, Array]) -> DeviceParameters:
    """`parameters` with `state`, whose weights are DeviceArrays."""
    values = {field.name: getattr(parameters, field.name) for field in fields(Parameters)}
    return DeviceParameters(**{**values, "state": state})


class CopiedWeights(Mapping[str, Array]):
    """The weights of `parameters`, which lie in NumPy arrays, copied to `device` in float64."""

    def __init__(self, parameters: Parameters, device: torch.device) -> None:
        self._parameters = parameters
        self._device = device
        self._weights = {
            name: DeviceArray(torch.from_numpy(np.array(weight, dtype=np.float64)).to(device))
            for name, weight in parameters.state.items()
        }

    def __getitem__(self, name: str) -> Array:
        return cast(Array, self._weights[name])

    def __iter__(self) -> Iterator[str]:
        return iter(self._weights)

    def __len__(self) -> int:
        return len(self._weights)

    def perturbed(self, seed: int, size: float) -> "CopiedWeights":
        """See `PerturbableWeights`: the same numbers as NumPy's own perturbed weights."""
        return CopiedWeights(perturb_weights(self._parameters, Change(seed, size)), self._device)


class NarrowWeights(Mapping[str, Array]):
    """Weights in narrow dtypes on a device; of perturbed ones, those of one layer are there at a time.

    Args:
        weights: The narrow weights by name.
        change: The seed and the size of the change by which they are perturbed when they are read; None for the
            weights as they are.
    """

    def __init__(self, weights: Mapping[str, torch.Tensor], change: tuple[int, float] | None = None) -> None:
        self._weights = weights
        self._change = change
        self._layer: str | None = None
        self._perturbed: dict[str, torch.Tensor] = {}

    def __getitem__(self, name: str) -> Array:
        if self._change is None:
            return cast(Array, DeviceArray(self._weights[name]))
        match = LAYER.match(name)
        layer = None if match is None else match[1]
        if layer != self._layer:
            self._layer = layer
            self._perturbed.clear()
        if layer is None:
            return cast(Array, DeviceArray(self._perturb(name, *self._change)))
        if name not in self._perturbed:
            self._perturbed[name] = self._perturb(name, *self._change)
        return cast(Array, DeviceArray(self._perturbed[name]))

    def __contains__(self, name: object) -> bool:
        return name in self._weights

    def __iter__(self) -> Iterator[str]:
        return iter(self._weights)

    def __len__(self) -> int:
        return len(self._weights)

    def perturbed(self, seed: int, size: float) -> "NarrowWeights":
        """See `PerturbableWeights`; each weight has a generator of its own, of `seed` and its name."""
        device = next(iter(self._weights.values())).device
        widest = max(max(weight.shape, default=0) for weight in self._weights.values())
        weights = {**self._weights, TANH_ROUNDINGS: torch.ones(widest, device=device)}
        return NarrowWeights(weights, (seed, size))

    def _perturb(self, name: str, seed: int, size: float) -> torch.Tensor:
        weight = self._weights[name]
        generator = torch.Generator(device=weight.device)
        generator.manual_seed((zlib.crc32(name.encode()) << 8) + seed)
        perturbed = torch.empty(weight.shape, dtype=torch.float64, device=weight.device)
        # In blocks, so that the normal numbers of a large matrix never lie beside it; in float32, which is drawn in a
        # sixth of the time.
        parts = (torch.split(numbers.reshape(-1), BLOCK) for numbers in (weight, perturbed))
        for numbers, into in zip(*parts, strict=True):
            normal = torch.empty(numbers.shape, dtype=torch.float32, device=weight.device)
            into.copy_(normal.normal_(generator=generator)).mul_(size).add_(1.0).mul_(numbers)
        return perturbed - weight if name == TANH_ROUNDINGS else perturbed


def narrowest(weight: Array, device: torch.device) -> torch.Tensor:
    """`weight` on `device` in the narrowest dtype that holds its numbers exactly."""
    block_size = BLOCK // 4

    def blocks() -> Iterator[torch.Tensor]:
        # Copies, since torch warns of arrays that are read-only.
        numbers, size = weight.reshape(-1), weight.size
        return (torch.from_numpy(numbers[first : first + block_size].copy()) for first in range(0, size, block_size))

    def holds(dtype: torch.dtype) -> bool:
        return all(torch.equal(block.to(dtype).double(), block) for block in blocks())

    dtype = next(filter(holds, NARROW), torch.float64)
    narrow = torch.empty(weight.shape, dtype=dtype, device=device)
    for block, into in zip(blocks(), torch.split(narrow.view(-1), block_size), strict=weight.size > 0):
        into.copy_(block)
    return narrow


def narrow_weights(state: Mapping[str, Array], device: torch.device) -> NarrowWeights:
    """The weights of `state` as they lie on `device`: on the CPU mapped from the files of a checkpoint, else copied."""
    files = state if device.type == "cpu" and isinstance(state, WeightsByLayer) else None

    def tensor_of(name: str) -> torch.Tensor:
        stored = None if files is None else files.whole_tensor(name)
        return narrowest(state[name], device) if stored is None else mapped_tensor(stored, name)

    # Those outside layers last: `state` then holds no layer any more.
    names = sorted(state, key=lambda name: LAYER.match(name) is None)
    return NarrowWeights({name: tensor_of(name) for name in names})


STORED_AS = {"BF16": (np.int16, torch.bfloat16), "F16": (np.int16, torch.float16), "F32": (np.int32, torch.float32),
             "F64": (np.int64, torch.float64)}  # fmt: skip
"""For each stored dtype an integer of NumPy's with as many bits, and torch's dtype."""


def mapped_tensor(stored: StoredTensor, name: str) -> torch.Tensor:
    """The stored tensor called `name`, mapped from its file.

    Raises:
        UnreadableCheckpoint: It holds NaN or infinity, or its file cannot be read.
    """
    bits, dtype = STORED_AS[stored.dtype]
    if not math.prod(stored.shape):
        return torch.empty(stored.shape, dtype=dtype)
    try:
        # Copy on write, since torch warns of arrays that are read-only; nobody writes.
        mapped = np.memmap(stored.file, bits, "c", stored.begin, stored.shape)
    except (OSError, ValueError) as error:
        raise UnreadableCheckpoint(f"{stored.file}: {' '.join(str(error).split())[:160]}") from None
    tensor = torch.from_numpy(mapped).view(dtype)
    for block in torch.split(tensor.view(-1), BLOCK // 4):
        if not bool(torch.isfinite(block).all()):
            raise not_finite(stored.file, name)
    return tensor
