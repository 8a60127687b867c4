"""A hunt: cases judged on a backend with one planted fault, until one differs.

A hunt without a fault is a clean run, in which no case may differ.
"""

import signal
import time
from collections.abc import Iterator
from dataclasses import dataclass
from functools import cache
from itertools import islice
from multiprocessing.synchronize import Event

from specverify.backends import faults
from specverify.backends.base import Backend, Unavailable
from specverify.campaign.case_stream import stream
from specverify.campaign.search import Search
from specverify.isolation.lifeline import die_with
from specverify.plan import Plan, drawn_dtypes
from specverify.properties.invariants import ALL
from specverify.properties.shrinking.sessions import session_size
from specverify.properties.verdict.finding import Verdict
from specverify.properties.verdict.invariant import Invariant, taking_turns
from specverify.properties.verdict.subject import Subject
from specverify.reference.case import Case
from specverify.reference.draft import largest_tree_size
from specverify.reference.oracle.decoder import Oracle
from specverify.selftest.clean_runs import TABLES_ALONE, clean_runs_of
from specverify.setup.selection import Unknown
from specverify.setup.subjects import open_planted, subject_of

SMALL = 4
"""Numbers of nodes and of actions at which a hunt stops to shrink its case; `diff` goes on."""


@dataclass(frozen=True)
class HuntPlan:
    """The plan of one hunt.

    Attributes:
        fault: The planted fault, or None for a clean run.
        backend: Name or `pkg.module:factory`.
        seed: Seed of the draws.
        cases: Most cases to judge.
        dtypes: Working dtypes to draw from.
        shrink_s: Seconds for shrinking.
        sieved: Whether a case on which the planted backend has the bits of the clean one is judged on tables alone.
        until: Wall clock (`time.time`) after which no further case begins.
        skip: Number of cases at the beginning of the seed's order, which other hunts of the same fault judge.
    """

    fault: str | None
    backend: str
    seed: int
    cases: int
    dtypes: tuple[str, ...]
    shrink_s: float
    until: float
    sieved: bool = False
    skip: int = 0


@dataclass(frozen=True)
class HuntResult:
    """The result of one hunt.

    Attributes:
        fault: As in the hunt's plan.
        backend: As in the hunt's plan.
        cases: Number of judged cases, with the one that differed.
        seconds: Wall time until the first difference, or until the end, without shrinking.
        cpu: Seconds of processor time, with shrinking.
        caught: Whether a case differed.
        by: The invariant that located the first difference, or None.
        stage: The stage of that finding, or None.
        nodes: Nodes of the largest tree of any request in the smallest case, with the root.
        actions: Actions of the smallest case's session; 0 without a session.
        case: Id of the smallest case, or None.
        failed: Every invariant that differed on the case as drawn or on the smallest case.
        missing: Why the backend cannot be opened on this machine, or None.
        internal: Exceptions inside the judge, one line each.
        skip: As in the hunt's plan; the case that differed has number `skip + cases` in the seed's order.
    """

    fault: str | None
    backend: str
    cases: int = 0
    seconds: float = 0.0
    cpu: float = 0.0
    caught: bool = False
    by: str | None = None
    stage: str | None = None
    nodes: int = 0
    actions: int = 0
    case: str | None = None
    failed: tuple[str, ...] = ()
    missing: str | None = None
    skip: int = 0
    internal: tuple[str, ...] = ()


_stops: list[Event] = []
"""The event that ends all hunts of this process; empty outside a worker."""


def enter(parent: int, stop: Event) -> None:
    """Prepare a worker of the process `parent`: it dies with it, and its hunts end after a case once `stop` is set.

    A worker ignores Ctrl-C, which is its parent's.
    """
    die_with(parent)
    signal.signal(signal.SIGINT, signal.SIG_IGN)
    _stops.append(stop)


@cache
def _oracle() -> Oracle:
    """One oracle for all hunts of a process; hunts of one seed judge the same cases, whatever fault is planted."""
    return Oracle()


