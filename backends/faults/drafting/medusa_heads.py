"""Faults of Medusa heads: their state, their blocks, their depth."""

from torch import Tensor
from torch.nn import functional

from specverify.backends.engine.draft.medusa import MedusaDraft
from specverify.backends.faults.drafting.model_drafts import in_place_of_draft
from specverify.backends.faults.fault import drafted_fault, faults_in
from specverify.reference.draft.medusa import HEADS_PREFIX


@drafted_fault(
    "medusa-head-of-next-depth",
    "arXiv 2401.10774, section 2.1: head k guesses the token k + 1 positions ahead; heads are counted from 0 or from 1",
    "at least two Medusa heads",
)
@in_place_of_draft
class Further(MedusaDraft):
    """The children of a node are named by the Medusa head of the next depth; the last head stays.

    Heads that count from 1, the target's own head being number 0, are read as if they counted from 0.
    """

    def of_depth(self, depth: int) -> Tensor:
        return super().of_depth(min(depth + 1, self.heads - 1))


@drafted_fault(
    "medusa-residual-dropped",
    "family of vllm-project/vllm #14464: the residual of a head's output is dropped",
    "a Medusa head",
)
@in_place_of_draft
class Bare(MedusaDraft):
    """The block of a Medusa head puts out `silu(W s + b)` without the state s beside it."""

    def block(self, state: Tensor, head: int) -> Tensor:
        return super().block(state, head) - state


@drafted_fault(
    "medusa-bias-dropped",
    "family of vllm-project/vllm issue #22558: the bias of a head's projection is not loaded",
    "a Medusa head with a bias",
)
@in_place_of_draft
class WithoutBias(MedusaDraft):
    """The block of a Medusa head leaves out the bias that its weights have."""

    def block(self, state: Tensor, head: int) -> Tensor:
        return state + functional.silu(functional.linear(state, self.weights[f"{HEADS_PREFIX}.{head}.0.linear.weight"]))


@drafted_fault(
    "medusa-reads-state-one-early",
    "family of catalogue BZ-063: the draft's inputs are shifted by one against the target's states",
    "a Medusa head, and a prompt of three tokens",
)
@in_place_of_draft
class Early(MedusaDraft):
    """Medusa heads read the state of the token before the last whose state is known.

    Where one state is known, they read that one.
    """

    def last_state(self, hidden: Tensor) -> Tensor:
        return hidden[-2:][:1]


FAULTS = faults_in(globals())
