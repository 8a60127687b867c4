"""The work of one worker: open backend and oracle, then search and shrink cases.

What the two sides of a comparison must share is checked before any case.
"""

import gc
import time
import traceback
from collections.abc import Callable
from contextlib import ExitStack, suppress
from dataclasses import dataclass, replace
from multiprocessing.connection import Connection
from pathlib import Path

from specverify.backends.base import Declaration, Unavailable, Unsupported, WrongFlag
from specverify.backends.registry import UnknownBackend
from specverify.campaign.against import open_on_device, open_reference
from specverify.campaign.agenda_cases import AgendaCases, cases_of_part
from specverify.campaign.chosen_reference import bytes_of_traces, certificate_of, memory_words
from specverify.campaign.eager_twin import with_eager
from specverify.campaign.ignored import refuse_ignored
from specverify.campaign.messages import STOP, Began, Broken, Done, Estimated, Found, Located, Opened, Trouble
from specverify.campaign.search import AlwaysBroken, Search, without_trace
from specverify.campaign.threads import faster_count
from specverify.checkpoints import cases
from specverify.checkpoints.cases import estimate
from specverify.checkpoints.chosen_steps import left_out
from specverify.checkpoints.opening import open_checkpoint
from specverify.checkpoints.tapped_layers import tapped_run
from specverify.checkpoints.words import with_words
from specverify.isolation import door
from specverify.isolation.door import Door
from specverify.isolation.usable_cores import usable_cores
from specverify.plan import Plan, drawn_dtypes
from specverify.properties.planned_sampling import FOCUSED, expected_draws
from specverify.properties.reference_names import NUMPY
from specverify.properties.streams import ExpectedDraws
from specverify.properties.verdict.coverage.pair_coverage import declared_labels
from specverify.properties.verdict.finding import Verdict
from specverify.properties.verdict.invariant import Oracle
from specverify.properties.verdict.peer import Peer, shared_abilities
from specverify.reference.abilities import Abilities
from specverify.reference.case import Case
from specverify.reference.oracle.decoder import Oracle as NumpyOracle
from specverify.reference.trace import Stage
from specverify.reference.user_processors import Inadmissible
from specverify.references.certificate import ReferenceDisagrees
from specverify.references.memory import EnginePlace
from specverify.setup import processors
from specverify.setup.errors import MissingInput, UnusableInput
from specverify.setup.selection import (
    Unknown,
    check_declared,
    check_drawn,
    check_dtypes,
    check_latent,
    invariants_matching,
    over_ranks,
)

Tell = Callable[[object], None]

YOUNG = 20_000
"""New objects between two garbage collections. At Python's own 700, looking through traces, which are no garbage, took
a twentieth of a worker's time."""


def make_collections_rare() -> None:
    """Let garbage collections begin after YOUNG new objects, and skip what is imported now."""
    gc.freeze()  # modules live as long as the worker
    gc.set_threshold(YOUNG)


class Refused(Exception):
    """The plan cannot be run: one line, and exit code 2 (wrong input) or 3 (something is missing)."""

    def __init__(self, why: str, code: int) -> None:
        super().__init__(why)
        self.code = code


@dataclass
class Orders:
    """The campaign's orders to this worker.

    Attributes:
        connection: The connection on which orders arrive.
        deadline: The time of the monotonic clock after which no case begins.
    """

    connection: Connection
    deadline: float = float("inf")
    _stop: bool = False
    _enough: bool = False

    def stop(self) -> bool:
        """Whether the worker must end at once, even while it shrinks a failure."""
        with suppress(EOFError, OSError):
            while self.connection.poll(0):
                word = self.connection.recv()
                self._stop |= word == STOP
                self._enough = True
        return self._stop

    def no_more(self) -> bool:
        """Whether no further case may begin."""
        return self.stop() or self._enough or time.monotonic() > self.deadline


