"""The page of `selftest`: which invariant caught which planted fault.

It also shows the clean runs between the faults, and the totals.
"""

import statistics
from dataclasses import asdict, dataclass, field
from typing import Any

from rich.table import Table

from specverify.reference.rules import DRAWS
from specverify.reports.format import clean, number, plural
from specverify.reports.layout80 import plain_text


@dataclass
class FaultHunt:
    """The outcome of the hunt for one fault.

    Attributes:
        name: The fault's name as users type it.
        id: The fault's entry in the catalogue of public reports, or an empty string.
        equivalent: Kinds of draft under which the fault changes no law, each with the proof.
        backend: The backend in which the fault was planted.
        caught: Whether a case differed.
        by: The invariant that located the fault.
        stage_named: The stage that the invariant named.
        cases: The number of cases drawn until then.
        seconds: The time until then, without shrinking.
        cpu: Seconds of processor time, shrinking included.
        nodes: The nodes of the largest tree of the smallest case.
        actions: The actions of that case's session.
        failed: Every invariant that differed on that case.
        missing: The reason why the fault's backend cannot be opened here, or None.
    """

    name: str
    id: str
    stage_planted: str
    equivalent: dict[str, str] = field(default_factory=dict)
    backend: str = ""
    caught: bool = False
    by: str | None = None
    stage_named: str | None = None
    cases: int = 0
    seconds: float = 0.0
    cpu: float = 0.0
    nodes: int = 0
    actions: int = 0
    case: str | None = None
    failed: tuple[str, ...] = ()
    missing: str | None = None

    @property
    def is_harmless(self) -> bool:
        """Whether the fault changes no law under any kind of draft."""
        return set(self.equivalent) == set(DRAWS)

    @property
    def is_small(self) -> bool:
        """Whether no tree of the smallest case has more than six nodes."""
        return self.nodes <= 6


@dataclass(frozen=True)
class CleanRun:
    """One clean run: the judged cases, and the invariant and the case that differed, although none should."""

    backend: str
    cases: int
    by: str | None
    case: str | None
    missing: str | None = None


@dataclass
class SelfTest:
    """The whole self-test; `invariants` are the invariants that were asked."""

    faults: list[FaultHunt]
    clean_runs: list[CleanRun] = field(default_factory=list)
    invariants: list[str] = field(default_factory=list)
    errors: list[str] = field(default_factory=list)
    seconds: float = 0.0

    @property
    def tried_faults(self) -> list[FaultHunt]:
        """The faults that could be planted here and that change something."""
        return [hunt for hunt in self.faults if hunt.missing is None and not hunt.is_harmless]

    @property
    def escaped_faults(self) -> list[FaultHunt]:
        """The faults that were hunted without a case that showed them."""
        return [hunt for hunt in self.tried_faults if not hunt.caught and hunt.cases]

    @property
    def unhunted_faults(self) -> list[FaultHunt]:
        """The faults for which no time was left: neither caught nor escaped, so the self-test is no pass."""
        return [hunt for hunt in self.tried_faults if not hunt.caught and not hunt.cases]

    @property
    def false_alarms(self) -> list[CleanRun]:
        """The clean runs in which something differed."""
        return [run for run in self.clean_runs if run.by is not None]

    @property
    def idle_invariants(self) -> list[str]:
        """The invariants that differed for no fault."""
        failed_names = {name for hunt in self.faults for name in hunt.failed}
        return [name for name in self.invariants if name not in failed_names]

    @property
    def exit_code(self) -> int:
        """0 if all faults were caught and all clean runs agreed, 1 for an escape or a false alarm, 3 if cut short."""
        # An escape counts only in a complete test: after an error the hunt may have been cut short.
        if self.false_alarms or (self.escaped_faults and not self.errors):
            return 1
        return 3 if self.errors or self.unhunted_faults or not self.tried_faults else 0


def facts(report: SelfTest) -> dict[str, Any]:
    """The report as `--json` writes it."""
    return {
        "faults": [asdict(hunt) for hunt in report.faults],
        "clean": {
            "cases": sum(run.cases for run in report.clean_runs),
            "findings": [asdict(run) for run in report.false_alarms],
        },
        "idle": report.idle_invariants,
        "escaped": [hunt.name for hunt in report.escaped_faults],
        "errors": report.errors,
        "seconds": report.seconds,
    }


def page(report: SelfTest) -> str:
    """The table of faults and the totals, at 80 columns."""
    table = Table(title="selftest", title_justify="left", box=None, padding=(0, 1, 0, 0))
    table.add_column("fault", ratio=5, overflow="fold")
    table.add_column("stage", no_wrap=True)
    table.add_column("caught by", ratio=4, overflow="fold")
    for name in ("cases", "s", "nodes"):
        table.add_column(name, justify="right", no_wrap=True)
    for hunt in report.faults:
        stage = hunt.stage_planted
        # The invariant located the fault at another stage than the planted one.
        if hunt.caught and hunt.stage_named != stage:
            stage = f"{stage} ≠ {hunt.stage_named}"
        sizes = ("", "", "")
        if hunt.missing is None:
            actions = f"/{hunt.actions}" if hunt.actions else ""
            sizes = (str(hunt.cases), number(hunt.seconds), f"{hunt.nodes}{actions}")
        table.add_row(clean(hunt.name), stage, _catcher(hunt), *sizes)
    return plain_text(table) + "\n" + "\n".join(_total_lines(report)) + "\n"


def _catcher(hunt: FaultHunt) -> str:
    """The invariant that caught the fault, or the reason why none did."""
    if hunt.by:
        return hunt.by
    if hunt.is_harmless:
        return "(equivalent)"
    return "NOT RUN" if hunt.missing or not hunt.cases else "ESCAPED"


def _total_lines(report: SelfTest) -> list[str]:
    """The lines of totals below the table."""
    caught_hunts = [hunt for hunt in report.tried_faults if hunt.caught]
    lines = [f"{len(caught_hunts)} of {plural(len(report.tried_faults), 'fault')} caught in {number(report.seconds)} s"]
    if caught_hunts:
        num_right = sum(hunt.stage_named == hunt.stage_planted for hunt in caught_hunts)
        num_small = sum(hunt.is_small for hunt in caught_hunts)
        median = statistics.median(hunt.cases for hunt in caught_hunts)
        lines.append(
            f"stage named as planted in {num_right} of {len(caught_hunts)}; median cases to catch {number(median)}"
        )
        lines.append(f"smallest case of at most 6 nodes in {num_small} of {len(caught_hunts)}")
    num_judged = sum(run.cases for run in report.clean_runs)
    lines.append(f"clean runs between: {plural(num_judged, 'case')}, {plural(len(report.false_alarms), 'finding')}")
    lines += [f"  FALSE ALARM  {run.backend}  {run.by}  case {run.case}" for run in report.false_alarms]
    missing_backends = {hunt.missing: hunt.backend for hunt in report.faults if hunt.missing}
    lines += [f"not run on {backend}: {reason}" for reason, backend in missing_backends.items()]
    if report.unhunted_faults:
        lines.append(f"not hunted for want of time: {plural(len(report.unhunted_faults), 'fault')}; give more --budget")
    if report.escaped_faults:
        lines.append(f"ESCAPED: {', '.join(hunt.name for hunt in report.escaped_faults)}")
    # Without a caught fault every invariant is idle, and the list says nothing.
    if report.idle_invariants and caught_hunts:
        lines += ["idle, caught nothing:", *(f"  {name}" for name in report.idle_invariants)]
    return lines + [clean(error) for error in report.errors]
