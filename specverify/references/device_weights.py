"""State dicts on a device: copies of small models, and checkpoints in their narrowest dtype.

A weight of a checkpoint lies on the device in a dtype that holds its numbers exactly, which is the checkpoint's own or
the working dtype. The weights of a layer are widened to float64 when they are read, and dropped when the next layer is
read. So a run takes the checkpoint and one layer in float64. Weights outside layers (embedding, head) stay narrow:
products widen them in blocks.
"""

import zlib
from collections.abc import Iterator, Mapping
from dataclasses import dataclass, fields
from typing import Any, cast

import numpy as np
import torch

from specverify.reference.oracle.amplification import PERTURBED, perturb_weights
from specverify.reference.oracle.formulas.layer import TANH_ROUNDINGS
from specverify.reference.oracle.parameters import LAYER, Parameters
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
        """See `PerturbableWeights`: the same numbers as NumPy's own perturbed weights, whose size is `PERTURBED`."""
        assert size == PERTURBED
        return CopiedWeights(perturb_weights(self._parameters, seed), self._device)


class NarrowWeights(Mapping[str, Array]):
    """Weights in narrow dtypes on a device, of which those of one layer are wide at a time.

    Args:
        weights: The narrow weights by name.
        change: The seed and the size of the change by which they are perturbed when they are read; None for the
            weights as they are.
    """

    def __init__(self, weights: Mapping[str, torch.Tensor], change: tuple[int, float] | None = None) -> None:
        self._weights = weights
        self._change = change
        self._layer: str | None = None
        self._wide: dict[str, torch.Tensor] = {}

    def __getitem__(self, name: str) -> Array:
        match = LAYER.match(name)
        if match is None:
            self._layer = None
            self._wide.clear()
            return cast(Array, DeviceArray(self._read(name, wide=False)))
        if match[1] != self._layer:
            self._layer = match[1]
            self._wide.clear()
        if name not in self._wide:
            self._wide[name] = self._read(name, wide=True)
        return cast(Array, DeviceArray(self._wide[name]))

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

    def _read(self, name: str, wide: bool) -> torch.Tensor:
        weight = self._weights[name]
        if self._change is None:
            return weight.double() if wide else weight
        generator = torch.Generator(device=weight.device)
        seed, size = self._change
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


def narrow_weights(state: Mapping[str, Any], device: torch.device) -> NarrowWeights:
    """The weights of `state`, read one after the other, as they lie on `device`."""
    # Those outside layers last: `state` then holds no layer any more.
    names = sorted(state, key=lambda name: LAYER.match(name) is None)
    return NarrowWeights({name: narrowest(state[name], device) for name in names})
