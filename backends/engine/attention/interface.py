"""The engine's attention, reached through transformers' attention interface under the name below."""

from typing import TYPE_CHECKING, Any

from torch import Tensor, nn
from transformers import AttentionInterface, AttentionMaskInterface

from backends.engine.attention.columns import Attend

if TYPE_CHECKING:
    from backends.engine.kv.lanes import Lanes

INTERFACE = "specverify"
"""Name under which the engine's attention is registered with transformers."""


def through_interface(
    module: nn.Module,
    query: Tensor,
    key: Tensor,
    value: Tensor,
    attention_mask: Tensor,
    scaling: float,
    attend: Attend,
    lanes: "Lanes",
    logical: Tensor | None = None,
    **_: Any,
) -> tuple[Tensor, None]:
    """What transformers calls in each layer, with what `lanes.update` returned as `key` and `value`.

    `attend` and `lanes` travel with the forward, so that two engines never share one. A module with a `temperature`
    (Llama 4, see irope.py) has its queries scaled by the rows' positions, `logical`.
    """
    temperature = getattr(module, "temperature", None)
    if temperature is not None:
        query = temperature(query, logical)
    layer = module.layer_idx
    assert isinstance(layer, int)
    mixed = attend(query, lanes.columns(layer, key, value, attention_mask), scaling)
    return mixed.transpose(1, 2).contiguous(), None


def _mask_as_given(attention_mask: Tensor | None = None, **_: Any) -> Tensor | None:
    """Leave masks alone: every forward of the engine brings its own dense 4-D mask.

    Registered because transformers passes no mask at all to an attention function without a mask function.
    """
    return attention_mask


AttentionInterface.register(INTERFACE, through_interface)
AttentionMaskInterface.register(INTERFACE, _mask_as_given)
