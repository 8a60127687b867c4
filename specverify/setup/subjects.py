"""Opening of backends as Subjects, with planted faults by name.

A Subject turns a backend's refusals and exceptions into values (`Refusal`, `Crash`) that invariants can judge.
"""

import traceback
from collections.abc import Callable, Sequence
from dataclasses import replace
from pathlib import Path

from specverify.backends import faults
from specverify.backends.admission import LiveAdmission, Misshapen, admit_blocks, admit_trace
from specverify.backends.base import (
    Backend,
    BrokenContract,
    ExactLaw,
    ProgramFailure,
    Serving,
    SharesPrefills,
    StageFailure,
    Unavailable,
    Unsupported,
)
from specverify.backends.faults.fault import Fault
from specverify.backends.flags import Mode, mode_of
from specverify.backends.places import function_at
from specverify.backends.registry import open_backend
from specverify.properties.verdict.subject import Crash, Live, NoTrace, Refusal, Subject
from specverify.reference.case import Case
from specverify.reference.probability_world import Blocks, GivenTree, World
from specverify.reference.session import Action
from specverify.reference.tape import stride
from specverify.reference.trace import Array, Draw, Stage, Trace
from specverify.setup.selection import Unknown


def fault_named(name: str) -> Fault:
    """The catalogue fault of that name.

    Raises:
        Unknown: There is no such fault.
    """
    try:
        return faults.fault_named(name)
    except KeyError as why:
        raise Unknown(str(why.args[0])) from None


def check_seams(name: str) -> None:
    """Check that faults can be planted in a backend, by opening it.

    Raises:
        Unknown: The backend exposes no seams.
        UnknownBackend, Unavailable, WrongFlag: As in `specverify.backends.registry.open_backend`.
    """
    # Planting a fault that changes nothing tells whether the backend has seams.
    nothing = Fault("nothing", Stage.DRAFTED, "Nothing goes wrong.", "", "", lambda seams: seams)
    try:
        faults.plant(open_backend(name), nothing)
    except Unsupported as why:
        raise Unknown(str(why)) from None


def open_planted(name: str, fault: str | None, mode: str | None = None) -> Backend:
    """Open a backend, with a planted `fault` if one is named, in `mode` or else in the environment's mode.

    Raises:
        Unknown: The fault is unknown, the backend exposes no seams for it, or the backend has no modes.
        UnknownBackend, Unavailable, WrongFlag: As in `specverify.backends.registry.open_backend`.
    """
    backend = open_backend(name)
    if fault is not None:
        try:
            faults.plant(backend, fault_named(fault))
        except Unsupported as why:
            raise Unknown(str(why)) from None
    if mode is not None:
        if mode_in(backend) is None:
            raise Unknown(f"--mode {mode}: backend {backend.declaration.name} has no modes of ours")
        backend.mode = mode_of(mode)  # type: ignore[attr-defined]
    return backend


def mode_in(backend: Backend) -> Mode | None:
    """The mode in which a backend of ours runs; None for a backend without modes."""
    mode = getattr(backend, "mode", None)
    return mode if isinstance(mode, Mode) else None


def subject_of(backend: Backend, keep: int = 48) -> Subject:
    """`backend` as invariants see it; its refusals and exceptions become values, and it remembers `keep` runs."""
    declared = backend.declaration

    def run(case: Case, ask: Callable[[Case], Trace] | None = None) -> Trace | Refusal | Crash:
        reason = declared.outside(case)
        if reason is not None:
            return Refusal(reason)
        try:
            return admit_trace((ask or backend.run)(case), case, declared)
        except Unavailable:  # no outcome of this case: the engine is gone, and the run ends
            raise
        except Misshapen as why:
            place = function_at(backend.run)
            return Crash(why.stage, why.why, (f"{place} in run",) if place else ())
        except (Exception, SystemExit, GeneratorExit) as why:
            return outcome_of(why)

    def watch(case: Case) -> Trace | Refusal | Crash:
        from specverify.backends.run_draws import recording_run  # brings torch

        draws: list[Draw] = []
        outcome = run(case, recording_run(backend.run, draws))
        return replace(outcome, draws=tuple(draws)) if isinstance(outcome, Trace) else outcome

    def serve(case: Case) -> Live:
        assert isinstance(backend, Serving)
        reason = declared.outside(case)
        if reason is not None:
            raise NoTrace(Refusal(reason))
        return GuardedLive(backend, case, LiveAdmission(case, declared))

    def share(case: Case, extends: bool) -> Trace | Refusal | Crash:
        assert isinstance(backend, SharesPrefills)
        return run(case, lambda case: backend.run_variant(case, extends))

    tables = Guarded(backend) if isinstance(backend, ExactLaw) else None
    door = serve if declared.sessions and isinstance(backend, Serving) else None
    subject = Subject(declared.name, run, declared.reveals, keep, tables, declared.takes_tape, door)
    subject.abilities = declared
    subject.declines = declared.outside
    # The places of a tape's coins are in every trace.
    subject.watch = None if declared.takes_tape else watch
    subject.share = share if isinstance(backend, SharesPrefills) else None
    subject.variant_interval = declared.variant_interval
    subject.tables_dtype = declared.tables_dtype
    return subject


