"""The examination of an adapter: a handful of its cases, judged in this process.

The engine runs here, so that its prints are seen, a debugger works, and a traceback can be kept whole. The
campaign of `diff` runs it in a process of its own.
"""

import traceback
from collections.abc import Callable
from dataclasses import dataclass, field

from specverify.backends.base import Backend, Declaration, Unsupported
from specverify.backends.registry import open_backend
from specverify.plan import drawn_dtypes
from specverify.properties.invariants import ALL
from specverify.properties.strategies import cases
from specverify.properties.strategies.settings import explore
from specverify.properties.tally import Tally
from specverify.properties.verdict.finding import Verdict
from specverify.properties.verdict.judge import judge
from specverify.reference.abilities import ENDS, PROCESSING
from specverify.reference.case import DTYPES, Case
from specverify.reference.family import FAMILIES
from specverify.reference.layout import KINDS
from specverify.reference.oracle.decoder import Oracle
from specverify.reference.trace import Stage
from specverify.setup.subjects import subject_of

TRIVIAL = ("lossless.completes", "lossless.takes-part")
"""Invariants that hold of a run which shows nothing: a case that they alone judged was not compared with anything."""

EASIEST = (
    Stage.EMITTED, Stage.DRAFTED, Stage.ACCEPTED, Stage.SCORED, Stage.LOWERED, Stage.COMMITTED, Stage.ATTENDED
)  # fmt: skip
"""The stages, those that most engines can show first."""


@dataclass(frozen=True)
class ExaminedCase:
    """One case: its verdict, and the whole traceback of its run where it raised."""

    verdict: Verdict
    traceback: str | None = None

    @property
    def outcome(self) -> str:
        """declined, differs, raised, internal (the judge itself raised), not compared, or agrees."""
        if self.verdict.unsupported is not None:
            return "declined"
        if self.traceback is not None:
            return "raised"
        if self.verdict.findings:
            return "differs"
        if self.verdict.internal:
            return "internal"
        judged = {name for name, outcome in self.verdict.outcomes.items() if outcome == "checked"}
        return "agrees" if judged - set(TRIVIAL) else "not compared"


@dataclass
class Examination:
    """The result of an examination.

    Attributes:
        name: The adapter, as it was named.
        declaration: Its declaration.
        cases: The examined cases, in the order in which they ran.
        tally: Their counts.
    """

    name: str
    declaration: Declaration
    cases: list[ExaminedCase] = field(default_factory=list)
    tally: Tally = field(default_factory=lambda: Tally(""))

    def count(self, outcome: str) -> int:
        """The number of cases with this outcome."""
        return sum(examined.outcome == outcome for examined in self.cases)

    @property
    def exit_code(self) -> int:
        """0 agree, 1 differ, 3 where half of the cases or more were not compared, or the judge raised on any."""
        if self.count("differs") or self.count("raised"):
            return 1
        if self.count("internal"):
            return 3
        return 0 if 2 * self.count("agrees") > len(self.cases) else 3

    @property
    def never_shown(self) -> list[Stage]:
        """Stages that the adapter declares, and that no trace holds."""
        return sorted(self.declaration.reveals - self.tally.revealed) if self.tally.traces else []

    def gains(self) -> list[tuple[Stage, list[str]]]:
        """Each stage that is not shown, with the invariants that it adds to those of the stages before it."""
        shown_stages = set(self.declaration.reveals)
        rows = []
        for stage in EASIEST:
            if stage in shown_stages:
                continue
            before = {invariant.name for invariant in ALL if invariant.needs <= shown_stages}
            shown_stages.add(stage)
            after = [invariant.name for invariant in ALL if invariant.needs <= shown_stages]
            rows.append((stage, [name for name in after if name not in before]))
        return rows

    def never_drawn(self) -> list[str]:
        """The abilities that cases never ask of this adapter, because its declaration leaves it out."""
        declared = self.declaration
        lacks = [
            ("dtypes", [dtype for dtype in DTYPES if dtype not in declared.dtypes]),
            ("processing", [processing for processing in PROCESSING if processing not in declared.processed]),
            ("stops", [stop for stop in ENDS if stop not in declared.stops]),
            ("KV layouts", [kind for kind in KINDS if kind not in declared.layouts]),
            (
                "families",
                [family for family in FAMILIES if declared.families is not None and family not in declared.families],
            ),
        ]
        rows = [] if declared.drafts else ["trees of the case's own (drafts): the engine drafts in its own way, or not"]
        rows += [] if declared.max_temperature else ["sampling (max_temperature): every case is greedy"]
        rows += [f"{what}: {', '.join(names)}" for what, names in lacks if names]
        rows += [] if declared.sessions else ["sessions: every case is one request"]
        rows += [] if declared.least_window else ["models with sliding windows (least_window)"]
        rows += [f"lengths above {declared.longest} tokens (longest)"] if declared.longest else []
        return rows


def examine(name: str, count: int, seed: int, began: Callable[[Declaration, int], None]) -> Examination:
    """Open an adapter, and judge up to `count` cases within its declaration.

    Args:
        name: `pkg.module:factory`, or another name of a backend.
        count: Most cases.
        seed: The seed of the draws.
        began: Called with the declaration and the number of cases, before the first case runs.

    Raises:
        UnknownBackend, Unavailable, WrongFlag: The adapter cannot be opened.
    """
    backend = open_backend(name)
    declared = backend.declaration
    drawn: dict[Case, None] = {}

    def collect(case: Case) -> None:
        drawn.setdefault(case)

    explore(seed, count, cases(drawn_dtypes(declared.dtypes), within=declared), collect)
    began(declared, len(drawn))
    examination = Examination(name, declared, tally=Tally(declared.name))
    oracle, subject = Oracle(), subject_of(backend)
    for case in drawn:
        raised = _traceback_of(backend, case)
        verdict = judge(case, ALL, oracle, subject)
        examination.cases.append(ExaminedCase(verdict, raised))
        examination.tally.add(verdict)
    return examination


def _traceback_of(backend: Backend, case: Case) -> str | None:
    """The whole traceback of a run that raises; None for a run that ends, or that declines the case."""
    try:
        backend.run(case)
    except Unsupported:
        return None
    except (Exception, SystemExit) as why:  # an engine may raise anything
        # The first frame is ours.
        engine_frames = why.__traceback__.tb_next if why.__traceback__ is not None else None
        return "".join(traceback.format_exception(why.with_traceback(engine_frames)))
    return None
