"""The page of `selftest`: each fault with the invariant that caught it, the clean runs between, and the totals."""

import statistics
from dataclasses import asdict, dataclass, field
from typing import Any

from rich.table import Table

from reference.rules import DRAWS
from reports.format import clean, number, plural
from reports.layout80 import printed


@dataclass
class Caught:
    """One fault.

    Attributes:
        name: As users type it.
        id: Its entry in the catalogue of public reports, or nothing.
        stage_planted: Where it strikes.
        equivalent: Kinds of draft under which it changes no law, each with the proof.
        backend: Where it was planted.
        caught: Whether a case differed.
        by: The invariant that located it.
        stage_named: The stage it named.
        cases: Drawn until then.
        seconds: Spent until then; shrinking is not counted.
        cpu: Seconds of processor time, shrinking included.
        nodes: Of the largest tree of the smallest case.
        actions: Of that case's session.
        case: Its id.
        failed: Every invariant that differed there.
        missing: Why its backend cannot be opened here, or None.
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
    def harmless(self) -> bool:
        """Whether it is equivalent under every kind of draft."""
        return set(self.equivalent) == set(DRAWS)

    @property
    def small(self) -> bool:
        """Whether no tree of its smallest case has more than six nodes."""
        return self.nodes <= 6


@dataclass(frozen=True)
class Clean:
    """One clean run: cases judged, and what differed, which nothing should."""

    backend: str
    cases: int
    by: str | None
    case: str | None
    missing: str | None = None


@dataclass
class SelfTest:
    """All of it; `invariants` are those that were asked."""

    faults: list[Caught]
    clean: list[Clean] = field(default_factory=list)
    invariants: list[str] = field(default_factory=list)
    errors: list[str] = field(default_factory=list)
    seconds: float = 0.0

    @property
    def tried(self) -> list[Caught]:
        """Faults that could be planted here and change something."""
        return [one for one in self.faults if one.missing is None and not one.harmless]

    @property
    def escaped(self) -> list[Caught]:
        """Faults that were hunted and that no case showed."""
        return [one for one in self.tried if not one.caught and one.cases]

    @property
    def unhunted(self) -> list[Caught]:
        """Faults for which there was no time: neither caught nor escaped, and no pass."""
        return [one for one in self.tried if not one.caught and not one.cases]

    @property
    def alarms(self) -> list[Clean]:
        """Clean runs in which something differed."""
        return [one for one in self.clean if one.by is not None]

    @property
    def idle(self) -> list[str]:
        """Invariants that differed for no fault."""
        met = {name for one in self.faults for name in one.failed}
        return [name for name in self.invariants if name not in met]

    @property
    def exit_code(self) -> int:
        """0 all caught and all clean; 1 one escaped, or a clean run differed; 3 where the test was cut short."""
        if self.alarms or (self.escaped and not self.errors):
            return 1
        return 3 if self.errors or self.unhunted or not self.tried else 0


def facts(report: SelfTest) -> dict[str, Any]:
    """The report as `--json` holds it."""
    return {
        "faults": [asdict(one) for one in report.faults],
        "clean": {
            "cases": sum(one.cases for one in report.clean),
            "findings": [asdict(one) for one in report.alarms],
        },
        "idle": report.idle,
        "escaped": [one.name for one in report.escaped],
        "errors": report.errors,
        "seconds": report.seconds,
    }


def page(report: SelfTest) -> str:
    """The matrix and what it comes to, at 80 columns."""
    table = Table(title="selftest", title_justify="left", box=None, padding=(0, 1, 0, 0))
    table.add_column("fault", ratio=5, overflow="fold")
    table.add_column("stage", no_wrap=True)
    table.add_column("caught by", ratio=4, overflow="fold")
    for name in ("cases", "s", "nodes"):
        table.add_column(name, justify="right", no_wrap=True)
    for one in report.faults:
        stage = one.stage_planted
        if one.caught and one.stage_named != stage:
            stage = f"{stage} ≠ {one.stage_named}"
        by = one.by or ("(equivalent)" if one.harmless else "NOT RUN" if one.missing or not one.cases else "ESCAPED")
        sizes = (str(one.cases), number(one.seconds), f"{one.nodes}" + (f"/{one.actions}" if one.actions else ""))
        table.add_row(clean(one.name), stage, by, *(sizes if one.missing is None else ("", "", "")))
    return printed(table) + "\n" + "\n".join(_sums(report)) + "\n"


def _sums(report: SelfTest) -> list[str]:
    caught = [one for one in report.tried if one.caught]
    lines = [f"{len(caught)} of {plural(len(report.tried), 'fault')} caught in {number(report.seconds)} s"]
    if caught:
        right = sum(one.stage_named == one.stage_planted for one in caught)
        small = sum(one.small for one in caught)
        median = statistics.median(one.cases for one in caught)
        lines.append(f"stage named as planted in {right} of {len(caught)}; median cases to catch {number(median)}")
        lines.append(f"smallest case of at most 6 nodes in {small} of {len(caught)}")
    judged = sum(one.cases for one in report.clean)
    lines.append(f"clean runs between: {plural(judged, 'case')}, {plural(len(report.alarms), 'finding')}")
    lines += [f"  FALSE ALARM  {one.backend}  {one.by}  case {one.case}" for one in report.alarms]
    missing = {one.missing: one.backend for one in report.faults if one.missing}
    lines += [f"not run on {backend}: {why}" for why, backend in missing.items()]
    if report.unhunted:
        lines.append(f"not hunted for want of time: {plural(len(report.unhunted), 'fault')}; give more --budget")
    if report.escaped:
        lines.append(f"ESCAPED: {', '.join(one.name for one in report.escaped)}")
    if report.idle and caught:
        lines += ["idle, caught nothing:", *(f"  {name}" for name in report.idle)]
    return lines + [clean(one) for one in report.errors]