def outcome_of(why: BaseException) -> Refusal | Crash:
    """The outcome for a backend's exception: a refusal, or a crash, since an engine under test may raise anything."""
    if isinstance(why, Unsupported):
        return Refusal(str(why))
    if isinstance(why, Misshapen):
        return Crash(why.stage, why.why)  # no frames: they would be those of our admission code
    if isinstance(why, ProgramFailure):
        return Crash(None, why.why, why.last_lines)  # no frames: the engine is another program
    if isinstance(why, StageFailure):
        return Crash(why.stage, why.why, last_frames(why))
    if isinstance(why, BrokenContract):
        return Crash(None, str(why), last_frames(why), is_contract=True)
    return Crash(None, in_words(why), last_frames(why))


def in_words(why: BaseException) -> str:
    """An exception in one line: its type, and the beginning of its message, if `str` can make one."""
    try:
        message = " ".join(str(why).split())[:200]
    except Exception:  # `__str__` is the backend's code too
        message = "(it cannot be put into words)"
    return f"{type(why).__name__}: {message}"


FRAMES = 6
"""Number of innermost frames that a crash keeps: the backend's own, not the frames of our code that called it."""

OUR_FOLDER = Path(__file__).parent
"""Our folder, whose frames say nothing about the backend."""

SOURCE = 120
"""Most characters of a source line in a frame."""


def last_frames(why: BaseException) -> tuple[str, ...]:
    """The innermost FRAMES frames of the error behind `why`, each `file:line in function: source line`, latest last.

    If errors were raised from each other, the frames are those of the first one. A file keeps the last two parts of its
    path.
    """
    # The first error names the place of the fault; later ones only wrap it.
    while why.__cause__ is not None:
        why = why.__cause__
    frames = [
        frame for frame in traceback.extract_tb(why.__traceback__) if OUR_FOLDER not in Path(frame.filename).parents
    ]
    return tuple(
        f"{'/'.join(Path(frame.filename).parts[-2:])}:{frame.lineno} in {frame.name}: {(frame.line or '')[:SOURCE]}"
        for frame in frames[-FRAMES:]
    )


class GuardedLive:
    """A backend's live session, whose refusals and exceptions become `NoTrace`."""

    def __init__(self, backend: Serving, case: Case, door: LiveAdmission) -> None:
        self._door = door
        try:
            self._live = backend.serve(case)
        except Exception as why:
            raise NoTrace(outcome_of(why)) from why

    def do(self, action: Action) -> None:
        """As `Live.do`; raises NoTrace."""
        try:
            self._live.do(action)
            self._door.do(action)
        except (Exception, SystemExit, GeneratorExit) as why:
            raise NoTrace(outcome_of(why)) from why

    @property
    def trace(self) -> Trace:
        """As `Live.trace`; raises NoTrace."""
        try:
            return self._door.admit(self._live.trace)
        except Exception as why:
            raise NoTrace(outcome_of(why)) from why


class Guarded:
    """A backend's tables, whose refusals and exceptions become `NoTrace`."""

    def __init__(self, tables: ExactLaw) -> None:
        self._tables = tables

    def verify(self, given: GivenTree, tape: Array) -> Blocks:
        """As `ExactLaw.verify`; raises NoTrace."""
        size = len(tape), given.tree, given.target.shape[1], tape.shape[1]
        return self._ask_guarded(lambda: admit_blocks(self._tables.verify(given, tape), *size))

    def rounds(self, world: World, tape: Array) -> Blocks:
        """As `ExactLaw.rounds`; raises NoTrace."""
        size = len(tape), world.shape, world.vocab, tape.shape[1]
        return self._ask_guarded(lambda: admit_blocks(self._tables.rounds(world, tape), *size))

    def samples(self, world: World, seeds: Array) -> Blocks:
        """As `ExactLaw.samples`; raises NoTrace."""
        # No tape is given here, so that its width follows from the tree.
        size = len(seeds), world.shape, world.vocab, stride(len(world.shape))
        return self._ask_guarded(lambda: admit_blocks(self._tables.samples(world, seeds), *size))

    def batches(self, world: World, seeds: Sequence[Array]) -> tuple[Blocks, ...]:
        """As `Tables.batches`; raises NoTrace."""
        return tuple(self.samples(world, each) for each in seeds)

    def _ask_guarded(self, ask: Callable[[], Blocks]) -> Blocks:
        try:
            return ask()
        except Unsupported as why:
            raise NoTrace(Refusal(str(why))) from why
        except Misshapen as why:
            raise NoTrace(Crash(why.stage, why.why)) from why
        except Exception as why:
            raise NoTrace(Crash(Stage.ACCEPTED, in_words(why), last_frames(why))) from why


def manifest(backend: Backend) -> dict[str, str]:
    """The facts of a run that depend on the backend: device, mode, and whether it was emulated."""
    device, mode = backend.declaration.device, mode_in(backend)
    words = {"device": device}
    if device == "cuda":
        import torch

        # An engine in processes of its own may compute on a device that this build of torch does not know.
        words["device"] = (
            torch.cuda.get_device_name() if torch.cuda.is_available() else "cuda, of which torch sees none"
        )
    if mode is not None:
        words["mode"] = mode.word
    return words | ({"emulated": "true"} if backend.declaration.emulated else {})
