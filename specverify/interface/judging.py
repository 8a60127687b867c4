"""`judge` and `replay`: one case on one engine."""

from collections.abc import Sequence
from contextlib import ExitStack
from pathlib import Path

from specverify.backends.base import Unavailable, Unsupported
from specverify.campaign.chosen_reference import certify_alone, check_reference, open_for_case
from specverify.campaign.judged import failure_of
from specverify.campaign.replay import replay as replay_file
from specverify.interface.engines import Engine, named
from specverify.interface.results import JudgeResult, Replay
from specverify.isolation import door
from specverify.isolation.backend_spec import BackendSpec
from specverify.isolation.limits import Patience
from specverify.properties.reference_names import NUMPY
from specverify.properties.verdict.judge import judge as judge_case
from specverify.properties.verdict.peer import Peer
from specverify.reference.architecture import Checkpoint
from specverify.reference.case import Case
from specverify.references.certificate import ReferenceDisagrees
from specverify.setup.errors import MissingInput
from specverify.setup.selection import check_globs, invariants_matching


def judge(
    case: Case,
    engine: Engine = "cpu-eager",
    *,
    invariants: Sequence[str] = (),
    against: str | None = None,
    reference: str = NUMPY,
    fault: str | None = None,
    case_timeout: float | None = None,
) -> JudgeResult:
    """Judge one case on an engine.

    >>> from specverify import judge
    >>> from specverify.adapt import Case
    >>> from specverify.properties.strategies.models import GALLERY
    >>> from specverify.reference.architecture import Seeded
    >>> case = Case(Seeded(GALLERY[0], 1), prompt=(3, 1, 4))
    >>> judge(case, "cpu-eager", invariants=["lossless.*"]).outcome
    'agree'

    Args:
        case: The case: model, prompt, draft and settings.
        engine: As for `diff`.
        invariants: Globs of the invariants to judge; all of them by default.
        against: Another backend, or `transformers`, in the oracle's place.
        reference: What computes the oracle, as for `diff`.
        fault: A fault of the catalogue that is planted first.
        case_timeout: Seconds of one answer of the engine.

    Raises:
        UnusableInput, Unknown, UnknownBackend: The engine, a glob or a fault is wrong.
        MissingInput: The machine lacks a device or a package.
    """
    check_globs(tuple(invariants))
    check_reference(reference, against)
    small = not isinstance(case.model, Checkpoint)
    with ExitStack() as stack:
        name = stack.enter_context(named(engine))
        spec = BackendSpec(name, fault, None, threads=1 if small else 0)
        try:
            opened = stack.enter_context(door.open_backend(spec, Patience(case_timeout)))
            oracle = open_for_case(reference, against, stack, case, opened.declaration.device)
        except (Unavailable, Unsupported) as why:
            raise MissingInput(str(why)) from None
        subject = opened.subject()
        verdict = judge_case(case, invariants_matching(tuple(invariants), isinstance(oracle, Peer)), oracle, subject)
        try:
            verdict = certify_alone(verdict, reference, oracle)
        except ReferenceDisagrees as why:
            raise MissingInput(str(why)) from None
        failure = failure_of(verdict, oracle, subject, backend=name, fault=fault, against=against, reference=reference)
    return JudgeResult(verdict, failure)


def replay(
    file: str | Path,
    engine: Engine | None = None,
    *,
    fault: str | None = None,
    against: str | None = None,
    reference: str = NUMPY,
    models: Sequence[str] = (),
    drafts: Sequence[str] = (),
    processors: Sequence[str] = (),
    mode: str | None = None,
    case_timeout: float | None = None,
) -> Replay:
    """Run the saved case in `file` again, as `specverify replay` does.

    Args:
        file: A bundle that a run saved, or a file with a bare case.
        engine: As for `diff`; by default the backend that the file names, unless that is code of the user's.
        fault: A fault of the catalogue that is planted first.
        against: The reference in the oracle's place; by default the one that the file names.
        reference: What computes the oracle, as for `diff`.
        models: Folders or hub ids of the case's checkpoints: a name in the file alone opens nothing.
        drafts: Folders of the case's draft heads.
        processors: Custom logits processors of the case that may run.
        mode: `reference` or `performance`, for a backend of ours.
        case_timeout: Seconds of one answer of the engine.

    Raises:
        Unreadable: The file holds neither a bundle nor a case.
        UnusableInput, Unknown, UnknownBackend: Another argument is wrong, or code of the user's must be named.
        MissingInput: The machine lacks a device or a package.
    """
    with ExitStack() as stack:
        name = None if engine is None else stack.enter_context(named(engine))
        try:
            result = replay_file(
                str(file),
                name,
                fault,
                models=tuple(models),
                heads=tuple(drafts),
                names=tuple(processors),
                mode=mode,
                against=against,
                reference=reference,
                case_timeout_s=case_timeout,
            )
        except Unavailable as why:
            raise MissingInput(str(why)) from None
    return Replay(result)
