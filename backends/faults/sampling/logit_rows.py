"""Faults of the logit rows that the verify forward hands to acceptance."""

from dataclasses import replace

import torch
from torch import Tensor

from specverify.backends.engine.seams import Seams
from specverify.backends.faults.fault import fault, faults_in
from specverify.reference.trace import Stage


@fault(
    "logit-rows-shifted",
    Stage.SCORED,
    "catalogue BZ-159: logprob rows of accepted tokens selected from wrong positions",
    "a tree of two nodes",
)
def rows_shifted(seams: Seams) -> Seams:
    """The logits of accepted tokens are selected from the wrong rows.

    Every node but the root gets the logits of the row before its own row.
    """

    def score(flat: Tensor, retrieve_index: Tensor) -> Tensor:
        return seams.score(flat, (retrieve_index - 1).clamp(min=0))

    return replace(seams, score=score)


@fault(
    "softmax-twice",
    Stage.SCORED,
    "catalogue BZ-165: softmax applied twice across upstream versions",
    "any step",
)
def softmax_on_the_way(seams: Seams) -> Seams:
    """Softmax is applied where logits are promised, so the consumer applies it a second time.

    Probabilities are passed on as if they were logits.
    """

    def score(flat: Tensor, retrieve_index: Tensor) -> Tensor:
        return torch.softmax(seams.score(flat, retrieve_index), -1)

    return replace(seams, score=score)


FAULTS = faults_in(globals())
