"""The EAGLE-1 head under training."""

from typing import Any

import torch
from torch import Tensor, nn
from torch.nn import functional

from specverify.reference.draft.eagle1 import LAYER_PREFIX
from specverify.reference.draft.hidden import HiddenStates
from specverify.reference.draft.layer_head import HeadLayer
from specverify.training.heads.base import Batch, at_rows, soft_cross_entropy
from specverify.training.heads.layer import DecoderLayer, FurtherLayer
from specverify.training.heads.layer_head import LayerHeadModule

STATE, LAW = 1.0, 0.1
"""The weights of the two losses (arXiv 2401.15077 and 2508.08192): smooth L1 to the next state, cross-entropy to the
target's law."""


class Eagle1Module(LayerHeadModule):
    """An EAGLE-1 head (arXiv 2401.15077), or one with more layers, iRoPE or experts (arXiv 2508.08192, section 2).

    The output of row i learns the state at i + 1, after the target's last norm. `steps` does not matter: EAGLE-1 learns
    from true states alone.

    Args:
        sizes: The sizes of each layer.
        embedding: The target's embedding, [vocabulary, hidden].
        target_head: The target's head, [vocabulary, hidden].
        layers: The number of decoder layers.
        unrotated: The layers without rotary embedding, ascending.
        experts: The number of experts of each layer; 0 for a gated block in their place.
        taken: The number of experts that a row goes through, beside the shared one.
    """

    kind = "eagle1"
    prefix = LAYER_PREFIX

    def __init__(
        self,
        sizes: HeadLayer,
        embedding: Tensor,
        target_head: Tensor,
        *,
        layers: int = 1,
        unrotated: tuple[int, ...] = (),
        experts: int = 0,
        taken: int = 1,
    ) -> None:
        super().__init__(embedding, target_head)
        hidden = embedding.shape[1]
        self.reads = HiddenStates(place="normed", shift=1)
        self.fc = nn.Linear(2 * hidden, hidden, True)
        self.unrotated = unrotated
        self.experts, self.taken = experts, taken
        self.layer = DecoderLayer(sizes, hidden, hidden, rotated=0 not in unrotated, experts=experts, taken=taken)
        self.further.extend(
            FurtherLayer(sizes, hidden, rotated=number not in unrotated, experts=experts, taken=taken)
            for number in range(1, layers)
        )

    def of_target(self, states: Tensor) -> Tensor:
        """See `LayerHeadModule`."""
        return states

    def attention_input(self, embedded: Tensor, states: Tensor) -> tuple[Tensor, Tensor]:
        """See `LayerHeadModule`."""
        x = self.fc(torch.cat([embedded, states.to(embedded.dtype)], -1))
        return x, x

    def scores(self, outputs: Tensor) -> Tensor:
        """See `LayerHeadModule`."""
        return functional.linear(outputs, self.target_head)

    def forward(self, batch: Batch, steps: int) -> Tensor:
        """See `TrainedHead`."""
        outputs, rows, real = next(self.run(batch, 1))
        next_states = at_rows(batch.last, torch.where(real, rows + 1, 0))
        weight = real.float()
        by_row = functional.smooth_l1_loss(outputs.float(), next_states.float(), reduction="none").mean(-1)
        state = (by_row * weight).sum() / weight.sum().clamp(min=1)
        with torch.no_grad():
            taught = functional.linear(next_states, self.target_head)
        return STATE * state + LAW * soft_cross_entropy(self.scores(outputs), taught, weight)

    def parameters_by_name(self) -> dict[str, Tensor]:
        """See `TrainedHead`."""
        bias = self.fc.bias
        assert bias is not None
        return {"fc.weight": self.fc.weight, "fc.bias": bias, **self.layer_tensors()}

    def config(self, target: dict[str, Any]) -> dict[str, Any]:
        """See `TrainedHead`."""
        fields = {"architectures": ["LlamaForCausalLM"], **self.layer_config(target), "bias": True}
        if self.unrotated:
            fields["no_rope_layers"] = [int(number not in self.unrotated) for number in range(len(self.layers))]
        if self.experts:
            fields |= {"num_local_experts": self.experts, "num_experts_per_tok": self.taken}
        return fields
