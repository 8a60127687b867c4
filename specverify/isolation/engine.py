"""The engine's process: it opens one backend and answers a worker's requests.

Requests are tuples that begin with a word, and they are answered one after the other. Each answer is a tuple too:
`told` with a value, `absent` with the reason for a missing value (declined, crashed), `gone` with one line where an
engine elsewhere does not answer any more, or, while opening, `refused` with the name of a complaint and its line. An
answer to a request after `open` ends with whether the run left its process changed, and with what else it left, a
phrase by kind.
"""

import contextlib
import faulthandler
import fcntl
import json
import mmap
import os
import resource
import signal
import socket
import sys
import tempfile
import time
from collections.abc import Callable
from typing import Any

from specverify.backends.base import Keeping, Preparing, Unavailable
from specverify.isolation.attributes import Attributes
from specverify.isolation.backend_spec import PREPARE, THREADS, VARIANT
from specverify.isolation.leftovers import changed_phrases, leftovers
from specverify.isolation.lifeline import die_with
from specverify.isolation.residue import changes, state
from specverify.isolation.wire import Closed, Garbled, Wire
from specverify.properties.verdict.subject import Crash, Live, NoTrace, Refusal, Subject
from specverify.reference.case import Case
from specverify.reference.trace import Trace
from specverify.setup.subjects import manifest, open_planted, outcome_of, subject_of

COMPLAINTS = ("Unknown", "UnknownBackend", "UnusableInput", "WrongFlag", "Unavailable", "MissingInput")
"""Names of exceptions during opening that the worker raises again; any other is a defect of ours."""

DUMP = signal.SIGUSR1
"""The signal on which the process writes every thread's stack to its standard error."""

COMPILED = "TORCHINDUCTOR_CACHE_DIR"
"""The variable that names the folder of what torch compiles."""

LOST_CONNECTION = 70
"""Exit code of an engine whose connection was closed by the run."""

NOTED_S = 1.0
"""Seconds in which a fork must note its process id; long enough for a busy machine."""

LIVES = 8
"""Most live sessions that are kept; the oldest is dropped, since no request announces the end of a session."""

OUT_OF_MEMORY_FIRST = "700"
"""Linux's `oom_score_adj` of an engine: if memory runs out, the kernel kills the engine and not the worker."""


def main(connection: str, keeper: str, printed: str, engine: str) -> None:
    """The entry point of a fresh interpreter; a forked engine enters at `serve`."""
    serve(int(connection), int(printed), int(keeper), json.loads(engine))


def serve(connection: int, printed: int, keeper: int, engine: dict[str, Any]) -> None:
    """Open the backend that `engine` names (`specverify.isolation.backend_spec.BackendSpec`), then answer requests.

    It returns when the worker closes the connection.
    """
    _settle(printed, keeper)
    wire = Wire(socket.socket(fileno=connection))
    sys.path[:] = engine["path"]
    # A fork has the keeper's environment, path and folder, which may be older than the worker's.
    os.environ.clear()
    os.environ.update(engine["environment"])
    # torch keeps what it compiles among temporary files; the engine's own folder goes with the engine.
    os.environ.setdefault(COMPILED, os.path.join(tempfile.gettempdir(), f"torchinductor_{os.getuid()}"))
    tempfile.tempdir = engine["temporary"]  # the keeper removes the folder when this process has ended
    os.chdir(engine["folder"])  # where relative paths of checkpoints begin
    with contextlib.suppress(Closed, Garbled):
        # The first request is `open`, which needs no more than the facts in `engine`.
        wire.receive()
        try:
            served = Served(engine)
            facts = served.facts()
        except Exception as why:
            kind = type(why).__name__
            complaint = kind if kind in COMPLAINTS else ""
            wire.send(("refused", complaint, str(why) if complaint else f"{engine['backend']}: {kind}: {why}"))
            return
        wire.send(("told", facts, False))
        while True:
            answer = served.answer(wire.receive())
            # A run that closes descriptors at random may have closed ours; sending would fail without a reason.
            if not _open(connection):
                sys.stderr.write("the run closed a descriptor that is not its own: the connection to the judge\n")
                os._exit(LOST_CONNECTION)
            try:
                wire.send(answer)
            except (TypeError, AttributeError, ValueError) as why:  # the backend's object cannot be pickled
                why_not = f"its answer cannot leave its process: {' '.join(str(why).split())[:200]}"
                wire.send(("absent", Crash(None, why_not), True, {}))


