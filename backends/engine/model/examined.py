"""Examines a checkpoint's model by one small forward before any case runs on it: what does not fit is declined."""

from typing import Any

import torch
from torch import Tensor

from backends.base import Unsupported
from backends.engine.attention.eager import eager
from backends.engine.columns import AttentionInputs
from backends.engine.kv.base import CacheSpec
from backends.engine.kv.branch import Branch
from backends.engine.kv.lanes import BatchCache
from backends.engine.model.causal_lm import CausalLm, Rows, causal

ROWS = 3
"""Rows of the forward: one that sees itself, and two that see more."""


class _Written(BatchCache):
    """Lanes that note which layer writes keys and values, and of which shapes.

    Attributes:
        shapes: For each call, the layer, and the shapes [B, heads, rows, numbers of a head] of keys and values.
    """

    def __init__(self, caches: list[Any], rows: list[int], filler: float = 0.0) -> None:
        super().__init__(caches, rows, filler)
        self.shapes: list[tuple[int, tuple[int, ...], tuple[int, ...]]] = []

    def update(self, key_states: Tensor, value_states: Tensor, layer_idx: int, *_: Any, **__: Any) -> tuple[Any, Any]:
        """Note the call, and hand this forward's rows to attention: nothing was committed before them."""
        self.shapes.append((layer_idx, tuple(key_states.shape), tuple(value_states.shape)))
        return key_states, value_states


def examine(model: CausalLm) -> None:
    """Run three rows through `model` with written-out attention, and refuse a model that the engine does not know.

    Raises:
        Unsupported: where layers have no KV cache of the engine's shape or do not reach the engine's attention, where
            attention is handed an argument that the engine does not compute, or where the forward breaks.
    """
    attended: list[Tensor] = []
    lanes: list[_Written] = []

    def watched(query: Tensor, columns: AttentionInputs, scaling: float) -> Tensor:
        _refuse_shapes(lanes[0].shapes[-1], room)
        attended.append(query)
        return eager(query, columns, scaling)

    class Watching(_Written):
        def __init__(self, caches: list[Any], rows: list[int], filler: float = 0.0) -> None:
            super().__init__(caches, rows, filler)
            lanes.append(self)

    room = model.room(ROWS, ROWS)
    rows = torch.arange(ROWS)
    vocabulary = model.model.config.vocab_size
    given = Rows(rows % vocabulary, rows, causal(rows, model.reaches), Branch(room, "path"))
    (logits,) = model.forward([given], watched, lanes=Watching)
    if len(attended) != room.layers:
        raise Unsupported(
            f"{len(attended)} of {room.layers} layers call attention through transformers' attention interface, "
            "where this engine's attention takes its place"
        )
    layers = [layer for layer, _, _ in lanes[0].shapes]
    if layers != list(range(room.layers)):
        raise Unsupported(f"layers {layers} write keys and values, where this engine caches those of each layer once")
    if logits.shape != (ROWS, vocabulary):
        raise Unsupported(f"its logits for {ROWS} rows have shape {list(logits.shape)}, not [{ROWS}, {vocabulary}]")


def _refuse_shapes(seen: tuple[int, tuple[int, ...], tuple[int, ...]], room: CacheSpec) -> None:
    """Raise Unsupported where the keys or values of a layer are not of the shape that a cache of `room` holds."""
    layer, *pair = seen
    wanted = (1, room.kv_heads, ROWS, room.head_dim)
    for word, shape in zip(("keys", "values"), pair, strict=True):
        if shape != wanted:
            raise Unsupported(
                f"layer {layer} caches {word} of shape {list(shape)}, and this engine's caches hold keys and values "
                f"alike, here {list(wanted)}; multi-head latent attention (MLA), for one, is not known to it"
            )


def opened(network: Any, device: str) -> CausalLm:
    """The transformers model `network` of a checkpoint, on `device`, after `examine`; its clock begins at zero.

    Raises:
        Unsupported: with the class of the model and the reason, in one line.
    """
    name = type(network).__name__
    try:
        examine(CausalLm(network, device))
    except Unsupported as why:
        raise Unsupported(f"{name}: {why}") from why
    except Exception as why:  # transformers' own code, of any family: whatever it raises is why the model is declined
        line = " ".join(str(why).split())[:200]
        raise Unsupported(f"{name}: this engine cannot run it ({type(why).__name__}: {line})") from why
    return CausalLm(network, device)
