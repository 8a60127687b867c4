"""The examination of a checkpoint's model by one small forward.

It runs before any case. A model whose layers or caches do not fit the engine is refused with the reason.
"""

from typing import Any

import torch
from torch import Tensor

from specverify.backends.base import Unsupported
from specverify.backends.engine.attention.eager import eager
from specverify.backends.engine.columns import AttentionInputs
from specverify.backends.engine.kv.base import CacheSpec
from specverify.backends.engine.kv.branch import Branch
from specverify.backends.engine.kv.lanes import BatchCache
from specverify.backends.engine.model.causal_lm import CausalLm, Rows, causal

ROWS = 3
"""The number of rows of the forward: one that sees itself alone, and two that see further rows."""


class _WriteRecorder(BatchCache):
    """A batch cache that records which layer writes keys and values, and their shapes.

    Attributes:
        shapes: For each call, the layer, and the shapes [B, heads, rows, head_dim] of keys and values.
    """

    def __init__(self, caches: list[Any], rows: list[int], filler: float = 0.0) -> None:
        super().__init__(caches, rows, filler)
        self.shapes: list[tuple[int, tuple[int, ...], tuple[int, ...]]] = []

    def update(self, key_states: Tensor, value_states: Tensor, layer_idx: int, *_: Any, **__: Any) -> tuple[Any, Any]:
        """Record the call, and return this forward's rows, since no column is committed before them."""
        self.shapes.append((layer_idx, tuple(key_states.shape), tuple(value_states.shape)))
        return key_states, value_states


def examine(model: CausalLm) -> None:
    """Run three rows through `model` with eager attention, and refuse a model that the engine cannot run.

    Raises:
        Unsupported: if layers have no KV cache of the engine's shape, if they do not call the engine's attention, if
            attention is passed an argument that the engine does not compute, or if the logits have another shape.
    """
    attended: list[Tensor] = []
    lanes: list[_WriteRecorder] = []

    def watched(query: Tensor, columns: AttentionInputs, scaling: float) -> Tensor:
        # Before attention runs, so that the refusal names the shapes and not an error of a matrix product.
        written = [shapes for shapes in lanes[0].shapes if shapes[0] not in model.columnless]
        _refuse_shapes(written[-1], room)
        attended.append(query)
        return eager(query, columns, scaling)

    # A class, because `forward` makes the batch cache itself; the instance is noted for the checks below.
    class Watching(_WriteRecorder):
        def __init__(self, caches: list[Any], rows: list[int], filler: float = 0.0) -> None:
            super().__init__(caches, rows, filler)
            lanes.append(self)

    room = model.room(ROWS, ROWS)
    rows = torch.arange(ROWS)
    vocabulary = model.model.config.vocab_size
    examined_rows = Rows(rows % vocabulary, rows, causal(rows, model.reaches), Branch(room, "path"))
    (logits,) = model.forward([examined_rows], watched, lanes=Watching)
    attending = room.layers - len(model.unattended)
    if len(attended) != attending:
        raise Unsupported(
            f"{len(attended)} of {attending} layers call attention through transformers' attention interface, "
            "where this engine's attention takes its place"
        )
    layers = sorted(layer for layer, _, _ in lanes[0].shapes)
    if layers != list(range(room.layers)):
        raise Unsupported(f"layers {layers} write keys and values, where this engine caches those of each layer once")
    if logits.shape != (ROWS, vocabulary):
        raise Unsupported(f"its logits for {ROWS} rows have shape {list(logits.shape)}, not [{ROWS}, {vocabulary}]")


def _refuse_shapes(shapes: tuple[int, tuple[int, ...], tuple[int, ...]], room: CacheSpec) -> None:
    """Raise Unsupported if the keys or values of a layer do not have the shape that a cache of `room` holds."""
    layer, *layer_shapes = shapes
    heads, widths = room.sizes(layer)
    for word, shape, width in zip(("keys", "values"), layer_shapes, widths, strict=True):
        expected_shape = (1, heads, ROWS, width)
        if shape != expected_shape:
            raise Unsupported(
                f"layer {layer} caches {word} of shape {list(shape)}, and this engine's caches hold keys and values "
                f"of every head, here {list(expected_shape)}; of multi-head latent attention (MLA), it knows "
                "DeepSeek-V2 and V3"
            )


def examine_and_open(network: Any, device: str) -> CausalLm:
    """Examine the transformers model `network` of a checkpoint, and return it as a `CausalLm` on `device`.

    Raises:
        Unsupported: if `examine` refuses the model, or if its forward raises an exception; the message gives the class
            of the model and the reason, in one line.
    """
    name = type(network).__name__
    try:
        examine(CausalLm(network, device))
    except Unsupported as error:
        raise Unsupported(f"{name}: {error}") from error
    except Exception as error:  # the code of any family runs here; any exception is a reason to refuse the model
        line = " ".join(str(error).split())[:200]
        raise Unsupported(f"{name}: this engine cannot run it ({type(error).__name__}: {line})") from error
    # A new object, so that the examination does not count in its clock and counters.
    return CausalLm(network, device)
