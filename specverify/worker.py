"""What one worker does with its slice: open backend and oracle, then search drawn or given cases."""

from collections.abc import Callable
from dataclasses import replace
from multiprocessing.synchronize import Event

from backends.base import Backend, Unavailable, WrongFlag
from backends.registry import UnknownBackend
from properties.finding import Verdict
from properties.invariant import Oracle
from reference.case import Case
from reference.custom import Inadmissible
from reference.decoder import Oracle as NumpyOracle
from reference.trace import Trace
from specverify import processors, prompted
from specverify.beside import with_eager
from specverify.news import Done, Opened
from specverify.opening import mode_in, open_planted, subject_of
from specverify.plan import Plan
from specverify.search import Search, stripped
from specverify.selection import Unknown, invariants_matching
from specverify.unusable import MissingInput, UnusableInput


class Refused(Exception):
    """The plan cannot be carried out: one line, and exit code 2 (wrong input) or 3 (something is missing)."""

    def __init__(self, why: str, code: int) -> None:
        super().__init__(why)
        self.code = code


def work(plan: Plan, tell: Callable[[object], None], stopped: Callable[[], bool], stop: Event, found: Event) -> None:
    """Search the slice `plan`, telling verdicts as they come and `Done` at the end.

    Raises:
        Refused: when the plan's backend, model, prompts or names cannot be opened, or a processor fails.
    """
    try:
        invariants = invariants_matching(plan.invariants)
        backend = open_planted(plan.backend, plan.fault, plan.mode)
        if plan.model is None:
            processors.admit(plan.processors)
        oracle = oracle_of(plan)
        subject = subject_of(backend, keep=48 if plan.model is None else 8)
        given = prompted.prepare(plan, subject, invariants) if plan.model is not None else None
    except (Unknown, UnknownBackend, UnusableInput, WrongFlag) as why:
        raise Refused(str(why), 2) from why
    except (Unavailable, MissingInput) as why:
        raise Refused(str(why), 3) from why
    _settle_threads(backend, plan)
    declared = backend.declaration
    wanted = plan.cases if given is None else given.total
    names = tuple(one.name for one in invariants)
    tell(Opened(declared.name, declared.device, declared.emulated, manifest(backend), names, wanted))

    def emit(verdict: Verdict) -> None:
        tell(stripped(verdict))

    search = Search(plan, invariants, oracle, subject, emit, stopped)
    try:
        if given is None:
            search.run()
        else:
            search.run_given(given.cases(oracle))
        if search.differs:
            found.set()
            # Another worker's find ends the drawing, not the shrinking of this one; Ctrl-C ends both.
            search.stopped = stop.is_set
        failure = search.failure()
        tell(Done(None if failure is None else with_eager(failure, oracle), search.shrink_s))
    except Inadmissible as why:
        raise Refused(f"--processor {why.why}", 2) from why


def oracle_of(plan: Plan) -> Oracle:
    """The NumPy oracle, or the backend that `--against` puts in its place, run in float64 where it can."""
    if plan.against is None:
        return NumpyOracle()
    reference = open_planted(plan.against, None)
    exact = "float64" in reference.declaration.dtypes
    other = subject_of(reference)

    def ask(case: Case) -> Trace:
        return other(replace(case, dtype="float64") if exact and plan.model is None else case)

    return ask


def _settle_threads(backend: Backend, plan: Plan) -> None:
    """One torch thread per worker for small models: bit-stable, and fastest."""
    if backend.declaration.device == "cpu" and plan.model is None:
        import torch

        torch.set_num_threads(1)


def manifest(backend: Backend) -> dict[str, str]:
    """What of a run depends on the backend: device, mode, and whether it was emulated."""
    device, mode = backend.declaration.device, mode_in(backend)
    words = {"device": device}
    if device == "cuda":
        import torch

        words["device"] = torch.cuda.get_device_name()
    if mode is not None:
        words["mode"] = mode.word
    return words | ({"emulated": "true"} if backend.declaration.emulated else {})
