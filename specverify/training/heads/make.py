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
from specverify.training.plan import TrainingPlan
from specverify.training.target import Target, states_of


def _layer_sizes(target: Target) -> HeadLayer:
    try:
        return sizes_of(target.config)
    except (AttributeError, ValueError) as why:
        raise UnusableInput(f"{target.directory}: no sizes of a Llama layer for the head ({why})") from None


def make_head(plan: TrainingPlan, target: Target, named: Tensor | None) -> TrainedHead:
    """The head of `plan` on `target`.

    Where the target's last layer has the usual names and shapes, an EAGLE head begins with it: attention reads the
    state by the layer's own projections, and the token by small random ones. The layer of an EAGLE-1 head, whose
    output is a state after the last norm, writes nothing at first.

    Args:
        plan: The plan.
        target: The target.
        named: The target ids of an EAGLE-3 head's vocabulary, ascending, int64 [V]; None for other kinds.

    Raises:
        UnusableInput: The target has too few layers, or no layer of the sizes that the head takes over.
    """
    torch.manual_seed(plan.seed)
    if plan.kind == MedusaModule.kind:
        return MedusaModule(plan.heads, target.embedding, target.head).to(target.device)
    sizes = _layer_sizes(target)
    head: LayerHeadModule
    hidden = target.embedding.shape[1]
    with torch.no_grad():
        if plan.kind == Eagle1Module.kind:
            head = Eagle1Module(
                sizes,
                target.embedding,
                target.head,
                layers=plan.layers,
                unrotated=plan.unrotated,
                experts=plan.experts,
                taken=plan.experts_per_token,
            )
            head.fc.weight.normal_(std=0.1 * hidden**-0.5)
            head.fc.weight[:, hidden:] += torch.eye(hidden)
            head.fc.bias.zero_()
            begin_with(head.layer, target.last_layer, 0)
            # The head begins with the state that it reads as its output. The target's layer writes in units of the
            # stream, which the last norm shrinks: in SmolLM2 what it adds is some hundred times the normed state.
            for projection in (head.layer.o_proj, head.layer.feed_forward.block.down_proj):
                torch.nn.init.zeros_(projection.weight)
        else:
            assert named is not None
            reads = states_of(plan.kind, target.layers, plan.layers)
            head = Eagle3Module(sizes, reads, named, target.embedding, target.head, layers=plan.layers)
            head.fc.weight.normal_(std=0.1 * (3 * hidden) ** -0.5)
            head.fc.weight[:, -hidden:] += torch.eye(hidden)
            if begin_with(head.layer, target.last_layer, hidden):
                before = getattr(getattr(target.last_layer, "input_layernorm", None), "weight", None)
                for norm, weight in ((head.hidden_norm, before), (head.norm, target.last_norm)):
                    if weight is not None and weight.shape == norm.weight.shape:
                        norm.weight.copy_(weight)
            head.lm_head.weight.copy_(target.head[named])
    return head.to(target.device)
