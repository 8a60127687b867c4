"""Low-rank adapters in a forward: each lane of a batch may have one of its own.

The weights of the model stay as they are. A hook behind each projection adds the product of a lane's two matrices to
that lane's rows alone.
"""

from collections.abc import Callable, Iterator, Sequence
from contextlib import contextmanager
from dataclasses import dataclass
from functools import lru_cache
from typing import Any

import torch
from torch import Tensor

from specverify.reference.architecture import Model, Seeded
from specverify.reference.weights import low_rank


@dataclass(frozen=True, eq=False)
class LowRank:
    """An adapter on a device.

    Attributes:
        scale: The factor of each product.
        parts: For each projection, by the name of its module, the matrices [rank, in] and [out, rank].
    """

    scale: float
    parts: dict[str, tuple[Tensor, Tensor]]

    def added_output(self, module: str, rows: Tensor) -> Tensor | None:
        """What the adapter adds to the output of `module` for the inputs `rows` [T, in]; None if it adds nothing."""
        if module not in self.parts:
            return None
        down, up = self.parts[module]
        return (rows @ down.T) @ up.T * self.scale


def low_rank_of(model: Model, dtype: torch.dtype, device: torch.device) -> LowRank | None:
    """The adapter of `model` in its working dtype; None for a model without one."""
    return None if model.adapter is None else _low_rank(model, dtype, device)


@lru_cache(maxsize=64)
def _low_rank(model: Seeded, dtype: torch.dtype, device: torch.device) -> LowRank:
    assert model.adapter is not None
    parts = {
        name.removesuffix(".weight"): (
            torch.tensor(down, dtype=dtype, device=device),
            torch.tensor(up, dtype=dtype, device=device),
        )
        for name, (down, up) in low_rank(model).items()
    }
    return LowRank(model.adapter.scale, parts)


@contextmanager
def adapter_hooks(network: Any, lanes: Sequence[LowRank | None]) -> Iterator[None]:
    """While open, lane n of each forward of `network` runs with the adapter `lanes[n]`."""
    modules = sorted({module for adapter in lanes if adapter is not None for module in adapter.parts})
    hooks = [network.get_submodule(name).register_forward_hook(_hook(name, lanes)) for name in modules]
    try:
        yield
    finally:
        for hook in hooks:
            hook.remove()


def _hook(module: str, lanes: Sequence[LowRank | None]) -> Callable[[Any, tuple[Tensor, ...], Tensor], Tensor]:
    def add(_: Any, arguments: tuple[Tensor, ...], output: Tensor) -> Tensor:
        (inputs,) = arguments
        for lane, adapter in enumerate(lanes):
            added = None if adapter is None else adapter.added_output(module, inputs[lane])
            if added is not None:
                output[lane] += added
        return output

    return add
