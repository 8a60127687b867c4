"""Speculation: whether an engine of tokens alone accepted drafted tokens at all.

An engine that accepts none decodes plainly, and a run that agrees says nothing of its speculation.
"""

from collections.abc import Iterable
from dataclasses import dataclass, fields

from specverify.properties.verdict.finding import Verdict
from specverify.reference.trace import Stage


@dataclass
class Speculation:
    """Counts over a run, as the engine tells them.

    Attributes:
        drafted: Cases that gave the engine a draft.
        told: Cases whose run told counts of drafted tokens.
        proposed: Drafted tokens that the target verified.
        accepted: Those of them that it accepted.
    """

    drafted: int = 0
    told: int = 0
    proposed: int = 0
    accepted: int = 0

    def add(self, verdict: Verdict) -> None:
        """Count one judged case."""
        if not verdict.judged:
            return
        self.drafted += verdict.case.draft.height > 0
        if verdict.speculated is not None:
            self.told += 1
            self.proposed += verdict.speculated.proposed
            self.accepted += verdict.speculated.accepted

    def __add__(self, other: "Speculation") -> "Speculation":
        return Speculation(*(getattr(self, count.name) + getattr(other, count.name) for count in fields(self)))

    @property
    def share(self) -> float | None:
        """Share of the drafted tokens that were accepted; None where none was drafted, or nothing is told."""
        return self.accepted / self.proposed if self.proposed else None

    def why_untested(self) -> str | None:
        """Why the run did not test speculation although the engine was given drafts, or None."""
        if not self.told or self.accepted:
            return None
        outcome = f"none of {self.proposed} drafted tokens was accepted" if self.proposed else "no token was drafted"
        return (
            f"speculation was not tested: {outcome} in {self.told} cases, so that plain decoding is all that was judged"
        )


def was_seen(speculation: Speculation, accept_lengths: Iterable[int]) -> bool:
    """Whether a run showed that a drafted token was accepted: by the engine's own count, or in a step that it shows."""
    return speculation.accepted > 0 or any(length > 0 for length in accept_lengths)


def by_own_count(declared: frozenset[Stage]) -> bool:
    """Whether an engine that reveals `declared` shows its acceptance by counts at best."""
    return Stage.EMITTED in declared and Stage.ACCEPTED not in declared
