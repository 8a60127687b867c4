"""Known faults of engines which their ready adapters leave in: runs meet them, and pages name them."""

from dataclasses import dataclass

from specverify.reference.case import Case


@dataclass(frozen=True)
class KnownFault:
    """A fault of an engine that somebody has explained.

    Attributes:
        invariants: The invariants that fail where it shows.
        sampled: Whether it shows in sampled cases alone.
        sentence: What the engine does there, and the version with which it was seen: `region: what (version)`.
    """

    invariants: tuple[str, ...]
    sampled: bool
    sentence: str

    def explains(self, case: Case, invariant: str) -> bool:
        """Whether it may be why a case fails an invariant."""
        return invariant in self.invariants and not (self.sampled and case.sampling.greedy)
