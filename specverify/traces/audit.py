"""The audit of recorded traces: each run is judged without its engine.

The judge and the invariants are those of `diff`. A run has no variants, no control of its own and often no model, so
that each invariant which could not be asked is kept with the reason.
"""

from collections import Counter
from dataclasses import dataclass, field, replace
from pathlib import Path

from specverify.backends.admission import Misshapen, admit_trace
from specverify.backends.admission.sizes import sizes_of
from specverify.backends.admission.stages import admit_step
from specverify.backends.base import Declaration
from specverify.properties.run_statistics import excess_choices, excess_ties, undecided_comparison
from specverify.properties.shortfall import DECLINED_FLOOR
from specverify.properties.tally import Tally
from specverify.properties.verdict.finding import Finding, Verdict
from specverify.properties.verdict.invariant import Invariant, Oracle
from specverify.properties.verdict.judge import judge
from specverify.reference.architecture import Architecture, Checkpoint, Seeded
from specverify.reference.case import Case
from specverify.reference.files.regular import open_regular
from specverify.reference.malformed import Malformed
from specverify.reference.oracle.decoder import Oracle as Definition
from specverify.reference.recorded.lines import FileRun, UnreadableLine, read_runs
from specverify.reference.trace import Stage, Trace
from specverify.setup.errors import UnusableInput
from specverify.setup.selection import invariants_matching
from specverify.traces.evidence import CONTINUES, RecordedRun, WithoutModel
from specverify.traces.excerpts import chosen_steps, excerpts, is_divisible, size_of, with_excerpts
from specverify.traces.law_evidence import LawEvidence

NOT_OF_A_FILE = ("lossless.completes", "lossless.takes-part")
"""Invariants that judge whether a run that was asked for came about: a recorded run did, whatever it holds."""

NOT_OF_A_REQUEST = ("acceptance.proposal-consistent",)
"""Invariants that need to know how the draft draws; a bare request does not say."""

NEEDS_PADDING = ("structure.validity-closed",)
"""Invariants that need to know to how many rows trees are padded."""

Why = tuple[str, str]
"""The kind of reason for which an invariant has no answer (internal, stages, model, runs, evidence), and the stages in
words."""


@dataclass(frozen=True)
class LocatedFinding:
    """A finding, with its place in the file: the line, and the number of the run."""

    line: int
    run: int
    finding: Finding


@dataclass
class Audit:
    """The result of an audit.

    Attributes:
        file: The file, as it was named.
        tally: The counts of all runs, each as one case.
        findings: Every finding.
        unasked: Each invariant that compared nothing in some run, with the reasons and the number of runs.
        cut_off: Runs that are beginnings of runs, one line each.
        doubts: Reasons why the audit is no pass, one line each.
        law: The evidence on the law of sampled tokens, over all runs.
        steps: The steps of all runs.
        steps_by_model: The steps that the model judged.
    """

    file: str
    tally: Tally = field(default_factory=lambda: Tally("recorded"))
    findings: list[LocatedFinding] = field(default_factory=list)
    unasked: dict[str, Counter[Why]] = field(default_factory=dict)
    cut_off: list[str] = field(default_factory=list)
    doubts: list[str] = field(default_factory=list)
    law: LawEvidence = field(default_factory=LawEvidence)
    steps: int = 0
    steps_by_model: int = 0

    @property
    def exit_code(self) -> int:
        """0 agree, 1 differ, 3 nothing judged, or too little."""
        return self.tally.exit_code


