"""The record of a run: a JSON line per case, and the whole run as one object.

The lines are written while the verdicts arrive.
"""

import contextlib
import math
import os
import statistics
import uuid
from collections.abc import Mapping
from datetime import datetime, timezone
from pathlib import Path
from types import TracebackType
from typing import Any

from specverify.properties.accepted_ranks import RankCounts
from specverify.properties.laws.sampled.gate import ALPHA_RUN
from specverify.properties.reference_names import NUMPY
from specverify.properties.run_statistics import exactness
from specverify.properties.streams import run_evidence, streams_of
from specverify.properties.tally import EagerOutcome, Failure, InternalFailure, Tally
from specverify.properties.texts import Texts
from specverify.properties.verdict.finding import Finding, Verdict
from specverify.properties.verdict.internal import InternalError
from specverify.reference.case import Case
from specverify.reference.case_json import case_to_json
from specverify.reports.bundle import replay_command
from specverify.reports.case_diff import differences
from specverify.reports.coverage_words import coverage_fact
from specverify.reports.hints import HINTS
from specverify.reports.writing import Unwritable, as_json, jsonable

ORACLE = "oracle"
"""The name of the reference in JSON and JUnit without `--against` and `--reference`; else their argument."""


SCHEMA = 1
"""The version of a run's JSON object: fields may be added without a new one, none is taken away or changed."""


def reference_word(tally: Tally) -> str:
    """The reference of a run in JSON and JUnit."""
    return tally.against or (ORACLE if tally.reference == NUMPY else tally.reference)


def finding_fact(finding: Finding) -> dict[str, Any]:
    """A finding as a JSON object: the stage by its word, and the step among the coordinates."""
    fact: dict[str, Any] = {
        "invariant": finding.invariant,
        "stage": finding.stage.word,
        "where": {"step": finding.step, **finding.where},
        "expected": finding.expected,
        "observed": finding.observed,
    }
    if finding.measure is not None:
        fact["measure"] = finding.measure
    if finding.said:
        fact["said"] = finding.said
    content: dict[str, Any] = jsonable(fact)
    return content


def internal_fact(error: InternalError) -> dict[str, Any]:
    """An exception inside the judge as a JSON object: the invariant, the reason and the last lines of the traceback."""
    fact: dict[str, Any] = {"invariant": error.invariant, "why": error.why, "said": error.said}
    if error.request is not None:
        fact["request"] = error.request
    content: dict[str, Any] = jsonable(fact)
    return content


def _unanswered_fact(unanswered: InternalFailure) -> dict[str, Any]:
    """An exception inside the judge over the run, with its first case and the command that replays it."""
    return {
        **internal_fact(unanswered.error),
        "cases": unanswered.cases,
        "case": case_to_json(unanswered.verdict.case),
        "replay": None if unanswered.saved is None else replay_command(unanswered.saved),
    }


def rank_rows(counts: RankCounts) -> list[tuple[int, int, int, int]]:
    """The counts as rows (depth, rank, offered, accepted), in the order of depths and ranks."""
    return [(*place, offered, counts.accepted.get(place, 0)) for place, offered in sorted(counts.offered.items())]


