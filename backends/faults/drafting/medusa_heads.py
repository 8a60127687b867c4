"""Faults of Medusa heads: their state, their blocks, their depth."""

from torch import Tensor
from torch.nn import functional

from specverify.backends.engine.draft.medusa import MedusaDraft
from specverify.backends.engine.seams import Seams
from specverify.backends.faults.drafting.model_drafts import with_draft_class
from specverify.backends.faults.fault import fault, faults_in
from specverify.reference.draft.medusa import HEADS_PREFIX
from specverify.reference.trace import Stage


@fault(
    "medusa-head-of-next-depth",
    Stage.DRAFTED,
    "arXiv 2401.10774, section 2.1: head k guesses the token k + 1 positions ahead; heads are counted from 0 or from 1",
    "at least two Medusa heads",
)
def head_of_next_depth(seams: Seams) -> Seams:
    """The children of a node are named by the Medusa head of the next depth; the last head stays.

    Heads that count from 1, the target's own head being number 0, are read as if they counted from 0.
    """

    class Further(MedusaDraft):
        def of_depth(self, depth: int) -> Tensor:
            return super().of_depth(min(depth + 1, self.heads - 1))

    return with_draft_class(seams, Further)


@fault(
    "medusa-residual-dropped",
    Stage.DRAFTED,
    "family of vllm-project/vllm #14464: the residual of a head's output is dropped",
    "a Medusa head",
)
def residual_dropped(seams: Seams) -> Seams:
    """The block of a Medusa head puts out `silu(W s + b)` without the state s beside it."""

    class Bare(MedusaDraft):
        def block(self, state: Tensor, head: int) -> Tensor:
            return super().block(state, head) - state

    return with_draft_class(seams, Bare)


@fault(
    "medusa-bias-dropped",
    Stage.DRAFTED,
    "family of vllm-project/vllm issue #22558: the bias of a head's projection is not loaded",
    "a Medusa head with a bias",
)
def bias_dropped(seams: Seams) -> Seams:
    """The block of a Medusa head leaves out the bias that its weights have."""

    class WithoutBias(MedusaDraft):
        def block(self, state: Tensor, head: int) -> Tensor:
            return state + functional.silu(
                functional.linear(state, self.weights[f"{HEADS_PREFIX}.{head}.0.linear.weight"])
            )

    return with_draft_class(seams, WithoutBias)


@fault(
    "medusa-reads-state-one-early",
    Stage.DRAFTED,
    "family of catalogue BZ-063: the draft's inputs are shifted by one against the target's states",
    "a Medusa head, and a prompt of three tokens",
)
def state_one_early(seams: Seams) -> Seams:
    """Medusa heads read the state of the token before the last whose state is known.

    Where one state is known, they read that one.
    """

    class Early(MedusaDraft):
        def last_state(self, hidden: Tensor) -> Tensor:
            return hidden[-2:][:1]

    return with_draft_class(seams, Early)


FAULTS = faults_in(globals())
