"""Medusa heads under training."""

from typing import Any, cast

import torch
from torch import Tensor, nn
from torch.nn import functional

from specverify.reference.draft.hidden import HiddenStates
from specverify.reference.draft.medusa import HEADS_PREFIX
from specverify.training.heads.base import DECAY, Batch, OpenedHead, TrainedHead, at_rows, soft_cross_entropy


class MedusaModule(TrainedHead):
    """Medusa heads (arXiv 2401.10774), each a residual block and a matrix of its own.

    Head k learns, from the state at i, the law that the target has after token i + 1 + k, by cross-entropy; head k
    weighs DECAY ** k. `steps` does not matter.

    Args:
        heads: The number of heads.
        embedding: The target's embedding, [vocabulary, hidden].
        target_head: The target's head, [vocabulary, hidden], with which each head's matrix begins.
    """

    kind = "medusa"

    def __init__(self, heads: int, embedding: Tensor, target_head: Tensor) -> None:
        super().__init__(embedding, target_head)
        vocabulary, hidden = target_head.shape
        self.reads = HiddenStates(place="normed", shift=0)
        self.levels = heads
        self.blocks = nn.ModuleList(nn.Linear(hidden, hidden) for _ in range(heads))
        self.outs = nn.ModuleList(nn.Linear(hidden, vocabulary, False) for _ in range(heads))
        for block, out in self.pairs():
            nn.init.zeros_(block.weight)
            nn.init.zeros_(block.bias)
            with torch.no_grad():
                out.weight.copy_(target_head)

    def pairs(self) -> list[tuple[nn.Linear, nn.Linear]]:
        """The residual block and the matrix of each head."""
        return [cast("tuple[nn.Linear, nn.Linear]", pair) for pair in zip(self.blocks, self.outs, strict=True)]

    def guess(self, states: Tensor, head: int) -> Tensor:
        """The scores [..., vocabulary] of head number `head` for states [..., hidden]."""
        block, out = self.pairs()[head]
        scores: Tensor = out(states + functional.silu(block(states)))
        return scores

    def forward(self, batch: Batch, steps: int) -> Tensor:
        """See `TrainedHead`."""
        rows, real = batch.rows()
        states, loss = at_rows(batch.states, rows), torch.zeros((), device=batch.last.device)
        for head in range(len(self.blocks)):
            ahead = rows + 1 + head
            learned = real & (ahead < batch.lengths[:, None])
            with torch.no_grad():
                teacher_states = at_rows(batch.last, torch.where(learned, ahead, 0))
                taught = functional.linear(teacher_states, self.target_head)
            loss = loss + DECAY**head * soft_cross_entropy(self.guess(states, head), taught, learned.float())
        return loss

    def open(self, tokens: Tensor, states: Tensor) -> "OpenedMedusa":
        """See `TrainedHead`."""
        return OpenedMedusa(self, states)

    def parameters_by_name(self) -> dict[str, Tensor]:
        """See `TrainedHead`."""
        parameters: dict[str, Tensor] = {}
        for number, (block, out) in enumerate(self.pairs()):
            parameters[f"{HEADS_PREFIX}.{number}.0.linear.weight"] = block.weight
            parameters[f"{HEADS_PREFIX}.{number}.0.linear.bias"] = block.bias
            parameters[f"{HEADS_PREFIX}.{number}.1.weight"] = out.weight
        return parameters

    def config(self, target: dict[str, Any]) -> dict[str, Any]:
        """See `TrainedHead`."""
        return {
            "model_type": "medusa",
            "medusa_num_heads": len(self.blocks),
            "medusa_num_layers": 1,
            "hidden_size": self.target_head.shape[1],
            "vocab_size": len(self.target_head),
            "dtype": "float32",
        }


class OpenedMedusa(OpenedHead):
    """Medusa heads that draft: every level has the scores of its own head, whatever its nodes are."""

    def __init__(self, head: MedusaModule, states: Tensor) -> None:
        self.head = head
        self.states = states
        self.state = states[:, 0]
        self.depth = 0

    @torch.no_grad()
    def root(self, roots: Tensor) -> Tensor:
        """See `OpenedHead`."""
        self.state = at_rows(self.states, roots[:, None] - 1)[:, 0]
        self.depth = 0
        return self.head.guess(self.state, 0)

    @torch.no_grad()
    def level(self, tokens: Tensor, parents: Tensor) -> Tensor:
        """See `OpenedHead`; levels below the last head have no scores, and are never asked for."""
        self.depth += 1
        return self.head.guess(self.state, self.depth)[:, None].expand(-1, tokens.shape[1], -1)
