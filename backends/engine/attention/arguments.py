"""The check of the arguments that a transformers model passes to attention.

Every argument is either computed by the engine, or listed here as having no effect, with the reason, or refused by
name. So no feature of a model is dropped in silence.
"""

from typing import Any

import torch
from torch import Tensor, nn

from specverify.backends.base import Unsupported
from specverify.backends.engine.reach import Reach

INERT = {
    "position_ids": "the engine gives them itself, and rotary embedding and the masks have used them already",
    "cache_position": "transformers 5.0 counts cached rows with it; the engine's caches know their own length",
    "is_causal": "the engine brings a mask that says of every row and column whether the row sees the column",
    "use_cache": "keys and values have been written to the engine's cache before attention is called",
    "return_dict": "it names the class of what the model returns, not a number in it",
    "output_hidden_states": "it asks for a copy of what the layers return anyway",
    "output_router_logits": "it asks for a copy of what the routers return anyway",
}
"""Arguments that have no effect on the engine's attention, whatever their value, each with the reason."""

INERT_VALUES: dict[str, tuple[Any, str]] = {
    "dropout": (0.0, "a model that is not in training drops nothing"),
    "output_attentions": (False, "the engine returns no weights, so it must not be asked for them"),
}
"""Arguments without effect at one value alone: that value, and the reason. None is accepted for every argument."""

SINKS = "attention sinks, which take a share of each softmax"
BIAS = "numbers added to the scores"
CHOSEN = "a choice of columns made for each row"

ARGUMENT_MEANINGS = {
    "s_aux": SINKS,
    "sinks": SINKS,
    "position_bias": BIAS,
    "attention_bias": BIAS,
    "alibi": BIAS,
    "head_mask": "a factor for each head",
    "indices": CHOSEN,
    "block_indices": CHOSEN,
}
"""The meaning of some arguments that the engine does not compute, for the message that refuses them."""


def refuse_unknown(module: nn.Module, named_arguments: dict[str, Any]) -> None:
    """Refuse every argument in `named_arguments` that would change attention and that the engine does not compute.

    Raises:
        Unsupported: with the class of `module` and the name of the argument.
    """
    for name, value in named_arguments.items():
        if value is None or name in INERT:
            continue
        if name in INERT_VALUES and value == INERT_VALUES[name][0]:
            continue
        meaning = f" ({ARGUMENT_MEANINGS[name]})" if name in ARGUMENT_MEANINGS else ""
        raise Unsupported(
            f"{type(module).__name__} hands the argument {name}{meaning} to attention, "
            "and this engine's attention does not compute it"
        )


def refuse_other_window(module: nn.Module, layer: int, window: int | None, reach: Reach) -> None:
    """Refuse a layer whose sliding window differs from the window in the engine's masks.

    Args:
        module: The attention module of the layer.
        layer: The index of the layer.
        window: The window in tokens that the module passes to attention, or None for no window.
        reach: The reach with which the engine made the masks of the layer.

    Raises:
        Unsupported: with the class of `module`, the layer and both windows.
    """
    if (window or 0) != reach.window:
        raise Unsupported(
            f"{type(module).__name__} of layer {layer} asks for a sliding_window of {window}, "
            f"and config.json as this engine reads it gives that layer {reach.window or None}"
        )


def refuse_other_mask(module: nn.Module, mask: Tensor | None) -> None:
    """Refuse a mask that is not boolean: the engine passes a boolean mask, so the model has replaced or changed it.

    Raises:
        Unsupported: with the class of `module`.
    """
    if mask is None or mask.dtype != torch.bool:
        mask_text = "no attention_mask" if mask is None else f"an attention_mask of {mask.dtype}"
        raise Unsupported(
            f"{type(module).__name__} hands {mask_text} to attention in place of the engine's boolean mask: "
            "this engine's attention does not compute biases, and makes no mask of its own"
        )