def enter(plan: Plan, connection: Connection, deadline: float, judged: tuple[str, ...]) -> None:
    """Run a worker process that `worker_entry.begin` started, and report an error as `Broken`."""
    tell = connection.send
    try:
        work(plan, tell, Orders(connection, deadline), judged)
    except Refused as why:
        tell(Broken(str(why), why.code))
    except OSError as why:
        # A broken pipe means that the campaign is gone: nobody is left to tell.
        if not isinstance(why, BrokenPipeError):
            tell(Broken(line_about(plan, why), 3))
    except Exception as why:
        tell(Broken(line_about(plan, why), 3))


MOST_SAID = 400
"""Most characters of an unexpected exception's message in a line about it; some hold the whole state of a run."""


def line_about(plan: Plan, why: Exception) -> str:
    """One line about an unexpected exception, with its file and line number."""
    frame = traceback.extract_tb(why.__traceback__)[-1]
    where = f"{Path(frame.filename).name}:{frame.lineno}"
    said = " ".join(str(why).split())
    if len(said) > MOST_SAID:
        said = f"{said[:MOST_SAID]} ..."
    return f"internal error in worker {plan.seed % 1000}: {type(why).__name__}: {said} ({where})"


TIMED_STEPS = 3
"""Steps of the run by which the number of threads is chosen."""


def _settle_threads(plan: Plan, backend: Door, first: Case) -> dict[str, str]:
    """Give a backend on the CPU the threads of the plan, or as many as are faster on `first`; the fact for pages."""
    declared = backend.declaration
    if declared.device != "cpu":
        return {}
    if plan.threads:
        return {"threads": str(plan.threads)}
    # An engine that shows tokens alone runs no single step, and a whole generation twice is dear.
    if Stage.ACCEPTED not in declared.reveals:
        return {}
    timed = backend.subject(keep=0)
    case = replace(first, steps=TIMED_STEPS)
    count = faster_count(backend.set_threads, lambda: timed.outcome(case))
    return {"threads": f"{count} (chosen from 1 and {usable_cores()} by their speed)"}


