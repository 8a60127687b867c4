"""Faults of a draft's quantised weights."""

from dataclasses import replace

from torch import Tensor

from specverify.backends.engine.seams import Seams
from specverify.backends.faults.fault import fault, faults_in
from specverify.reference.trace import Stage


@fault(
    "scale-of-next-channel",
    Stage.DRAFTED,
    "family of pytorch/ao: a scale for each output channel is applied along the wrong axis or to a moved channel",
    "a draft model with quantised weights",
)
def scale_of_next_channel(seams: Seams) -> Seams:
    """Each output channel of a draft's quantised weights is multiplied by the scale of the channel after it.

    The numbers are right; the last channel takes the scale of the first.
    """

    def dequantise(numbers: Tensor, scale: Tensor) -> Tensor:
        return seams.dequantise(numbers, scale.roll(-1, 0))

    return replace(seams, dequantise=dequantise)


FAULTS = faults_in(globals())
