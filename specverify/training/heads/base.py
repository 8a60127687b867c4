"""The base of trained heads, and the batch of texts on which a loss is computed."""

from abc import ABC, abstractmethod
from dataclasses import dataclass
from typing import Any, ClassVar

import torch
from torch import Tensor, nn
from torch.nn import functional

from specverify.reference.draft.hidden import HiddenStates

DECAY = 0.8
"""The weight of a step or of a Medusa head over that of the one before, as in the published trainings."""


@dataclass(frozen=True)
class Batch:
    """Texts side by side, padded on the right.

    Attributes:
        tokens: int64 [B, T].
        states: The states that the head reads, [B, T, width].
        last: The output of the target's last norm, [B, T, hidden].
        lengths: int64 [B]; the tokens of each text.
        firsts: int64 [B]; the first row of each text that is learned, at most the length less 2.
    """

    tokens: Tensor
    states: Tensor
    last: Tensor
    lengths: Tensor
    firsts: Tensor

    def rows(self) -> tuple[Tensor, Tensor]:
        """The learned rows int64 [B, R], which are padded with repeats of row 0, and bool [B, R]: true for learned."""
        counts = self.lengths - 1 - self.firsts
        places = torch.arange(int(counts.max()), device=counts.device)[None] + self.firsts[:, None]
        real = places < (self.lengths - 1)[:, None]
        return torch.where(real, places, 0), real


class OpenedHead(ABC):
    """A head that drafts for several texts at once, whose true states are known.

    The first tokens of all texts are prompts, and the pending root of text b may be any token but the first.
    """

    @abstractmethod
    def root(self, roots: Tensor) -> Tensor:
        """Begin a tree for each text under the token at position `roots` int64 [B]; the root's scores [B, V]."""

    @abstractmethod
    def level(self, tokens: Tensor, parents: Tensor) -> Tensor:
        """The scores [B, F, V] of the nodes of the next level.

        Args:
            tokens: Target ids int64 [B, F].
            parents: The number of each node's parent within the level above, int64 [B, F]; 0 below the root.
        """


class TrainedHead(nn.Module, ABC):
    """A head under training on a frozen target.

    Attributes:
        kind: The tag of the kind.
        reads: The target's states that the head reads.
        embedding: The target's embedding [vocabulary, hidden], float32, which is no parameter of the head.
        target_head: The target's head [vocabulary, hidden], float32, likewise.
        levels: Most levels below the root that the head can score; None for any number.
    """

    levels: int | None = None
    kind: ClassVar[str]
    reads: HiddenStates
    embedding: Tensor
    target_head: Tensor

    def __init__(self, embedding: Tensor, target_head: Tensor) -> None:
        super().__init__()
        # Not persistent: the target's matrices are no part of the head's state.
        self.register_buffer("embedding", embedding, persistent=False)
        self.register_buffer("target_head", target_head, persistent=False)

    @abstractmethod
    def forward(self, batch: Batch, steps: int) -> Tensor:
        """The loss, a scalar float32, with `steps` steps of the training-time test where the kind has one."""

    @abstractmethod
    def open(self, tokens: Tensor, states: Tensor) -> OpenedHead:
        """The head, ready to draft for texts int64 [B, T] whose states [B, T, width] are the target's."""

    @abstractmethod
    def parameters_by_name(self) -> dict[str, Tensor]:
        """Every parameter of the head by its published name."""

    def stored_name(self, name: str) -> str:
        """The name of a weight in the head's files."""
        return name

    def published_tensors(self) -> dict[str, Tensor]:
        """The tensors of the head by their names in published checkpoints."""
        return {
            self.stored_name(name): parameter.detach().clone() for name, parameter in self.parameters_by_name().items()
        }

    @torch.no_grad()
    def load_published(self, tensors: dict[str, Tensor]) -> None:
        """Take the weights of `published_tensors` over."""
        for name, parameter in self.parameters_by_name().items():
            parameter.copy_(tensors[self.stored_name(name)])

    @abstractmethod
    def config(self, target: dict[str, Any]) -> dict[str, Any]:
        """The config.json of the published layout for a target with the configuration `target`."""

    def names(self) -> Tensor:
        """The target id of each id that the head scores, int64 [V]."""
        return torch.arange(len(self.target_head), device=self.target_head.device)


def soft_cross_entropy(scores: Tensor, teacher: Tensor, weight: Tensor) -> Tensor:
    """The mean cross-entropy of scores [..., V] against the law of `teacher` [..., V], rows weighted by `weight` [...].

    Both are softmaxes over the last axis in float32. Rows of weight 0 do not count.
    """
    law = functional.softmax(teacher.float(), -1)
    by_row = -(law * functional.log_softmax(scores.float(), -1)).sum(-1)
    return (by_row * weight).sum() / weight.sum().clamp(min=1)


def at_rows(tensor: Tensor, rows: Tensor) -> Tensor:
    """Rows int64 [B, R] of a tensor [B, T, ...]: [B, R, ...]."""
    index = rows.reshape(*rows.shape, *[1] * (tensor.ndim - 2)).expand(*rows.shape, *tensor.shape[2:])
    return tensor.gather(1, index)