def hunt(task: HuntPlan) -> HuntResult:
    """Carry out one hunt; its fault is planted in a backend that is opened for this hunt alone.

    If the backend is unavailable, or the fault cannot be planted in it, the result's `missing` says why.

    Raises:
        UnknownBackend: There is no backend of that name.
    """
    try:
        backend = open_planted(task.backend, task.fault)
    except (Unavailable, Unknown) as why:
        return HuntResult(task.fault, task.backend, missing=str(why))
    judged: list[Verdict] = []
    began, busy = time.perf_counter(), time.process_time()
    met_at = 0.0

    def note_verdict(verdict: Verdict) -> None:
        nonlocal met_at
        judged.append(verdict)
        met_at = time.perf_counter()

    declared = backend.declaration.dtypes
    # A backend that is not ours may lack the dtypes of the plan.
    dtypes = tuple(dtype for dtype in task.dtypes if dtype in declared) or drawn_dtypes(declared)
    plan = Plan(
        backend=task.backend,
        cases=task.cases,
        dtypes=dtypes,
        seed=task.seed,
        fault=task.fault,
        shrink_s=task.shrink_s,
    )

    def is_over() -> bool:
        return time.time() > task.until or any(event.is_set() for event in _stops)

    subject = subject_of(backend)
    tables = asks_tables(task, backend)
    invariants = tuple(invariant for invariant in ALL if tables or invariant.name not in TABLES_ALONE)
    search = Search(plan, invariants, _oracle(), subject, note_verdict, is_over)
    search.run_given(_cases_to_judge(task, dtypes, backend, subject, tables))
    seconds = (met_at or time.perf_counter()) - began
    if search.differs and subject.variant_interval > 1:
        # On a slow backend the smallest case is judged by the invariants that judged the drawn one alone. All
        # invariants would run an interpreted kernel behind a long prompt for half a minute, to name further failures.
        search.invariants = tuple(invariant for invariant in invariants if invariant.name in judged[-1].outcomes)
    # Shrinking has a time limit of its own, so that `until` no longer counts.
    search.stopped = lambda: any(event.is_set() for event in _stops) or _small(search.smallest)
    failure = search.failure(search_nearest=False)
    raised = {
        f"{task.fault or 'a clean run'}: internal error in {error.invariant}, case {verdict.case.id}: {error.why}": None
        for verdict in judged
        for error in verdict.internal
    }
    if failure is None:
        busy = time.process_time() - busy
        return HuntResult(task.fault, task.backend, len(judged), seconds, busy, skip=task.skip, internal=tuple(raised))
    smallest = failure.verdict
    # The verdict that differed is the last: `run_given` stops at the first difference.
    failed = {
        name for verdict in (judged[-1], smallest) for name, outcome in verdict.outcomes.items() if outcome == "failed"
    }
    session = smallest.case.session
    return HuntResult(
        task.fault,
        task.backend,
        len(judged),
        seconds,
        time.process_time() - busy,
        caught=True,
        by=failure.finding.invariant,
        stage=failure.finding.stage.word,
        nodes=nodes_of(smallest.case),
        actions=len(session.actions) if session is not None else 0,
        case=smallest.case.id,
        failed=tuple(sorted(failed)),
        skip=task.skip,
        internal=tuple(raised),
    )


def nodes_of(case: Case) -> int:
    """The number of nodes, with the root, of the largest tree of any request."""
    return max(largest_tree_size(case.draft), session_size(case)[0])


def _small(case: Case | None) -> bool:
    """Whether a hunt needs no smaller case: at most SMALL nodes, and no session or at most SMALL actions."""
    if case is None or nodes_of(case) > SMALL:
        return False
    return case.session is None or len(case.session.actions) <= SMALL


def asks_tables(task: HuntPlan, backend: Backend) -> bool:
    """Whether tables may tell `backend` from the clean one; not if the planted fault leaves sampling unchanged."""
    return task.fault is None or not clean_runs_of(task.backend).samples_like(backend)


def _cases_to_judge(
    task: HuntPlan, dtypes: tuple[str, ...], backend: Backend, subject: Subject, tables: bool
) -> Iterator[tuple[Case, tuple[Invariant, ...]]]:
    """The cases that a search with the hunt's seed draws, each with the invariants to judge."""
    clean = clean_runs_of(task.backend)
    replaced = clean.replaced_in(backend) if task.fault is not None else None
    drawn = stream(task.seed, dtypes, subject.variant_interval)
    for case in islice(drawn, task.skip, task.skip + task.cases):
        turns = taking_turns(case, ALL, subject.pace)
        invariants = tuple(invariant for invariant in turns if tables or invariant.name not in TABLES_ALONE)
        if task.sieved:
            invariants = clean.worth_judging(case, subject, invariants, tables, replaced)
        elif task.fault is not None:
            invariants = clean.worth_judging_with_variants(case, invariants, tables, replaced)
        yield case, invariants


def grounds_of(names: list[str], backend: str | None) -> dict[str, str]:
    """The backend for each fault: `backend` if given, else the one that the fault names."""
    return {name: backend or faults.fault_named(name).on for name in names}
