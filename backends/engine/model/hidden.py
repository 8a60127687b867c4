"""The tap that takes hidden states out of the target's forwards for a draft.

It uses hooks on the target's layers and on its last norm.
"""

from collections.abc import Iterator
from contextlib import ExitStack, contextmanager
from typing import Any

import torch
from torch import Tensor

from specverify.backends.base import Unsupported
from specverify.reference.draft.hidden import HiddenStates


class HiddenTap:
    """Hidden states of the rows of one forward.

    Attributes:
        descriptors: The states that the drafts of the batch read.
        states: For each descriptor, the hidden states of the forward, [B, T, width] in the working dtype.
    """

    def __init__(self, *descriptors: HiddenStates) -> None:
        self.descriptors = tuple(dict.fromkeys(descriptors))  # each descriptor once, in a fixed order
        self.states: dict[HiddenStates, Tensor] = {}

    @contextmanager
    def on(self, body: Any) -> Iterator[None]:
        """Inside the `with`, take hidden states from one forward of `body`, a transformers decoder without its head.

        Raises:
            Unsupported: if the model has no such layer, or no `layers` and `norm` like transformers' decoders.
        """
        # The base of a text model of several modalities (Llama 4) is the model with its head.
        body = body if hasattr(body, "layers") else getattr(body, "model", body)
        layers = getattr(body, "layers", None)
        norm = last_norm(body)
        if layers is None or norm is None:
            raise Unsupported(f"{type(body).__name__} has no layers and norm whose hidden states a draft could read")
        states: dict[int | str, Tensor] = {}
        places = {descriptor: self.places(descriptor, len(layers)) for descriptor in self.descriptors}
        with ExitStack() as hooks:
            for place in {place for descriptor_places in places.values() for place in descriptor_places}:
                if isinstance(place, str):
                    hooks.enter_context(_removing(norm.register_forward_hook(_storing_hook(states, place))))
                    continue
                if place >= len(layers):
                    descriptor_names = ", ".join(str(descriptor) for descriptor in self.descriptors)
                    raise Unsupported(
                        f"the draft reads the {descriptor_names}; the target has layers 0 to {len(layers) - 1}"
                    )
                hooks.enter_context(_layer_hook(layers, place, states))
            yield
        for descriptor, descriptor_places in places.items():
            self.states[descriptor] = torch.cat([states[place] for place in descriptor_places], dim=-1)

    def places(self, reads: HiddenStates, layers: int) -> list[int | str]:
        """The places of the states `reads` in a model of so many layers, in order.

        A number is the residual stream after that layer, -1 the input of the first; `normed` is the last norm's output.
        """
        return list(reads.layers) or ["normed"]


def last_norm(body: Any) -> Any:
    """The last norm of a transformers decoder, under the name of most, of LFM2 or of Falcon-H1; None if it has none."""
    names = ("norm", "embedding_norm", "final_layernorm")
    return next((getattr(body, name) for name in names if hasattr(body, name)), None)


def _layer_hook(layers: Any, place: int, states: dict[int | str, Tensor]) -> Any:
    """A hook that stores the residual stream after layer `place`; for -1, the input of the first layer."""
    if place >= 0:
        return _removing(layers[place].register_forward_hook(_storing_hook(states, place)))

    def store_input(_: Any, arguments: tuple[Any, ...], named_arguments: dict[str, Any]) -> None:
        states[-1] = arguments[0] if arguments else named_arguments["hidden_states"]

    return _removing(layers[0].register_forward_pre_hook(store_input, with_kwargs=True))


def _storing_hook(states: dict[int | str, Tensor], place: int | str) -> Any:
    def store_output(_: Any, __: Any, output: Any) -> None:
        # Layers of transformers 5 return the residual stream itself, other layers a tuple that begins with it.
        states[place] = output[0] if isinstance(output, tuple) else output

    return store_output


@contextmanager
def _removing(handle: Any) -> Iterator[None]:
    try:
        yield
    finally:
        handle.remove()
