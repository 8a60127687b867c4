"""The engine's entry in transformers' attention interface.

transformers calls `through_interface` in every layer of a model whose attention implementation is `INTERFACE`. Every
argument is either computed by the engine, or listed here as having no effect, with the reason, or refused by name. So
no feature of a model is dropped in silence.
"""

from collections.abc import Iterator
from contextlib import contextmanager
from contextvars import ContextVar
from dataclasses import replace
from typing import TYPE_CHECKING, Any

import torch
from torch import Tensor, nn
from transformers import AttentionInterface, AttentionMaskInterface

from specverify.backends.base import Unsupported
from specverify.backends.engine.attention.chosen_columns import note_columns
from specverify.backends.engine.columns import Attend
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
    """Refuse a layer whose sliding window, in tokens or None, differs from the window in the engine's masks.

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


if TYPE_CHECKING:
    from specverify.backends.engine.kv.lanes import BatchCache

INTERFACE = "specverify"
"""Name under which the engine's attention is registered with transformers."""


_PASSED_ARGUMENTS: ContextVar[tuple[Attend, "BatchCache", list[Reach]]] = ContextVar("_PASSED_ARGUMENTS")
"""The arguments of `pass_arguments`; a context belongs to one thread."""


@contextmanager
def pass_arguments(attend: Attend, lanes: "BatchCache", reaches: list[Reach]) -> Iterator[None]:
    """Inside the `with`, the forward of this thread has these for layers that hand no arguments on to attention."""
    token = _PASSED_ARGUMENTS.set((attend, lanes, reaches))
    try:
        yield
    finally:
        _PASSED_ARGUMENTS.reset(token)


def through_interface(
    module: nn.Module,
    query: Tensor,
    key: Tensor,
    value: Tensor,
    attention_mask: Tensor,
    scaling: float,
    attend: Attend | None = None,
    lanes: "BatchCache | None" = None,
    reaches: list[Reach] | None = None,
    logical: Tensor | None = None,
    sliding_window: int | None = None,
    softcap: float | None = None,
    s_aux: Tensor | None = None,
    indices: Tensor | None = None,
    **other_arguments: Any,
) -> tuple[Tensor, None]:
    """Run `attend` in one layer; transformers calls this function with the keys and values of `lanes.update`.

    Every attention path of every backend is reached through this function alone, so an argument that it refuses is
    refused for all paths. `attend`, `lanes` and `reaches` are arguments of the forward and not global, so that two
    engines in one process do not share them; for a model whose layers hand no arguments on (Nemotron, StableLM) they
    are those of `pass_arguments`. If the module has a `temperature` (Llama 4, see
    `model/family/llama4.py`), its queries are scaled by the rows' positions, `logical` or `position_ids`. A soft cap
    of the scores, `softcap`, and the sink of each head, `s_aux`, are passed on in the columns: a path computes them or
    refuses them. `indices`, the columns that an indexer chose for each row, hide all others. A module with latent
    attention has `absorbed`, which is passed on where the cache holds latent rows.

    Raises:
        Unsupported: for an argument that this attention does not compute, a mask that the model has changed, or a
            window other than that of `reaches`.
    """
    if attend is None or lanes is None or reaches is None:
        attend, lanes, reaches = _PASSED_ARGUMENTS.get()
    refuse_unknown(module, other_arguments)
    refuse_other_mask(module, attention_mask)
    temperature = getattr(module, "temperature", None)
    if temperature is not None:
        query = temperature(query, other_arguments.get("position_ids") if logical is None else logical)
    layer = module.layer_idx
    assert isinstance(layer, int)
    refuse_other_window(module, layer, sliding_window, reaches[layer])
    if indices is not None:
        attention_mask = attention_mask & chosen_mask(attention_mask, indices)
        note_columns(layer, attention_mask)
    columns = lanes.columns(layer, key, value, attention_mask)
    if indices is not None:
        columns = replace(columns, indexed=True, paging=None)  # pages hold index keys behind the keys
    if softcap:
        columns = replace(columns, cap=float(softcap))
    if s_aux is not None:
        columns = replace(columns, sinks=s_aux)
    absorbed = getattr(module, "absorbed", None)
    if absorbed is not None and lanes.latent:
        columns = replace(columns, absorbed=absorbed)
    output = attend(query, columns, scaling)
    # transformers expects [B, T, H, D], and weights, which only output_attentions asks for.
    return output.transpose(1, 2).contiguous(), None


def chosen_mask(mask: Tensor, indices: Tensor) -> Tensor:
    """The columns `indices` [B, T, k] of each row as a mask of the shape of `mask`, [B, 1, T, C]."""
    return torch.zeros_like(mask, dtype=torch.bool).scatter(-1, indices.long()[:, None], True)


def _unchanged_mask(attention_mask: Tensor | None = None, **_: Any) -> Tensor | None:
    """Return the mask unchanged: every forward of the engine brings its own dense 4-D mask.

    It is registered because transformers passes no mask to an attention function that has no mask function.
    """
    return attention_mask


AttentionInterface.register(INTERFACE, through_interface)
AttentionMaskInterface.register(INTERFACE, _unchanged_mask)