def audit(
    file: str,
    model: Checkpoint | None,
    globs: tuple[str, ...] = (),
    prefix: bool = False,
    share: float = 1.0,
    seed: int = 0,
) -> Audit:
    """Judge every run of `file` by the invariants that `globs` match.

    Args:
        file: The path of a file in the format of `specverify.reference.recorded`.
        model: The checkpoint that made the traces, or None.
        globs: Globs of names of invariants; empty for all.
        prefix: Whether a run may be the beginning of one.
        share: The share of the steps that is judged by the model; the others are judged without it.
        seed: Chooses those steps.

    Raises:
        UnusableInput: The file cannot be read, or a line of it is no part of a trace; the message names the line.
        Unknown: A glob matches no invariant.
    """
    chosen = invariants_matching(globs)
    invariants = (
        *(invariant for invariant in chosen if invariant.name not in NOT_OF_A_FILE),
        *(() if globs else (CONTINUES,)),
    )
    result = Audit(file)
    try:
        with open_regular(file) as lines:
            runs = read_runs(lines)
    except OSError as why:
        raise UnusableInput(f"{file}: cannot be read ({why.strerror or why})") from None
    except UnreadableLine as why:
        raise UnusableInput(f"{file}:{why.line}: {why.why}") from None
    definition = Definition()
    try:
        for number, run in enumerate(runs):
            steps = chosen_steps(run, number, share, seed)
            result.steps += size_of(run)
            result.steps_by_model += len(steps) if model is not None else 0
            is_whole = len(steps) == size_of(run)
            _judge(
                result,
                number,
                run,
                model=model if is_whole else None,
                asked_invariants=invariants,
                exact=definition,
                parts=(model, steps) if model is not None and not is_whole and is_divisible(run) else None,
            )
    except UnreadableLine as why:
        raise UnusableInput(f"{file}:{why.line}: {why.why}") from None
    _note_doubts(result, len(runs), prefix)
    return result


def _why_cut_off(number: int, run: FileRun, trace: Trace, most: int) -> str | None:
    """Why run `number` is the beginning of one, as a crash or a full disk leaves it; None for a whole run."""
    ends = [run.end, *(step.get("emitted") for step in run.steps[-1:])]
    if run.end is None:
        after = f"after step {len(run.steps) - 1}" if run.steps else "before its first step"
        why = f"has no line `end`: it was cut off {after}"
    elif trace.finish is None and not any(part is not None and "finish" in part for part in ends):
        why = f"ends after {len(trace.output)} of {most} tokens, at no stop, and `end.finish` does not say why"
    else:
        return None
    return f"run {number} (line {run.line}) {why}; --prefix judges the beginning of a run as it is"


def _note_doubts(result: Audit, runs: int, prefix: bool) -> None:
    """Note why the audit is no pass; with `prefix`, runs that were cut off are no reason."""
    tally = result.tally
    tally.excess_ties = excess_ties(tally) or excess_choices(tally)
    result.doubts += filter(None, [result.law.judge(tally)])
    silent = runs - tally.judged
    if not runs:
        result.doubts.append("the file holds no run")
    elif silent > DECLINED_FLOOR * runs:
        result.doubts.append(f"nothing could be judged in {silent} of {runs} runs")
    if not prefix:
        result.doubts += result.cut_off
    tally.errors += [*result.doubts, *filter(None, [undecided_comparison(tally)])]
    result.doubts = tally.errors + [
        f"{error.line} (last lines: {'; '.join(error.error.said)})" for error in tally.internal
    ]


def _judge(
    result: Audit,
    number: int,
    run: FileRun,
    *,
    model: Checkpoint | None,
    asked_invariants: tuple[Invariant, ...],
    exact: Definition,
    parts: tuple[Checkpoint, tuple[int, ...]] | None = None,
) -> None:
    """Judge one run, and add it to `result`; of `parts`, the model judges the steps of these numbers."""
    case = run.case(model)
    trace = _admit_trace(run, case)
    result.cut_off += filter(None, [_why_cut_off(number, run, trace, case.stops.max_new_tokens)])
    of_request = run.request is not None
    has_model = isinstance(case.model, Seeded) or model is not None
    architecture = _architecture(run, case, trace, exact if has_model else None)
    oracle: Oracle = exact if has_model else WithoutModel(architecture)
    out = (*(NOT_OF_A_REQUEST if of_request else ()), *(() if run.is_padding_known else NEEDS_PADDING))
    invariants = tuple(invariant for invariant in asked_invariants if invariant.name not in out)
    subject = RecordedRun(run.engine or Path(result.file).name, case, trace, run.takes_tape, of_request)
    verdict = judge(case, invariants, oracle, subject)
    if parts is not None:
        verdict = with_excerpts(verdict, _verdicts_of_parts(run, *parts, invariants, exact))
    result.tally.add(replace(verdict, evidence=result.law.take(case, trace, verdict.evidence)))
    result.findings += [LocatedFinding(_line_of(run, finding), number, finding) for finding in verdict.findings]
    for invariant in asked_invariants:
        outcome = verdict.outcomes.get(invariant.name)
        if outcome == "internal":
            result.unasked.setdefault(invariant.name, Counter())["internal", ""] += 1
        elif outcome not in ("checked", "failed"):
            why_not = _why_silent(invariant, case, oracle, subject) if invariant in invariants else ("evidence", "")
            result.unasked.setdefault(invariant.name, Counter())[why_not] += 1


