"""What is known of mutants beforehand: those that change nothing, and those that nothing here can run, with reasons."""

import json
from dataclasses import dataclass
from fnmatch import fnmatchcase
from pathlib import Path

from tests.measure.mutation.generate import Mutant

FILE = Path(__file__).with_name("known.json")


@dataclass(frozen=True)
class Equivalent:
    """Mutants that compute what the source computes.

    Attributes:
        module: Dotted name.
        within: Classes and functions around the line.
        operator: Kind of change, or `*` for any.
        before: The line, white space collapsed.
        after: The line as it is changed, or `*` for any change of it.
        why: The reason.
    """

    module: str
    within: str
    operator: str
    before: str
    after: str
    why: str

    def fits(self, mutant: Mutant) -> bool:
        """Whether it speaks of `mutant`."""
        return (
            (self.module, self.within, self.before) == (mutant.module, mutant.within, mutant.before)
            and self.operator in ("*", mutant.operator)
            and self.after in ("*", mutant.after)
        )


@dataclass(frozen=True)
class NotRun:
    """Source that no drawn case on a CPU runs: modules and names within, both as globs, one line or all, and why."""

    module: str
    within: str
    why: str
    before: str = "*"
    after: str = "*"

    def fits(self, mutant: Mutant) -> bool:
        """Whether it speaks of `mutant`."""
        where = fnmatchcase(mutant.module, self.module) and fnmatchcase(mutant.within, self.within)
        return where and self.before in ("*", mutant.before) and self.after in ("*", mutant.after)


@dataclass(frozen=True)
class Known:
    """Both lists."""

    equivalent: tuple[Equivalent, ...]
    not_run: tuple[NotRun, ...]

    def within(self, modules: list[str]) -> "Known":
        """What speaks of these modules."""
        return Known(
            tuple(one for one in self.equivalent if one.module in modules),
            tuple(one for one in self.not_run if any(fnmatchcase(name, one.module) for name in modules)),
        )

    def why_equivalent(self, mutant: Mutant) -> str | None:
        """Why the mutant changes nothing, or None."""
        return next((one.why for one in self.equivalent if one.fits(mutant)), None)

    def why_not_run(self, mutant: Mutant) -> str | None:
        """Why the mutant cannot run here, or None."""
        if mutant.before.count("device=") > mutant.after.count("device="):
            return "leaves out a device, and all that runs here is on the CPU"
        return next((one.why for one in self.not_run if one.fits(mutant)), None)

    def idle(self, mutants: list[Mutant]) -> list[str]:
        """Entries that fit none of `mutants`: their line has changed, and somebody must think again."""
        records: list[Equivalent | NotRun] = [*self.equivalent, *self.not_run]
        unfit = [one for one in records if not any(one.fits(mutant) for mutant in mutants)]
        return [f"{one.module} {one.within}: {one.before}" for one in unfit]


def known(file: Path = FILE) -> Known:
    """What the file beside this module holds."""
    content = json.loads(file.read_text(encoding="utf-8"))
    return Known(
        tuple(Equivalent(**one) for one in content["equivalent"]), tuple(NotRun(**one) for one in content["not_run"])
    )
