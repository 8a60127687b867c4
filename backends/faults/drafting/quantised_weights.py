"""Faults of a draft's quantised weights."""

from torch import Tensor

from specverify.backends.engine.seams import Seams
from specverify.backends.faults.fault import drafted_fault, faults_in, in_place_of


@drafted_fault(
    "scale-of-next-channel",
    "family of pytorch/ao: a scale for each output channel is applied along the wrong axis or to a moved channel",
    "a draft model with quantised weights",
)
@in_place_of("dequantise")
def scale_of_next_channel(seams: Seams, numbers: Tensor, scale: Tensor) -> Tensor:
    """Each output channel of a draft's quantised weights is multiplied by the scale of the channel after it."""
    return seams.dequantise(numbers, scale.roll(-1, 0))


FAULTS = faults_in(globals())
