"""The records that the phases of a step hand to one another.

`Block` stands between drafting and the verify forward, `Verification` between acceptance and commit, `Emission` after
the stop rules.
"""

from dataclasses import dataclass, field

import torch
from torch import Tensor

from specverify.backends.engine.draft.base import Proposal
from specverify.backends.engine.lower_tree import TreeTensors
from specverify.backends.engine.sampling.step import StepSampling
from specverify.reference.family.recurrent import RecurrentState
from specverify.reference.trace import Kv, Step


@dataclass
class Block:
    """The state of a step between `propose` and `settle`.

    Attributes:
        proposal: The tree that is verified, after truncation to the chunk of its root.
        nodes: For each row of that tree, its row in the tree as it was drafted.
        chance: The coins and the history of the step; None for plain greedy decoding.
        tensors: The lowered tree.
        before: A copy of the target's committed KV at the beginning of the step.
        recurrent: A copy of the target's recurrent state then; None for a model without one.
        bare: Whether the draft was not asked: the tree is the root alone.
        index: int64 [nodes]; the row of each node among the logits of the whole batch, once these are known.
        broken: Whether each row of the tensors breaks each rule of `lower_tree.STRUCTURE`.
    """

    proposal: Proposal
    nodes: list[int]
    chance: StepSampling | None
    tensors: TreeTensors
    before: Kv | None
    recurrent: RecurrentState | None = None
    bare: bool = False
    index: Tensor = field(default_factory=lambda: torch.empty(0, dtype=torch.long))
    broken: Tensor = field(default_factory=lambda: torch.zeros(0, 0))


@dataclass(frozen=True)
class Verification:
    """The verdict on a tree.

    Attributes:
        block: The verified tree.
        step: What the step reveals up to here.
        path: The accepted rows, root first.
        accepted: The tokens of these rows without the root's, then the bonus.
        logits: The target's logits, [nodes, vocabulary].
        verified: A copy of the target's committed KV after the forward.
        recurrent: A copy of the target's recurrent state after the root's row; None for a model without one.
    """

    block: Block
    step: Step
    path: list[int]
    accepted: list[int]
    logits: Tensor
    verified: Kv | None
    recurrent: RecurrentState | None = None


@dataclass(frozen=True)
class Emission:
    """The emitted tokens of a step, the reason why the request ended with them or None, and their log-probabilities."""

    tokens: list[int]
    finish: str | None
    logprobs: tuple[float, ...]


@dataclass
class Counters:
    """The counters of a request: drafted tokens without roots, and the accepted drafted tokens of each step."""

    proposed: int = 0
    lengths: list[int] = field(default_factory=list)
