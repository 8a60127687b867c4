"""What comes out: the output of plain decode, or its law, whatever is drafted and whoever else is served."""

from properties.invariants.lossless import distribution, output, processing, sessions, takes_part

INVARIANTS = (
    *output.INVARIANTS,
    *processing.INVARIANTS,
    *distribution.INVARIANTS,
    *sessions.INVARIANTS,
    *takes_part.INVARIANTS,
)
