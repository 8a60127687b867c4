"""The page of `selftest`: which invariant caught which planted fault.

It also shows the clean runs between the faults, and the totals.
"""

import statistics
from dataclasses import asdict, dataclass, field
from typing import Any

from rich.table import Table

from reference.rules import DRAWS
from reports.format import clean, number, plural
from reports.layout80 import plain_text


@dataclass
class FaultHunt:
    """The outcome of the hunt for one fault.

    Attributes:
        name: The fault's name as users type it.
        id: The fault's entry in the catalogue of public reports, or an empty string.
        stage_planted: The stage at which the fault strikes.
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
        case: The id of that case.
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
        return [one for one in self.faults if one.missing is None and not one.is_harmless]

    @property
    def escaped_faults(self) -> list[FaultHunt]:
        """The faults that were hunted without a case that showed them."""
        return [one for one in self.tried_faults if not one.caught and one.cases]

    @property
    def unhunted_faults(self) -> list[FaultHunt]:
        """The faults for which no time was left: neither caught nor escaped, so the self-test is no pass."""
        return [one for one in self.tried_faults if not one.caught and not one.cases]

    @property
    def false_alarms(self) -> list[CleanRun]:
        """The clean runs in which something differed."""
        return [one for one in self.clean_runs if one.by is not None]

    @property
    def idle_invariants(self) -> list[str]:
        """The invariants that differed for no fault."""
        met = {name for one in self.faults for name in one.failed}
        return [name for name in self.invariants if name not in met]

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
        "faults": [asdict(one) for one in report.faults],
        "clean": {
            "cases": sum(one.cases for one in report.clean_runs),
            "findings": [asdict(one) for one in report.false_alarms],
        },
        "idle": report.idle_invariants,
        "escaped": [one.name for one in report.escaped_faults],
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
    for one in report.faults:
        stage = one.stage_planted
        # The invariant located the fault at another stage than the planted one.
        if one.caught and one.stage_named != stage:
            stage = f"{stage} ≠ {one.stage_named}"
        by = one.by or ("(equivalent)" if one.is_harmless else "NOT RUN" if one.missing or not one.cases else "ESCAPED")
        sizes = (str(one.cases), number(one.seconds), f"{one.nodes}" + (f"/{one.actions}" if one.actions else ""))
        table.add_row(clean(one.name), stage, by, *(sizes if one.missing is None else ("", "", "")))
    return plain_text(table) + "\n" + "\n".join(_total_lines(report)) + "\n"


def _total_lines(report: SelfTest) -> list[str]:
    """The lines of totals below the table."""
    caught = [one for one in report.tried_faults if one.caught]
    lines = [f"{len(caught)} of {plural(len(report.tried_faults), 'fault')} caught in {number(report.seconds)} s"]
    if caught:
        right = sum(one.stage_named == one.stage_planted for one in caught)
        small = sum(one.is_small for one in caught)
        median = statistics.median(one.cases for one in caught)
        lines.append(f"stage named as planted in {right} of {len(caught)}; median cases to catch {number(median)}")
        lines.append(f"smallest case of at most 6 nodes in {small} of {len(caught)}")
    judged = sum(one.cases for one in report.clean_runs)
    lines.append(f"clean runs between: {plural(judged, 'case')}, {plural(len(report.false_alarms), 'finding')}")
    lines += [f"  FALSE ALARM  {one.backend}  {one.by}  case {one.case}" for one in report.false_alarms]
    missing = {one.missing: one.backend for one in report.faults if one.missing}
    lines += [f"not run on {backend}: {why}" for why, backend in missing.items()]
    if report.unhunted_faults:
        lines.append(f"not hunted for want of time: {plural(len(report.unhunted_faults), 'fault')}; give more --budget")
    if report.escaped_faults:
        lines.append(f"ESCAPED: {', '.join(one.name for one in report.escaped_faults)}")
    # Without a caught fault every invariant is idle, and the list says nothing.
    if report.idle_invariants and caught:
        lines += ["idle, caught nothing:", *(f"  {name}" for name in report.idle_invariants)]
    return lines + [clean(one) for one in report.errors]