def verdict_line(verdict: Verdict) -> dict[str, Any]:
    """One judged case as one JSON object.

    `evidence` holds the tests of laws by sampling, each with the natural logarithm of its e-value. `unsupported` is the
    reason why the backend, or the reference, declined the case, or null.

    `outcome` is differ, known (it differs only as the ledger says), unsupported, internal (an invariant, or the judge,
    raised an exception, which `internal` tells), unjudged (no invariant could be checked) or agree. `invariants` holds
    only the invariants that failed, raised or were unobserved. `compared` holds the
    number of comparisons of those that were checked. `seconds` are those inside the backend's forwards, and
    `judged_seconds` all that the case took, with its variants. `ranks` holds rows (depth, rank, nodes below an accepted
    parent, accepted nodes) for each kind of draft.
    """
    is_judged = any(outcome in ("checked", "failed") for outcome in verdict.outcomes.values())
    if verdict.findings:
        outcome = "differ"
    elif verdict.known:
        outcome = "known"
    elif verdict.unsupported is not None:
        outcome = "unsupported"
    elif verdict.internal:
        outcome = "internal"
    else:
        outcome = "agree" if is_judged else "unjudged"
    line: dict[str, Any] = {"id": verdict.case.id, "backend": verdict.backend, "outcome": outcome}
    line["invariants"] = {
        name: result for name, result in verdict.outcomes.items() if result not in ("checked", "not_applicable")
    }
    if verdict.compared:
        line["compared"] = verdict.compared
    line["findings"] = [finding_fact(finding) for finding in verdict.findings]
    if verdict.known:
        line |= {"known": verdict.known, "behind": verdict.behind}
    if verdict.internal:
        line["internal"] = [internal_fact(error) for error in verdict.internal]
    line["ties"] = verdict.ties
    if verdict.routing_ties:
        line["routing_ties"] = verdict.routing_ties
    if verdict.routed.judged:
        line["routed"] = verdict.routed
    if verdict.indexed.judged:
        line["indexed"] = verdict.indexed
    line["evidence"] = [
        {"invariant": test.invariant, "log_e": test.log_e, "draws": test.rounds, "stream": test.stream or None}
        for test in verdict.evidence
    ]
    line["unsupported"] = verdict.unsupported
    line["seconds"] = verdict.forward_s
    line["judged_seconds"] = verdict.seconds
    if verdict.ranks:
        line["ranks"] = {tag: rank_rows(counts) for tag, counts in verdict.ranks.items()}
    if verdict.fallbacks:
        line["fallbacks"] = verdict.fallbacks
    if verdict.commit_fallbacks:
        line["commit_fallbacks"] = verdict.commit_fallbacks
    content: dict[str, Any] = jsonable(line)
    return content


def run_fact(version: str, seed: int, fault: str | None) -> dict[str, Any]:
    """The fields that all lines of one run share: a random id of 12 hex digits, the version, the seed and the fault."""
    return {"run": uuid.uuid4().hex[:12], "version": version, "seed": seed, "fault": fault}


RESULTS = "results.jsonl"
"""The name in a report folder that stands for the results of the last run."""


class Lines:
    """A JSON Lines file that grows by one flushed line per case, so that a killed run keeps its verdicts.

    Lines of earlier runs stay. If the last line was cut off, the first new line begins with a newline, so that it stays
    whole. Each line is appended by one system call, so that runs which share a file do not mix inside a line.

    Args:
        path: The file.
        run: The fields that are added to the line of each verdict (`run_fact`), together with the time in UTC, and with
            the case of a verdict that differs; without them, lines hold `verdict_line` alone.
        durable: Whether each line is on the disk when it is added, so that it outlives the machine too.

    Raises:
        Unwritable: on entering, and on adding, when the system refuses.
    """

    def __init__(self, path: str | Path, run: Mapping[str, Any] | None = None, durable: bool = False) -> None:
        self.path = Path(path)
        self._durable = durable
        self._run = run
        self._handle: int | None = None
        self._cut_off = False

    def __enter__(self) -> "Lines":
        try:
            self._handle = os.open(self.path, os.O_RDWR | os.O_CREAT | os.O_APPEND, 0o666)
            size = os.lseek(self._handle, 0, os.SEEK_END)
            # A run that was killed may have left a last line without its newline.
            self._cut_off = size > 0 and os.pread(self._handle, 1, size - 1) != b"\n"
        except OSError as error:
            self._close()
            raise Unwritable.from_os_error(self.path, error) from None
        return self

    def __exit__(
        self, kind: type[BaseException] | None, error: BaseException | None, trace: TracebackType | None
    ) -> None:
        self._close()

    def _close(self) -> None:
        if self._handle is not None:
            os.close(self._handle)
            self._handle = None

    def add(self, verdict: Verdict) -> None:
        """Append the line of a verdict; the file holds the line when this returns."""
        line = verdict_line(verdict)
        if self._run is not None:
            line |= {**self._run, "time": datetime.now(timezone.utc).isoformat(timespec="milliseconds")}
            if verdict.findings or verdict.internal:
                line["case"] = case_to_json(verdict.case)
        self.append(line)

    def append(self, fact: dict[str, Any]) -> None:
        """Append one line; the file holds the line when this returns."""
        self.append_lines(as_json(fact).encode())

    def append_lines(self, lines: bytes) -> None:
        """Append whole lines; the file holds them when this returns."""
        if self._handle is None:
            raise ValueError("Lines is used inside its with block")
        line = b"\n" * self._cut_off + lines
        self._cut_off = False
        try:
            # A system call may write only a part, for example on a full disk.
            while line:
                line = line[os.write(self._handle, line) :]
            if self._durable:
                os.fsync(self._handle)
        except OSError as error:
            raise Unwritable.from_os_error(self.path, error) from None


