"""The work of `replay`: run one saved case again; say FAILED, FIXED or CHANGED."""

import shlex
from contextlib import ExitStack
from dataclasses import dataclass, replace

from specverify.backends.base import Unsupported
from specverify.campaign.chosen_reference import certify_alone, check_reference, open_for_case
from specverify.campaign.eager_twin import with_eager
from specverify.campaign.judged import failure_of
from specverify.checkpoints.placing import place_checkpoints
from specverify.checkpoints.tapped_layers import span_of
from specverify.isolation import door
from specverify.isolation.backend_spec import BackendSpec
from specverify.isolation.limits import BUILT_IN_S, CHECKPOINT_S, START_S, Patience
from specverify.properties.invariants import BESIDE_LAYERS
from specverify.properties.invariants.layers import NAME as BETWEEN_TAPS
from specverify.properties.reference_names import NUMPY
from specverify.properties.residue import Residue
from specverify.properties.tally import Failure
from specverify.properties.verdict.finding import CertifiedRows, Finding, Verdict
from specverify.properties.verdict.internal import JUDGE, InternalError
from specverify.properties.verdict.judge import judge
from specverify.properties.verdict.peer import Peer
from specverify.reference.architecture import Checkpoint
from specverify.reference.case import Case
from specverify.reference.malformed import Malformed
from specverify.reference.oracle.sampled_step import check_grammar
from specverify.reference.user_processors import Inadmissible
from specverify.references.certificate import ReferenceDisagrees
from specverify.reports import bundle
from specverify.reports.counts import rows_words
from specverify.reports.format import cut
from specverify.setup import processors
from specverify.setup.errors import MissingInput, UnusableInput
from specverify.setup.selection import invariants_matching


@dataclass(frozen=True)
class ReplayResult:
    """The result of a replay.

    Attributes:
        word: FAILED (the saved finding again), CHANGED (another finding), FIXED (none), or UNJUDGED. A file with a
            case and no finding gives DIFFER or AGREE.
        failure: The failure, or None.
        why: One sentence that explains the word.
        emulated: Whether the backend emulates a device that this machine lacks.
        saved_fault: The fault that was planted when the file was saved, if this replay plants none; else None.
        certified: The rows that a reference on a device computed, and those that NumPy certified.
        residue: What the runs left in the backend's process and that changes no answer.
        internal: Exceptions inside the judge; with any, what does not differ is UNJUDGED.
    """

    word: str
    failure: Failure | None
    why: str
    emulated: bool = False
    saved_fault: str | None = None
    certified: CertifiedRows | None = None
    residue: tuple[Residue, ...] = ()
    internal: tuple[InternalError, ...] = ()

    @property
    def exit_code(self) -> int:
        """0 if nothing differs, 1 if something differs, 3 if nothing was judged."""
        return {"FIXED": 0, "AGREE": 0, "UNJUDGED": 3}.get(self.word, 1)