def work(plan: Plan, tell: Tell, orders: Orders, judged: tuple[str, ...] = (), own_process: bool = True) -> None:
    """Search the slice `plan` without the cases `judged`; send each verdict at once and `Done` at the end.

    `own_process` says that the process does nothing else, so that its garbage collection may be set.

    Raises:
        Refused: The plan's backend, model, prompts or names cannot be opened, or a processor fails.
    """
    with ExitStack() as stack:
        try:
            backend = stack.enter_context(door.open_backend(plan.backend_spec, plan.patience, plan.memory))
            if plan.layout is not None:
                check_declared(plan.layout, plan.backend, backend.declaration.layouts)
                check_latent(plan.layout, plan.backend, backend.declaration.layout_settings)
            check_dtypes(plan.dtypes, plan.backend, backend.declaration.dtypes)
            plan = replace(plan, dtypes=plan.dtypes or drawn_dtypes(backend.declaration.dtypes))
            if plan.model is None:
                processors.admit(plan.processors)
                backend.admit(plan.processors)
            memory_line = ""
            if plan.model is not None and plan.against is None and plan.layers is None:
                engine = EnginePlace(backend.declaration.device, plan.dtypes[0])
                memory_line = memory_words(plan.model, plan.reference, plan.draft, engine)
            oracle = open_oracle(plan, stack)
            subject = backend.subject()
            if plan.model is not None and plan.against is None and plan.layers is None:
                # A trace of a checkpoint is large: one that is forgotten between two invariants is made again.
                engine = EnginePlace(backend.declaration.device, plan.dtypes[0])
                most_bytes = bytes_of_traces(plan.model, plan.reference, plan.draft, engine)
                subject.remember_up_to(most_bytes)
                if isinstance(oracle, NumpyOracle):
                    oracle.remember_up_to(most_bytes)
            excluded = backend.declaration.excluded + left_out(plan)
            if plan.layers is None:
                invariants = invariants_matching(plan.invariants, isinstance(oracle, Peer))
            else:
                tapped = tapped_run(plan, backend.declaration, backend.declaration.reveals)
                plan, oracle, invariants = tapped.plan, tapped.oracle, tapped.invariants
                excluded += (tapped.left_out,)
            plan = replace(plan, dtypes=dtypes_of(plan, backend.declaration, oracle))
            subject.abilities = within = drawn_within(plan, backend.declaration, oracle)
            if plan.agenda is None:  # a gate asks the same of several backends, each as far as it declares
                refuse_ignored(plan, within, plan.backend)
            prepared = cases.prepare(plan, subject, invariants) if plan.model is not None else None
            if plan.model is None:
                check_drawn(plan.backend, within)
            environment = backend.manifest
            if prepared is not None:
                backend.admit(plan.processors, (prepared.vocab_size,))
                environment = environment | _settle_threads(plan, backend, prepared.first)
        except (Unknown, UnknownBackend, UnusableInput, WrongFlag) as why:
            raise Refused(str(why), 2) from why
        except Unsupported as why:
            raise Refused(f"--against {plan.against}: {why}", 3) from why
        except (Unavailable, MissingInput) as why:
            raise Refused(str(why), 3) from why
        if own_process:
            make_collections_rare()
        declared = backend.declaration
        names = tuple(invariant.name for invariant in invariants)
        tell(
            Opened(
                declared.name,
                declared.device,
                declared.emulated,
                environment,
                names,
                _num_cases(plan, prepared),
                declared.reveals,
                isinstance(oracle, Peer),
                sampling_of(plan, within, oracle, subject.tables is not None, names),
                excluded,
                None if plan.model is not None else declared_labels(within, Stage.ACCEPTED in declared.reveals),
                _varied(plan, prepared),
            )
        )

        if memory_line:
            tell(Estimated(memory_line))

        told_kinds: set[str] = set()
        certify = certificate_of(plan.reference, oracle, plan.seed)

        def emit(verdict: Verdict) -> None:
            verdict = certify(verdict)
            tell(without_trace(verdict, plan.recorded))
            while backend.complaints:
                tell(Trouble(backend.complaints.pop(0)))
            for kind in [kind for kind in backend.residue if kind not in told_kinds]:
                told_kinds.add(kind)
                tell(backend.residue[kind])

        search = Search(plan, invariants, oracle, subject, emit, orders.no_more)
        # A failure in another worker ends drawing here, but not shrinking; an interrupt ends both.
        search.halted = orders.stop
        search.on_begin = lambda case: tell(Began(case))
        search.on_failure = lambda failure: tell(Found(failure))
        search.skip_cases(judged)
        try:
            # An engine that shows tokens alone, such as a server, runs no single step that could be timed.
            timed = prepared if Stage.ACCEPTED in declared.reveals and not plan.steps and plan.layers is None else None
            line = "" if timed is None else estimate(timed.first, timed.total, plan.new_tokens, oracle, subject)
            if line:
                tell(Estimated(line))
            given_cases = None if prepared is None else prepared.cases(oracle)
            agenda = None
            if plan.agenda is not None and given_cases is not None:
                given_cases = cases_of_part(given_cases, plan.agenda)
            elif plan.agenda is not None:
                agenda = AgendaCases(plan, invariants, subject, tell)
                given_cases = iter(agenda)
            while True:
                if given_cases is None:
                    search.run()
                else:
                    search.run_given(given_cases)
                failure = search.failure()
                if failure is None:
                    break
                certify(failure.verdict)
                tell(Located(with_words(with_eager(failure, oracle)), search.shrink_s))
                # With one allowed failure the search is over; else go on to the next cause.
                if plan.max_failures == 1 or orders.no_more():
                    break
                search.continue_after(failure)
            tell(Done(search.exhausted or (agenda is not None and agenda.exhausted)))
        except Unavailable as why:  # an engine elsewhere is gone: what was judged so far stands
            raise Refused(str(why), 3) from why
        except AlwaysBroken as why:
            raise Refused(f"--backend {plan.backend}: {why}, on every case", 2) from why
        except Inadmissible as why:
            raise Refused(f"--processor {why.why}", 2) from why
        except ReferenceDisagrees as why:
            raise Refused(str(why), 3) from why


