"""The result of a gate: a tally for each backend, and the known failures."""

from collections import Counter
from dataclasses import dataclass, field

from specverify.properties.known import KnownFailure
from specverify.properties.tally import Tally

SEEN, STALE, EXPIRED, UNJUDGED, ELSEWHERE = "seen", "stale", "expired", "could not judge", "not in this run"
"""States of a known failure. STALE: its bundle agrees now. EXPIRED: its last day has passed."""

RED = (STALE, EXPIRED)
"""States that make a gate red."""


@dataclass(frozen=True)
class KnownState:
    """A known failure after a run.

    Attributes:
        state: One of SEEN, STALE, EXPIRED, UNJUDGED, ELSEWHERE.
        cases: Number of cases of the run that showed it.
        reason: Why it is accepted.
        issue: The address of its issue, or empty.
        until: The last day on which it is accepted, as YYYY-MM-DD, or empty.
        why: What led to the state, in one sentence; empty for SEEN.
    """

    known: KnownFailure
    backend: str
    state: str
    cases: int
    reason: str
    issue: str = ""
    until: str = ""
    why: str = ""


@dataclass
class GateRun:
    """The run of one backend, on built-in models or on one checkpoint.

    Attributes:
        backend: The backend as the profile names it.
        model: The checkpoint, or None for built-in models.
        code: 2 or 3 where the run could not start or was lost, else None.
        short: Reasons why the run lies below the profile's floors.
        drawn: Digest of the ids of the judged cases, by which two runs are known to have drawn the same.
    """

    backend: str
    model: str | None
    tally: Tally
    code: int | None = None
    short: list[str] = field(default_factory=list)
    drawn: str = ""

    @property
    def title(self) -> str:
        """The backend, with its checkpoint if it has one."""
        return self.backend if self.model is None else f"{self.backend} on {self.model}"

    @property
    def exit_code(self) -> int:
        """0 agree, 1 differ, 2 wrong input, 3 could not judge."""
        if self.tally.exit_code == 1:
            return 1
        if self.code is not None:
            return self.code
        return 3 if self.short else self.tally.exit_code

    @property
    def outcome(self) -> str:
        """The tally's outcome; `unjudged` for a run below a floor."""
        return {0: "agree", 1: "differ"}.get(self.exit_code, "unjudged")


@dataclass
class GateResult:
    """The result of a gate.

    Attributes:
        runs: The runs, in the order of the profile.
        seeds: The seeds of drawn cases.
        fresh: That one of them which is new in this run, or None.
        shard: The number of the shard, from 1, and the number of shards.
        complaints: Reasons why the gate as a whole could not judge.
        notes: Facts that a reader should know, one line each: bundles not tried, a shortened run.
        seconds: Wall time.
    """

    runs: list[GateRun] = field(default_factory=list)
    known: list[KnownState] = field(default_factory=list)
    seeds: tuple[int, ...] = ()
    fresh: int | None = None
    shard: tuple[int, int] = (1, 1)
    complaints: list[str] = field(default_factory=list)
    notes: list[str] = field(default_factory=list)
    seconds: float = 0.0

    @property
    def exit_code(self) -> int:
        """0 agree, 1 differ (or a known failure that passes now or has expired), 2 wrong input, 3 could not judge."""
        codes = [run.exit_code for run in self.runs]
        if 1 in codes or any(failure.state in RED for failure in self.known):
            return 1
        if 2 in codes:
            return 2
        unknown = any(failure.state == UNJUDGED for failure in self.known)
        return 3 if 3 in codes or self.complaints or unknown or not self.runs else 0

    @property
    def outcome(self) -> str:
        """`agree`, `differ` or `unjudged`."""
        return {0: "agree", 1: "differ"}.get(self.exit_code, "unjudged")

    @property
    def behind(self) -> Counter[str]:
        """Signatures of differences behind known failures, over all runs, each with its number of cases."""
        return sum((run.tally.behind for run in self.runs), Counter())