def replay(
    file: str,
    backend: str | None,
    fault: str | None,
    *,
    models: tuple[str, ...] = (),
    names: tuple[str, ...] = (),
    mode: str | None = None,
    against: str | None = None,
    reference: str = NUMPY,
    case_timeout_s: float | None = None,
    start_timeout_s: float = START_S,
    threads: int = 0,
    memory: int | None = None,
    heads: tuple[str, ...] = (),
) -> ReplayResult:
    """Run the case in `file`; options that are None are taken from the file, except code, paths and hub ids.

    The following are used only if the arguments name them: a fault, a backend `pkg.module:factory` (to run the case or
    as the reference), the case's custom processors, and its checkpoints as `models`
    and `heads` (`placing.place_checkpoints`).

    Raises:
        Unreadable, UnusableInput, MissingInput, Unknown, UnknownBackend, Unavailable, WrongFlag: With one line each.
    """
    saved = bundle.load(file)
    if backend is None and saved.backend is not None and ":" in saved.backend:
        raise UnusableInput(f"{file}: saved with {saved.backend}, code of its own: name it with --backend to run it")
    if against is None and saved.against is not None and ":" in saved.against:
        raise UnusableInput(f"{file}: compared with {saved.against}, code of its own: name it with --against to run it")
    against = against or saved.against
    check_reference(reference, against)
    name = backend or saved.backend or "cpu-eager"
    # Before the case is run: a processor is the user's code, and only named ones may run.
    processors.admit(names, saved.case.model.vocab_size)
    processors.check_admitted(saved.case, file)
    check_grammars(saved.case, file)
    case = place_checkpoints(saved, models, file, understood=against is None, heads=heads)
    small = not isinstance(case.model, Checkpoint)
    backend_spec = BackendSpec(name, fault, mode, threads=threads or (1 if small else 0))
    patience = Patience(case_timeout_s, BUILT_IN_S if small else CHECKPOINT_S, start_timeout_s)
    with ExitStack() as stack:
        opened = stack.enter_context(door.open_backend(backend_spec, patience, memory))
        opened.admit(names, (case.model.vocab_size,))
        span = span_of(case) if saved.invariant == BETWEEN_TAPS else None
        try:
            oracle = span or open_for_case(reference, against, stack, case, opened.declaration.device)
        except Unsupported as why:
            raise MissingInput(f"--against {against}: {why}") from why
        subject = opened.subject()
        try:
            asked = BESIDE_LAYERS if span is not None else invariants_matching((), isinstance(oracle, Peer))
            verdict = judge(case, asked, oracle, subject)
            verdict = certify_alone(verdict, reference, oracle)
        except ReferenceDisagrees as why:
            return ReplayResult("UNJUDGED", None, str(why))
        except Inadmissible as why:
            raise UnusableInput(f"--processor {why.why}") from None
        # The saved finding comes first, even if another finding is earlier.
        finding = _saved_finding(verdict, saved) or verdict.first
        failure = None
        if finding is not None:
            failure = failure_of(
                verdict,
                oracle,
                subject,
                finding=finding,
                backend=name,
                fault=fault,
                against=against,
                reference=reference,
                model=next(iter(models), saved.model),
                file=file,
                drawn=saved.case.id,
            )
            assert failure is not None
            failure = with_eager(failure, oracle)
    result = replace(_result(verdict, saved, finding, failure), residue=tuple(opened.residue.values()))
    if reference != NUMPY:
        words = f"{result.why}; {reference}, {rows_words(verdict.reference_rows)}"
        result = replace(result, why=words, certified=verdict.reference_rows)
    if saved.fault is not None and fault is None:
        name = shlex.quote(cut(saved.fault, 60))
        planted = f"saved with --fault {name} planted; give --fault {name} to plant it again"
        result = replace(result, why=f"{result.why}; {planted}", saved_fault=saved.fault)
    if opened.declaration.emulated:
        return replace(result, why=f"{result.why}; EMULATED, no hardware was judged", emulated=True)
    return result


def _result(verdict: Verdict, saved: bundle.Bundle, finding: Finding | None, failure: Failure | None) -> ReplayResult:
    if verdict.unsupported is not None and finding is None:
        return ReplayResult("UNJUDGED", None, f"the case is declined: {verdict.unsupported}")
    if finding is None and verdict.internal:
        return _unanswered_result(verdict, saved)
    if saved.invariant is None:
        return ReplayResult("DIFFER" if finding else "AGREE", failure, "the file holds a case and no finding")
    if saved.invariant == JUDGE and finding is None:
        return ReplayResult("FIXED", None, "the judge has an answer")
    outcome = verdict.outcomes.get(saved.invariant)
    # FIXED needs a comparison: an invariant that saw nothing proves nothing.
    if finding is None and outcome != "checked":
        return ReplayResult("UNJUDGED", None, f"{saved.invariant} is {outcome or 'unknown'} here")
    if finding is None:
        return ReplayResult("FIXED", None, f"{saved.invariant} holds")
    if _saved_finding(verdict, saved) is not None:
        return ReplayResult("FAILED", failure, f"{saved.invariant} fails as saved")
    return ReplayResult("CHANGED", failure, f"{saved.invariant} holds at the saved stage, {finding.invariant} does not")


def _unanswered_result(verdict: Verdict, saved: bundle.Bundle) -> ReplayResult:
    """The result where the judge raised and nothing differs."""
    first = next((error for error in verdict.internal if error.invariant == saved.invariant), verdict.internal[0])
    again = " again" if first.invariant == saved.invariant and saved.stage is None else ""
    why = f"internal error in {first.invariant}{again}: {first.why}; please report it with this file"
    return ReplayResult("UNJUDGED", None, why, internal=verdict.internal)


def _saved_finding(verdict: Verdict, saved: bundle.Bundle) -> Finding | None:
    """The verdict's finding with the invariant and stage of the saved one, or None."""
    findings = (
        finding for finding in verdict.findings if (finding.invariant, finding.stage) == (saved.invariant, saved.stage)
    )
    return next(findings, None)


def check_grammars(case: Case, file: str) -> None:
    """Check that the grammar of every request of the case in `file` is of its dialect, and has a first token.

    Raises:
        UnusableInput: It is not, with the reason in one line.
    """
    mates = 0 if case.session is None else len(case.session.mates)
    try:
        for number in range(1 + mates):
            check_grammar(case.alone(number))
    except Malformed as why:
        raise UnusableInput(f"{file}: {why}") from None