def _num_cases(plan: Plan, prepared: cases.PreparedCases | None) -> int:
    """The number of cases that this worker should judge."""
    if prepared is None:
        return plan.drawn_and_saved
    return prepared.total if plan.agenda is None else len(plan.agenda.own_part(range(prepared.total)))


def _varied(plan: Plan, prepared: cases.PreparedCases | None) -> tuple[int, int] | None:
    """The prompts of which variants run, and all prompts; None where every case is asked the same."""
    if prepared is None or not prepared.num_prompts:
        return None
    return sum(map(plan.varies, range(prepared.num_prompts))), prepared.num_prompts


def open_oracle(plan: Plan, stack: ExitStack) -> Oracle:
    """The reference: the NumPy oracle, or the one that `--reference` or `--against` names.

    Raises:
        Unavailable: This machine lacks the device of `--reference`.
        Unsupported: The reference cannot run the plan's checkpoint.
        UnusableInput, MissingInput: The checkpoint cannot be opened.
        Unknown: A backend in the oracle's place does not declare the plan's KV layout.
    """
    if plan.reference != NUMPY:
        return open_on_device(plan.reference, on_checkpoint=plan.model is not None)
    checkpoint = None
    if plan.against is not None and plan.model is not None:
        checkpoint = open_checkpoint(plan.model, understood=False)
    return open_reference(plan.against, stack, checkpoint, plan.dtypes[0], plan.layout)


def drawn_within(plan: Plan, declared: Declaration, oracle: Oracle) -> Abilities:
    """The abilities of the backend under test, cut to those of its reference.

    Raises:
        Unknown: One side lacks what the comparison needs, or no case samples under `--focus`.
    """
    within: Abilities = declared
    if isinstance(oracle, Peer):
        sides = f"{declared.name} and --against {plan.against}"
        if Stage.EMITTED not in declared.reveals:
            raise Unknown(f"{sides}: {declared.name} reveals no emitted tokens, so that there is nothing to compare")
        within = shared_abilities(declared, oracle.abilities)
        if within.families == ():
            raise Unknown(f"{sides} declare no family of models that both load")
    if plan.against is not None or plan.reference != NUMPY:
        # Such a reference reads keys and values as they are.
        stored = tuple(setting for setting in within.layout_settings if setting != "kv_dtype")
        within = replace(within, layout_settings=stored)
    if plan.focus is not None and not within.max_temperature and plan.model is None:
        who = declared.name if declared.max_temperature == 0 else "--against " + (plan.against or "")
        raise Unknown(f"--focus {plan.focus}: {who} declares no temperature above 0, so that no case samples")
    return over_ranks(within, plan.ranks, declared.name) if plan.ranks else within


def dtypes_of(plan: Plan, declared: Declaration, oracle: Oracle) -> tuple[str, ...]:
    """The plan's dtypes in which both sides can be asked.

    Raises:
        Unknown: There is none.
    """
    if not isinstance(oracle, Peer):
        return plan.dtypes
    shared_dtypes = tuple(dtype for dtype in plan.dtypes if dtype in oracle.abilities.dtypes)
    if not shared_dtypes:
        reference_dtypes = ", ".join(oracle.abilities.dtypes)
        plan_dtypes = ", ".join(plan.dtypes)
        raise Unknown(
            f"{declared.name} is asked in {plan_dtypes}, and --against {plan.against} declares {reference_dtypes} alone"
        )
    return shared_dtypes


def sampling_of(
    plan: Plan, within: Abilities, oracle: Oracle, tables: bool, names: tuple[str, ...]
) -> ExpectedDraws | None:
    """The draws that a case of the plan adds to its sampling; None where no invariant of `names` asks for it."""
    if plan.model is not None or not FOCUSED & set(names):
        return None
    interval = within.variant_interval if isinstance(within, Declaration) else 1
    return expected_draws(within, isinstance(oracle, Peer), tables, plan.focus is not None, interval)
