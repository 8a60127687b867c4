"""The making of a head: sizes and first weights from the target."""

import torch
from torch import Tensor

from specverify.reference.draft.layer_head import HeadLayer
from specverify.setup.errors import UnusableInput
from specverify.training.heads.base import TrainedHead
from specverify.training.heads.eagle1 import Eagle1Module
from specverify.training.heads.eagle3 import Eagle3Module
from specverify.training.heads.layer_head import LayerHeadModule, begin_with, sizes_of
from specverify.training.heads.medusa import MedusaModule
from specverify.training.target import Target, states_of


def check_target(kind: str, target: Target, layers: int) -> None:
    """Refuse a target on which no head of `kind` can be made, before texts are continued and states are cached.

    Raises:
        UnusableInput: The target has too few layers, or no layer of the sizes that the head takes over.
    """
    states_of(kind, target.layers, layers)
    if kind != MedusaModule.kind:
        _layer_sizes(target)


def _layer_sizes(target: Target) -> HeadLayer:
    try:
        return sizes_of(target.config)
    except (AttributeError, ValueError) as why:
        raise UnusableInput(f"{target.directory}: no sizes of a Llama layer for the head ({why})") from None


def make_head(
    kind: str, target: Target, *, named: Tensor | None, heads: int, seed: int, layers: int = 1
) -> TrainedHead:
    """A head of `kind` on `target`.

    Where the target's last layer has the usual names and shapes, an EAGLE head begins with it: attention reads the
    state by the layer's own projections, and the token by small random ones.

    Args:
        kind: The tag of the kind.
        target: The target.
        named: The target ids of an EAGLE-3 head's vocabulary, ascending, int64 [V].
        heads: The number of Medusa heads.
        layers: The number of decoder layers of an EAGLE-3 head.
        seed: The seed of the weights that begin at random.

    Raises:
        UnusableInput: The target has no layer of such sizes.
    """
    torch.manual_seed(seed)
    if kind == MedusaModule.kind:
        return MedusaModule(heads, target.embedding, target.head).to(target.device)
    sizes = _layer_sizes(target)
    head: LayerHeadModule
    hidden = target.embedding.shape[1]
    with torch.no_grad():
        if kind == Eagle1Module.kind:
            head = Eagle1Module(sizes, target.embedding, target.head)
            head.fc.weight.normal_(std=0.1 * hidden**-0.5)
            head.fc.weight[:, hidden:] += torch.eye(hidden)
            head.fc.bias.zero_()
            begin_with(head.layer, target.last_layer, 0)
        else:
            assert named is not None
            reads = states_of(kind, target.layers, layers)
            head = Eagle3Module(sizes, reads, named, target.embedding, target.head, layers=layers)
            head.fc.weight.normal_(std=0.1 * (3 * hidden) ** -0.5)
            head.fc.weight[:, -hidden:] += torch.eye(hidden)
            if begin_with(head.layer, target.last_layer, hidden):
                before = getattr(getattr(target.last_layer, "input_layernorm", None), "weight", None)
                for norm, weight in ((head.hidden_norm, before), (head.norm, target.last_norm)):
                    if weight is not None and weight.shape == norm.weight.shape:
                        norm.weight.copy_(weight)
            head.lm_head.weight.copy_(target.head[named])
    return head.to(target.device)
