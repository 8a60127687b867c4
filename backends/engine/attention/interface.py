"""The engine's entry in transformers' attention interface.

transformers calls `through_interface` in every layer of a model whose attention implementation is `INTERFACE`.
"""

from collections.abc import Iterator
from contextlib import contextmanager
from contextvars import ContextVar
from dataclasses import replace
from typing import TYPE_CHECKING, Any

from torch import Tensor, nn
from transformers import AttentionInterface, AttentionMaskInterface

from specverify.backends.engine.attention.arguments import refuse_other_mask, refuse_other_window, refuse_unknown
from specverify.backends.engine.columns import Attend
from specverify.backends.engine.reach import Reach

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
    **other_arguments: Any,
) -> tuple[Tensor, None]:
    """Run `attend` in one layer; transformers calls this function with the keys and values of `lanes.update`.

    Every attention path of every backend is reached through this function alone, so an argument that it refuses is
    refused for all paths. `attend`, `lanes` and `reaches` are arguments of the forward and not global, so that two
    engines in one process do not share them; for a model whose layers hand no arguments on (Nemotron, StableLM) they
    are those of `pass_arguments`. If the module has a `temperature` (Llama 4, see
    `model/family/llama4.py`), its queries are scaled by the rows' positions, `logical` or `position_ids`. A soft cap
    of the scores, `softcap`, and the sink of each head, `s_aux`, are passed on in the columns: a path computes them or
    refuses them. A module with latent attention has `absorbed`, which is passed on where the cache holds latent rows.

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
    columns = lanes.columns(layer, key, value, attention_mask)
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


def _unchanged_mask(attention_mask: Tensor | None = None, **_: Any) -> Tensor | None:
    """Return the mask unchanged: every forward of the engine brings its own dense 4-D mask.

    It is registered because transformers passes no mask to an attention function that has no mask function.
    """
    return attention_mask


AttentionInterface.register(INTERFACE, through_interface)
AttentionMaskInterface.register(INTERFACE, _unchanged_mask)
