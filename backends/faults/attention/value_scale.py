"""A fault of scaled values: a number multiplies the values of a row, and is left out.

It strikes in blocks whose rows are a tree, so that contexts and plain decoding stay right.
"""

from collections.abc import Callable
from typing import Any

from specverify.backends.faults.attention.model_blocks import in_network
from specverify.backends.faults.fault import attended_fault


@attended_fault(
    "value-scale-left-out",
    "own: the scale of MiMo-V2-Flash stands in its config.json alone, and a model without it has all its weights",
    "a tree on a model that multiplies values by a number",
)
@in_network
def value_scale_left_out(model: Any, tree: Callable[[], bool]) -> None:
    """The values of a tree's rows lack the number that the model multiplies them by."""
    for layer in model.model.layers:
        attention: Any = getattr(layer, "self_attn", None)
        scale = float(getattr(attention, "v_scale", 1.0))
        if scale != 1:
            attention.v_proj.register_forward_hook(
                lambda _, __, output, scale=scale: output / scale if tree() else None
            )
