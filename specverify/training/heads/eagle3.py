"""The EAGLE-3 head under training."""

from typing import Any

import torch
from torch import Tensor, nn

from specverify.reference.draft.eagle3 import LAYER_PREFIX
from specverify.reference.draft.hidden import HiddenStates
from specverify.reference.draft.layer_head import HeadLayer
from specverify.training.heads.base import DECAY, Batch, at_rows, soft_cross_entropy
from specverify.training.heads.layer import DecoderLayer, FurtherLayer, Norm
from specverify.training.heads.layer_head import LayerHeadModule


class Eagle3Module(LayerHeadModule):
    """An EAGLE-3 head (arXiv 2503.01840).

    The loss is the soft cross-entropy over the draft vocabulary, against the target's law there, over the steps of the
    training-time test; step k weighs DECAY ** k. A row that is followed by a token outside the vocabulary does not
    count.

    Args:
        sizes: The sizes of the layer.
        reads: The target's states that `fc` fuses.
        named: The target ids of the draft vocabulary, int64 [V], ascending.
        embedding: The target's embedding, [vocabulary, hidden].
        target_head: The target's head, [vocabulary, hidden].
        layers: The number of decoder layers.
    """

    kind = "eagle3"
    prefix = LAYER_PREFIX
    named: Tensor

    def __init__(
        self,
        sizes: HeadLayer,
        reads: HiddenStates,
        named: Tensor,
        embedding: Tensor,
        target_head: Tensor,
        *,
        layers: int = 1,
    ) -> None:
        super().__init__(embedding, target_head)
        hidden = embedding.shape[1]
        self.reads = reads
        self.fc = nn.Linear(reads.parts * hidden, hidden, False)
        self.layer = DecoderLayer(sizes, 2 * hidden, hidden)
        self.further.extend(FurtherLayer(sizes, hidden) for _ in range(1, layers))
        self.input_layernorm, self.hidden_norm, self.norm = (Norm(hidden, sizes.norm_eps) for _ in range(3))
        self.lm_head = nn.Linear(hidden, len(named), False)
        self.register_buffer("named", named, persistent=False)
        self.register_buffer("taught", target_head[named].clone(), persistent=False)
        covered = torch.zeros(len(target_head), dtype=torch.bool)
        covered[named] = True
        self.register_buffer("covered", covered, persistent=False)

    def of_target(self, states: Tensor) -> Tensor:
        """See `LayerHeadModule`."""
        return self.fc(states)  # type: ignore[no-any-return]

    def attention_input(self, embedded: Tensor, states: Tensor) -> tuple[Tensor, Tensor]:
        """See `LayerHeadModule`."""
        return torch.cat([self.input_layernorm(embedded), self.hidden_norm(states)], -1), states

    def scores(self, outputs: Tensor) -> Tensor:
        """See `LayerHeadModule`."""
        return self.lm_head(self.norm(outputs))  # type: ignore[no-any-return]

    def forward(self, batch: Batch, steps: int) -> Tensor:
        """See `TrainedHead`."""
        with torch.no_grad():
            teacher = torch.nn.functional.linear(batch.last, self.get_buffer("taught"))
        loss = torch.zeros((), device=batch.last.device)
        for step, (outputs, rows, real) in enumerate(self.run(batch, steps)):
            # Row i of step k scores token i + 2 + k, as the target does at position i + 1 + k.
            taught = at_rows(teacher, torch.where(real, rows + 1 + step, 0))
            after = rows + 2 + step
            inside = after < batch.lengths[:, None]
            named = self.get_buffer("covered")[batch.tokens.gather(1, torch.where(inside, after, 0))] | ~inside
            loss = loss + DECAY**step * soft_cross_entropy(self.scores(outputs), taught, (real & named).float())
        return loss

    def parameters_by_name(self) -> dict[str, Tensor]:
        """See `TrainedHead`."""
        norms = {"input_layernorm": self.input_layernorm, "hidden_norm": self.hidden_norm}
        return {
            "fc.weight": self.fc.weight,
            **self.layer_tensors(),
            **{f"{LAYER_PREFIX}.{name}.weight": norm.weight for name, norm in norms.items()},
            "norm.weight": self.norm.weight,
            "lm_head.weight": self.lm_head.weight,
        }

    def stored_name(self, name: str) -> str:
        """See `TrainedHead`; only the layout that calls the first layer layers.0 has further ones."""
        return name.replace(f"{LAYER_PREFIX}.", "layers.0.") if self.further else name

    def published_tensors(self) -> dict[str, Tensor]:
        """See `TrainedHead`; `d2t` holds offsets, and `t2d` is true for each target id that the head can name."""
        named = self.named
        offsets = {"d2t": named - torch.arange(len(named), device=named.device), "t2d": self.get_buffer("covered")}
        return {**super().published_tensors(), **offsets}

    def config(self, target: dict[str, Any]) -> dict[str, Any]:
        """See `TrainedHead`."""
        fields = {"architectures": ["LlamaForCausalLMEagle3"], **self.layer_config(target)}
        layers, count = list(self.reads.layers), target["num_hidden_layers"]
        # Beside tensors named midlayer, the numbers are layers whose outputs are read; without them, the usual ones.
        # Beside tensors named layers.0 they are layers whose inputs are read.
        numbers = [number + 1 for number in layers] if self.further else layers
        layer_ids = {} if layers == [1, count // 2 - 1, count - 4] else {"eagle_aux_hidden_state_layer_ids": numbers}
        return {**fields, "draft_vocab_size": len(self.named), **layer_ids}

    def names(self) -> Tensor:
        """See `TrainedHead`."""
        return self.named
