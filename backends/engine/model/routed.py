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

_CHOICES: ContextVar[Choices | None] = ContextVar("_CHOICES", default=None)
"""Where the forward of this thread puts its choices; None where nobody asks."""


class ExpertTap:
    """Listeners at the experts of a transformers model, which stay.

    Attributes:
        layers: Number of layers.
        present: Whether any layer has experts.
    """

    def __init__(self, model: Any) -> None:
        decoders = decoder_layers(model)
        self.layers = len(decoders)
        self.present = False
        for number, layer in enumerate(decoders):
            for block in layer.modules():
                self.present |= _listen(block, number)

    @contextmanager
    def on(self) -> Iterator[Choices]:
        """The choices of the forwards that this thread runs inside the `with`; a later forward replaces them."""
        choices: Choices = {}
        token = _CHOICES.set(choices)
        try:
            yield choices
        finally:
            _CHOICES.reset(token)


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

        def store_choices(module: Any, _: Any, output: Any) -> None:
            choices = _CHOICES.get()
            if choices is not None:
                choices[layer] = output[0].topk(module.top_k, dim=-1)[1].detach()

        router.register_forward_hook(store_choices)
        return True

    def store_indices(_: Any, arguments: tuple[Any, ...], named_arguments: dict[str, Any]) -> None:
        choices = _CHOICES.get()
        indices = [
            argument
            for argument in (*arguments, *named_arguments.values())
            if isinstance(argument, Tensor) and not argument.is_floating_point()
        ]
        if choices is not None and len(indices) == 1 and indices[0].dim() == 2:
            choices[layer] = indices[0].detach()

    experts.register_forward_pre_hook(store_indices, with_kwargs=True)
    return True


def by_lane(choices: Choices, layers: int, lanes: int) -> Tensor | None:
    """The choices of a forward by lane, int64 [lanes, layers, rows, taken]; None where there are none."""
    if not choices:
        return None
    first_choices = next(iter(choices.values()))
    if len(first_choices) % lanes or any(
        layer_choices.shape != first_choices.shape for layer_choices in choices.values()
    ):
        return None
    no_choices = torch.full_like(first_choices, -1)
    stacked = torch.stack([choices.get(layer, no_choices) for layer in range(layers)])
    return stacked.reshape(layers, lanes, -1, first_choices.shape[1]).movedim(1, 0).cpu()