def results_file(folder: Path, run: Mapping[str, Any]) -> Path:
    """The file for the results of a run that begins now, in the report folder `folder`."""
    time = datetime.now(timezone.utc).strftime("%Y%m%dT%H%M%SZ")
    return folder / "results" / f"{time}-{run['run']}.jsonl"


class RunLines(Lines):
    """The results of one run in a file of their own, `results/TIME-RUN.jsonl`, to which RESULTS of the folder links.

    The file is there from its first line on, and the link with it; a run without lines leaves neither. A file under the
    link's name, as earlier versions left it, becomes `results/earlier.jsonl`.

    Args:
        folder: The report folder.
        run: As for `Lines`.
        durable: As for `Lines`.
        file: A file of `results_file` that several runs share, such as those of a gate; by default a new one.
    """

    def __init__(self, folder: Path, run: Mapping[str, Any], durable: bool = False, file: Path | None = None) -> None:
        super().__init__(file or results_file(folder, run), run, durable)
        self._folder = folder
        self._is_linked = False

    def __enter__(self) -> "RunLines":
        return self

    def append_lines(self, lines: bytes) -> None:
        """Append whole lines; the file holds them when this returns."""
        if not self._is_linked:
            try:
                self.path.parent.mkdir(exist_ok=True)
            except OSError as error:
                raise Unwritable.from_os_error(self.path.parent, error) from None
            super().__enter__()
        super().append_lines(lines)
        if not self._is_linked:
            self._is_linked = True
            self._link()

    def _link(self) -> None:
        """Let RESULTS stand for this file; where the system knows no links, the file alone stays."""
        place = self._folder / RESULTS
        passing = place.with_name(f".{uuid.uuid4().hex}.tmp")
        with contextlib.suppress(OSError):
            if place.exists() and not place.is_symlink():
                os.replace(place, self.path.parent / "earlier.jsonl")
            passing.symlink_to(self.path.relative_to(self._folder))
            os.replace(passing, place)


def failure_fact(failure: Failure) -> dict[str, Any]:
    """A located failure as a JSON object, with its case and the command that replays it."""
    twin = failure.beside
    return {
        **finding_fact(failure.finding),
        "case": case_to_json(failure.verdict.case),
        "beside": None if twin is None else _beside_fact(twin),
        "nearest": None if failure.nearest is None else _nearest_fact(failure.nearest, failure.verdict.case),
        "also_seen": [
            {
                "invariant": sighting.invariant,
                "stage": sighting.stage.word,
                "case": sighting.case,
                "file": sighting.file,
            }
            for sighting in failure.also
        ],
        "replay": replay_command(failure),
        "reference": failure.against or (ORACLE if failure.reference == NUMPY else failure.reference),
        "texts": None if failure.texts is None else _texts_fact(failure.texts),
        "hint": None if failure.mistake is None else {"mistake": failure.mistake, "words": HINTS[failure.mistake]},
        "known": list(failure.known),
    }


def _texts_fact(texts: Texts) -> dict[str, Any]:
    """Prompt and outputs in tokens, the first index at which they differ, and the rows as text where it is known."""
    return {
        "prompt": texts.prompt,
        "must_be": texts.must_be,
        "is": texts.observed,
        "first_difference": texts.first_difference,
        "words": texts.words or None,
    }


def _nearest_fact(near_case: Case, case: Case) -> dict[str, Any]:
    """The nearest case that agrees, and its differences."""
    return {"case": case_to_json(near_case), "differences": differences(near_case, case)}


def _beside_fact(twin: EagerOutcome) -> dict[str, Any]:
    """The outcome of the same case on the eager backend of the device."""
    finding = None if twin.finding is None else finding_fact(twin.finding)
    return {"backend": twin.backend, "outcome": twin.outcome, "finding": finding}


def mean_accepted(tally: Tally) -> float | None:
    """The mean number of accepted drafted tokens per step, or None when no step was revealed."""
    steps = sum(tally.accept_lengths.values())
    return sum(length * count for length, count in tally.accept_lengths.items()) / steps if steps else None