def _open(descriptor: int) -> bool:
    try:
        os.fstat(descriptor)
    except OSError:
        return False
    return True


def _settle(printed: int, keeper: int) -> None:
    """Prepare a process that may break in any way.

    Its output goes to the file `printed`, a crash leaves stacks there but no core file, and it ends with the keeper.
    """
    with contextlib.suppress(OSError):
        os.setsid()  # signals of the terminal go to the parent alone
    die_with(keeper)
    # Append, since the worker may truncate the file while the engine writes.
    fcntl.fcntl(printed, fcntl.F_SETFL, fcntl.fcntl(printed, fcntl.F_GETFL) | os.O_APPEND)
    with open(os.devnull) as nothing:
        os.dup2(nothing.fileno(), 0)
    os.dup2(printed, 1)
    os.dup2(printed, 2)
    os.close(printed)
    sys.stdin = open(0, closefd=False)  # noqa: SIM115 - standard streams stay open
    sys.stdout = open(1, "w", buffering=1, closefd=False, errors="backslashreplace")  # noqa: SIM115
    sys.stderr = open(2, "w", buffering=1, closefd=False, errors="backslashreplace")  # noqa: SIM115
    faulthandler.enable(2, all_threads=True)
    faulthandler.register(DUMP, 2, all_threads=True)
    for number in (signal.SIGINT, signal.SIGTERM, signal.SIGHUP):
        signal.signal(number, signal.SIG_IGN)
    resource.setrlimit(resource.RLIMIT_CORE, (0, 0))
    with contextlib.suppress(OSError), open("/proc/self/oom_score_adj", "w") as file:
        file.write(OUT_OF_MEMORY_FIRST)


class Served:
    """One open backend, and the table of requests that a worker may send.

    Raises:
        Unknown, UnknownBackend, UnusableInput, WrongFlag, Unavailable, MissingInput: The backend cannot be opened.
    """

    def __init__(self, engine: dict[str, Any]) -> None:
        self._process = os.getpid()
        self._copies = Copies()
        backend = open_planted(engine["backend"], engine["fault"], engine["mode"])
        self._backend = backend
        if engine["threads"]:
            self._set_threads(engine["threads"])
        self._subject: Subject = subject_of(backend, keep=0)
        self._lives: dict[int, Live] = {}
        self._words: dict[str, Callable[..., Any]] = {
            "run": self._subject.run_fresh,
            PREPARE: self._prepare,
            THREADS: self._set_threads,
            "watch": self._watch,
            VARIANT: self._run_variant,
            "tables": self._ask_tables,
            "serve": self._open_live,
            "do": lambda number, action: self._lives[number].do(action),
            "trace": lambda number: self._lives[number].trace,
            "admit": self._admit,
        }
        # Read once a request: what a thread of the backend changes between two requests is residue too.
        self._state = state()
        self._attributes = Attributes()
        self._leftovers = leftovers()
        self._told_kinds: set[str] = set()

    def facts(self) -> dict[str, Any]:
        """The facts from which the worker builds its own picture of the backend."""
        return {
            "declaration": self._backend.declaration,
            "manifest": manifest(self._backend),
            "tables": self._subject.tables is not None,
            "serves": self._subject.serve is not None,
            "shares": self._subject.share is not None,
            "prepares": isinstance(self._backend, Preparing),
        }

    def answer(self, request: tuple[Any, ...]) -> tuple[Any, ...]:
        """The answer to one request; an exception of the backend, even SystemExit, becomes an answer."""
        try:
            value = self._words[request[0]](*request[1:])
            answer = ("absent", value) if isinstance(value, (Refusal, Crash)) else ("told", value)
        except NoTrace as absent:
            answer = ("absent", absent.outcome)
        except Unavailable as why:
            answer = ("gone", str(why))
        except BaseException as why:
            answer = ("absent", outcome_of(why))
        # A fork that the run made has returned here as if it were the engine: it must not answer a second time.
        if os.getpid() != self._process:
            self._copies.came_back()
            os._exit(0)
        if request[0] in (PREPARE, THREADS):
            # What an engine changes while it is opened is its own: later runs are compared with what is now.
            self._state = state()
            self._attributes = Attributes()
            self._leftovers = leftovers()
            return (*answer, False, {})
        before, self._state = self._state, state()
        kept_pids = self._backend.processes if isinstance(self._backend, Keeping) else ()
        residue = [*changes(before, self._state), *self._attributes.replacements(), *self._copies.phrases(kept_pids)]
        phrases = self._new_leftovers()
        if residue and answer[0] == "told":
            answer = ("absent", Crash(None, f"the run left its process changed: {'; '.join(residue)}"))
        return (*answer, bool(residue), phrases)

    def _new_leftovers(self) -> dict[str, str]:
        """What else the run left, a phrase by kind; each kind once."""
        before, self._leftovers = self._leftovers, leftovers()
        phrases = changed_phrases(before, self._leftovers)
        new = {kind: phrase for kind, phrase in phrases.items() if kind not in self._told_kinds}
        self._told_kinds.update(new)
        return new

    def _set_threads(self, count: int) -> None:
        if self._backend.declaration.device == "cpu":
            import torch

            torch.set_num_threads(count)

    def _prepare(self, case: Case) -> None:
        assert isinstance(self._backend, Preparing)
        self._backend.prepare(case)

    def _watch(self, case: Case) -> Trace | Refusal | Crash:
        assert self._subject.watch is not None
        return self._subject.watch(case)

    def _run_variant(self, case: Case, extends: bool) -> Trace | Refusal | Crash:
        assert self._subject.share is not None
        return self._subject.share(case, extends)

    def _ask_tables(self, method: str, *arguments: Any) -> Any:
        return getattr(self._subject.tables, method)(*arguments)

    def _open_live(self, number: int, case: Any) -> None:
        assert self._subject.serve is not None
        self._lives[number] = self._subject.serve(case)
        while len(self._lives) > LIVES:
            del self._lives[min(self._lives)]

    def _admit(self, names: tuple[str, ...], vocabularies: tuple[int, ...]) -> None:
        from specverify.setup import processors

        processors.admit(names, *vocabularies)


