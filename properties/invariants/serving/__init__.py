"""The invariants `serving.*`: a server's state is in step with the text."""

from specverify.properties.invariants.serving import hand_over, matchers, overlap
from specverify.properties.verdict.invariant import Invariant

INVARIANTS: tuple[Invariant, ...] = (*matchers.INVARIANTS, *overlap.INVARIANTS, *hand_over.INVARIANTS)