def _verdicts_of_parts(
    run: FileRun, model: Checkpoint, chosen: tuple[int, ...], invariants: tuple[Invariant, ...], exact: Definition
) -> list[tuple[int, Verdict]]:
    """The model's verdict on each stretch of chosen steps, with the number of its first step."""
    verdicts = []
    for excerpt in excerpts(run, chosen):
        case = excerpt.run.case(model)
        subject = RecordedRun("excerpt", case, _admit_trace(excerpt.run, case), run.takes_tape, of_request=True)
        verdicts.append((excerpt.first, judge(case, invariants, exact, subject)))
    return verdicts


def _admit_trace(run: FileRun, case: Case) -> Trace:
    """The trace of a run, with arrays of the types and shapes that the case gives them.

    Raises:
        UnreadableLine: A field has another type or shape; the complaint says what is expected.
    """
    trace = run.trace(case)
    sizes = sizes_of(case, run.takes_tape)
    number = 0
    try:
        for number, step in enumerate(trace.steps):  # noqa: B007 - the complaint names the step
            admit_step(step, sizes)
    except Misshapen as wrong:
        raise UnreadableLine(run.lines[number], f"step {number}, {wrong.why}") from None
    declared = Declaration(
        name="recorded", device="cpu", dtypes=(case.dtype,), reveals=frozenset(Stage), takes_tape=run.takes_tape
    )
    try:
        return admit_trace(trace, case, declared)
    except Misshapen as wrong:
        raise UnreadableLine(run.end_line or run.line, f"end, {wrong.why}") from None


def _architecture(run: FileRun, case: Case, trace: Trace, exact: Definition | None) -> Architecture:
    """The architecture by which trees are lowered: the model's, or a stand-in with the layers of the trace.

    Raises:
        UnreadableLine: A step shows a number of masks that the layers do not have.
    """
    visible_masks = {
        number: step.lowered.visible for number, step in enumerate(trace.steps) if step.lowered is not None
    }
    masks = {number: len(visible) for number, visible in visible_masks.items() if visible is not None}
    if exact is not None:
        try:
            architecture = exact.model(case.model, case.dtype).parameters.architecture
        except Malformed as why:
            raise UnreadableLine(run.line, str(why)) from None
    else:
        windows = run.request.windows if run.request is not None else ()
        chunks = run.request.chunks if run.request is not None else ()
        layers = len(windows) or len(chunks) or next(iter(masks.values()), 1)
        try:
            architecture = Architecture(
                "llama", case.model.vocab_size, 2, 2, 1, 1, 2, windows=windows or (0,) * layers, chunks=chunks
            )
        except Malformed as why:
            raise UnreadableLine(run.line, f"run.{why}") from None
    for number, count in masks.items():
        if count != architecture.layers:
            line = (
                f"step {number}, lowered.visible: {count} masks, expected one for each of {architecture.layers} layers"
            )
            raise UnreadableLine(run.lines[number], line)
    return architecture


def _why_silent(invariant: Invariant, case: Case, oracle: Oracle, subject: RecordedRun) -> Why:
    """Why `invariant` compared nothing, found by asking it alone."""
    missing = invariant.needs - subject.reveals
    if missing:
        return "stages", ", ".join(stage.word for stage in sorted(missing))
    without = oracle if isinstance(oracle, WithoutModel) else None
    subject.asked_again = False
    if without is not None:
        without.asked_stages.clear()
    outcome = judge(case, [invariant], oracle, subject).outcomes[invariant.name]
    if without is not None and without.asked_stages:
        return "model", ""
    if subject.asked_again:
        return "runs", ""
    return ("evidence", "") if outcome == "unobserved" else ("nothing", "")


def _line_of(run: FileRun, finding: Finding) -> int:
    """The line of the file on which the difference stands."""
    if finding.invariant == "lossless.accounting" and finding.where.get("side") != "tokens":
        return run.end_line or run.line
    return run.lines[finding.step] if finding.step < len(run.lines) else run.end_line or run.line