def sampling_tests(tally: Tally) -> dict[str, Any]:
    """The totals of the tests of laws by sampling: number, rounds, the run's evidence, and that of a red run.

    `streams` are bodies of evidence over the run, each with the smallest shift per draw that would have shown with
    probability .99, the events `about` which that shift is, and the named `faults` of a draft that would have shown or
    not; `planned` says which shift would show at best, as told before the run.
    """
    log_e, streams = run_evidence(tally.evidence), streams_of(tally.evidence)
    shifts = sorted(test.smallest_tv for test in tally.evidence if test.smallest_tv is not None)
    return {
        "tests": len(tally.evidence),
        "rounds": sum(test.rounds for test in tally.evidence),
        # exp(710) overflows a float64.
        "evidence": math.exp(min(log_e, 700.0)),
        # A correct backend reaches this with probability ALPHA_RUN at most (Markov's inequality).
        "red_at": 1 / ALPHA_RUN,
        "smallest_tv": {"median": statistics.median(shifts), "worst": shifts[-1]} if shifts else None,
        "excess": tally.excess_evidence,
        "planned": tally.planned,
        "streams": [
            {
                "name": stream.name,
                "tests": stream.tests,
                "draws": stream.draws,
                "log_e": stream.log_e,
                "smallest_shift": streams.smallest(stream),
                "about": stream.resolution.about,
                "faults": streams.sights(stream),
            }
            for stream in streams.all
        ],
    }


def summary(tally: Tally) -> dict[str, Any]:
    """The whole run as the JSON object that `--json` writes."""
    content: dict[str, Any] = jsonable(
        {
            "schema": SCHEMA,
            "outcome": tally.outcome,
            "backend": tally.backend,
            "emulated": tally.emulated,
            "excluded": tally.excluded,
            "reference": reference_word(tally),
            **({} if tally.reference == NUMPY else {"reference_rows": vars(tally.reference_rows)}),
            "varied_prompts": None if tally.varied is None else dict(zip(("varied", "all"), tally.varied, strict=True)),
            "tokens_alone": tally.tokens_alone,
            "cases": tally.cases,
            "wanted": tally.wanted,
            "open_ended": tally.open_ended,
            "judged": tally.judged,
            "had_turn": tally.num_asked,
            "declined": tally.unsupported,
            "replaced_workers": tally.replaced,
            "seconds": tally.seconds,
            "backend_seconds": tally.backend_seconds,
            "shrink_seconds": tally.shrink_seconds,
            "invariants": {name: vars(counts) for name, counts in tally.invariants.items()},
            "findings": [failure_fact(failure) for failure in tally.failures],
            "ties": tally.ties,
            **({"routing_ties": tally.routing_ties} if tally.routing_ties else {}),
            **({"routed": tally.routed} if tally.routed.judged else {}),
            **({"indexed": tally.indexed} if tally.indexed.judged else {}),
            "positions": tally.positions,
            "predicted_ties": tally.predicted_ties,
            "unsupported": tally.unsupported,
            "attention_calls": tally.attention_calls,
            "native_share": tally.native_share,
            **({} if tally.native_calls is None else {"native_calls": tally.native_calls}),
            "fallbacks": tally.fallbacks,
            "commits": tally.commits,
            "commit_fallbacks": tally.commit_fallbacks,
            "accept_lengths": dict(sorted(tally.accept_lengths.items())),
            "mean_accepted": mean_accepted(tally),
            "accepted_by_draft": {
                kind: {"steps": steps, "accepted": accepted, "mean": accepted / steps}
                for kind, (steps, accepted) in tally.accepted_by_draft.items()
            },
            "acceptance": {
                case_id: {"accepted": counts.accepted, "offered": counts.offered}
                for case_id, counts in tally.acceptance.items()
            },
            "speculation": vars(tally.speculation)
            | {"share": tally.speculation.share, "untested": tally.speculation.why_untested()},
            "excess_ties": tally.excess_ties,
            "excess_error": tally.excess_error,
            "control_errors": [vars(error) for error in exactness(tally.control_errors)],
            "sampling_tests": sampling_tests(tally),
            "errors": tally.reasons,
            **({"internal": [_unanswered_fact(unanswered) for unanswered in tally.internal]} if tally.internal else {}),
            "stopped": tally.stopped,
            "dearest": [{"case": case.id, "seconds": seconds} for seconds, case in tally.dearest],
            "pairs": coverage_fact(tally.pairs),
            "residue": [*tally.residue.values()],
            "environment": tally.environment,
        }
    )
    return content