class Copies:
    """The forks of the engine's process, noted in shared memory: a run may fork, but may leave no copy behind.

    Cell 0 says that a copy returned from a run. Cell 1 counts the forks, noted by the parents. The other cells hold the
    process ids that the copies noted. Python's fork hooks see `os.fork`, but no programs that are started.
    """

    BACK, FORKS, FIRST, CELLS = 0, 1, 2, 66

    def __init__(self) -> None:
        self._shared = memoryview(mmap.mmap(-1, 4 * self.CELLS)).cast("I")
        os.register_at_fork(after_in_parent=self._count_fork, after_in_child=self._enter)

    def _count_fork(self) -> None:
        self._shared[self.FORKS] += 1

    def _enter(self) -> None:
        """Note the process id of a fork; called in the fork."""
        # If all cells are taken, the last one is overwritten: one copy is enough for a report.
        free = next((cell for cell in range(self.FIRST, self.CELLS) if not self._shared[cell]), self.CELLS - 1)
        self._shared[free] = os.getpid()

    def came_back(self) -> None:
        """Note that a fork returned from a run as if it were the engine; called in the fork."""
        self._shared[self.BACK] = 1

    def _noted_pids(self) -> list[int]:
        return [int(pid) for pid in self._shared[self.FIRST :] if pid]

    def phrases(self, kept_pids: tuple[int, ...] = ()) -> list[str]:
        """One phrase about a copy that returned or still runs, or none; then all notes are cleared.

        Args:
            kept_pids: Processes that the backend keeps open (`specverify.backends.base.Keeping`).
        """
        if not self._shared[self.FORKS]:
            return []
        until = time.monotonic() + NOTED_S
        # A copy notes itself when it first runs, which may be after the run has returned.
        while len(self._noted_pids()) < self._shared[self.FORKS] and time.monotonic() < until:
            time.sleep(0.001)
        going = [pid for pid in self._noted_pids() if pid not in kept_pids and _same_program(pid)]
        back = self._shared[self.BACK]
        for cell in range(self.CELLS):
            self._shared[cell] = 0
        if back:
            return ["a forked copy of the process came back from the run, which so ended twice"]
        return [f"a forked copy of the process goes on (process {going[0]})"] if going else []


def _same_program(pid: int) -> bool:
    """Whether process `pid` is a plain fork of this one, which has not started another program."""
    try:
        with open(f"/proc/{pid}/cmdline", "rb") as its_file, open("/proc/self/cmdline", "rb") as own_file:
            return its_file.read() == own_file.read()
    except OSError:
        return False
