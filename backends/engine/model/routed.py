"""The tap that takes the choices of experts out of a model's forwards.

It listens to the modules that hold the experts of a layer. transformers hands them the rows with the experts that each
takes; Llama 4's router answers with the factors of all experts, 0 for those that a row does not take.
"""

from collections.abc import Iterator
from contextlib import contextmanager
from contextvars import ContextVar
from typing import Any

import torch
from torch import Tensor, nn
from transformers.models.llama4.modeling_llama4 import Llama4Router

Choices = dict[int, Tensor]
"""By layer with experts, those of the rows of one forward, int64 [rows of all lanes, taken]."""

_TAKEN: ContextVar[Choices | None] = ContextVar("_TAKEN", default=None)
"""Where the forward of this thread puts its choices; None where nobody asks."""


class ExpertTap:
    """Listeners at the experts of a transformers model, which stay.

    Attributes:
        layers: Number of layers.
        present: Whether any layer has experts.
    """

    def __init__(self, model: Any) -> None:
        found = decoder_layers(model)
        self.layers = len(found)
        self.present = False
        for number, layer in enumerate(found):
            for block in layer.modules():
                self.present |= _listen(block, number)

    @contextmanager
    def on(self) -> Iterator[Choices]:
        """The choices of the forwards that this thread runs inside the `with`; a later forward replaces them."""
        taken: Choices = {}
        token = _TAKEN.set(taken)
        try:
            yield taken
        finally:
            _TAKEN.reset(token)


def decoder_layers(model: Any) -> Any:
    """The decoder layers of a transformers model; empty where they do not stand under `layers` of its body."""
    body = getattr(model, "base_model", model)
    body = body if hasattr(body, "layers") else getattr(body, "model", body)
    return getattr(body, "layers", ())


def _listen(block: nn.Module, layer: int) -> bool:
    """Listen at the experts of `block`, which belongs to `layer`; False if it has none."""
    experts, router = getattr(block, "experts", None), getattr(block, "router", None)
    if not isinstance(experts, nn.Module):
        return False
    if isinstance(router, Llama4Router):

        def after(module: Any, _: Any, output: Any) -> None:
            taken = _TAKEN.get()
            if taken is not None:
                taken[layer] = output[0].topk(module.top_k, dim=-1)[1].detach()

        router.register_forward_hook(after)
        return True

    def before(_: Any, given: tuple[Any, ...], named: dict[str, Any]) -> None:
        taken = _TAKEN.get()
        indices = [one for one in (*given, *named.values()) if isinstance(one, Tensor) and not one.is_floating_point()]
        if taken is not None and len(indices) == 1 and indices[0].dim() == 2:
            taken[layer] = indices[0].detach()

    experts.register_forward_pre_hook(before, with_kwargs=True)
    return True


def by_lane(taken: Choices, layers: int, lanes: int) -> Tensor | None:
    """The choices of a forward by lane, int64 [lanes, layers, rows, taken]; None where there are none."""
    if not taken:
        return None
    some = next(iter(taken.values()))
    if len(some) % lanes or any(one.shape != some.shape for one in taken.values()):
        return None
    missing = torch.full_like(some, -1)
    stacked = torch.stack([taken.get(layer, missing) for layer in range(layers)])
    return stacked.reshape(layers, lanes, -1, some.shape[1]).movedim(1, 0).cpu()
