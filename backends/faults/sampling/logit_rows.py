"""Faults of the logit rows that the verify forward hands to acceptance."""

import torch
from torch import Tensor

from specverify.backends.engine.seams import Seams
from specverify.backends.faults.fault import faults_in, in_place_of, scored_fault


@scored_fault(
    "logit-rows-shifted",
    "catalogue BZ-159: logprob rows of accepted tokens selected from wrong positions",
    "a tree of two nodes",
)
@in_place_of("score")
def rows_shifted(seams: Seams, flat: Tensor, retrieve_index: Tensor) -> Tensor:
    """The logits of accepted tokens are selected from the wrong rows."""
    return seams.score(flat, (retrieve_index - 1).clamp(min=0))


@scored_fault("softmax-twice", "catalogue BZ-165: softmax applied twice across upstream versions", "any step")
@in_place_of("score")
def softmax_on_the_way(seams: Seams, flat: Tensor, retrieve_index: Tensor) -> Tensor:
    """Softmax is applied where logits are promised, so the consumer applies it a second time."""
    return torch.softmax(seams.score(flat, retrieve_index), -1)


FAULTS = faults_in(globals())
