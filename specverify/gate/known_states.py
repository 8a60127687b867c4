"""The state of each known failure after the runs: seen, fixed, expired, unjudged."""

from dataclasses import dataclass

from specverify.gate.ledger import Entry
from specverify.gate.saved_cases import SavedCases
from specverify.properties.gate_result import ELSEWHERE, EXPIRED, SEEN, STALE, UNJUDGED, GateResult, KnownState
from specverify.properties.verdict.finding import Verdict


@dataclass(frozen=True)
class KnownStates:
    """The state of a gate's ledger after its runs.

    Attributes:
        result: The result of the gate, whose runs are over.
        ledger: The entries.
        saved: The cases that were judged first.
        backends: The backends that ran.
        watched: Verdicts on the cases of the entries' bundles, by backend and id of the case.
    """

    result: GateResult
    ledger: list[Entry]
    saved: SavedCases
    backends: tuple[str, ...]
    watched: dict[tuple[str, str], Verdict]

    def all(self) -> list[KnownState]:
        """The state of every entry, in the order of the ledger."""
        return [self._state(entry) for entry in self.ledger]

    def _state(self, entry: Entry) -> KnownState:
        """The state of a known failure after all runs."""
        num_seen = sum(run.tally.known[entry.name] for run in self.result.runs if run.backend == entry.backend)
        state, why = self._state_and_reason(entry, num_seen)
        until = "" if entry.until is None else entry.until.isoformat()
        return KnownState(entry.known_failure, entry.backend, state, num_seen, entry.reason, entry.issue, until, why)

    def _state_and_reason(self, entry: Entry, num_seen: int) -> tuple[str, str]:
        """State and sentence of a known failure that `num_seen` cases of the run showed."""
        if entry.backend not in self.backends:
            return ELSEWHERE, f"{entry.backend} is not among the backends of this run"
        if entry.is_expired():
            return EXPIRED, f"it was accepted until {entry.until}: mend it, or renew the entry"
        verdict = self.watched.get((entry.backend, self.saved.entries[entry.name].case.id))
        name = entry.known_failure.main.invariant
        if verdict is None:
            return (SEEN, "") if num_seen else self._reason_untried(entry)
        if entry.name in verdict.known:
            return SEEN, ""
        outcome = verdict.outcomes.get(name)
        if outcome == "failed":
            return STALE, f"its bundle fails otherwise now ({name}): see the new failure, and prune the entry"
        if outcome == "checked":
            return STALE, "its bundle agrees now: `specverify ledger prune` removes the entry"
        return UNJUDGED, f"{name} is {(outcome or 'not asked').replace('_', ' ')} on its bundle here"

    def _reason_untried(self, entry: Entry) -> tuple[str, str]:
        case = self.saved.entries[entry.name].case.id
        runs = [run for run in self.result.runs if run.backend == entry.backend and run.model is None]
        passed = next((run.tally.passed[case] for run in runs if case in run.tally.passed), None)
        if passed is not None:
            return UNJUDGED, f"its bundle was passed over: {passed}"
        number, count = self.result.shard
        if int(case, 16) % count != number - 1:
            return ELSEWHERE, "another shard judges its bundle"
        return UNJUDGED, "its bundle was not reached"
