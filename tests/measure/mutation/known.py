"""What is known of mutants beforehand: those that change nothing, and those that nothing here can run, with reasons."""

import json
from dataclasses import dataclass
from fnmatch import fnmatchcase
from functools import cache
from importlib.util import find_spec
from pathlib import Path

from tests.measure.mutation.forms import form
from tests.measure.mutation.generate import Mutant

FILE = Path(__file__).with_name("known.json")


@dataclass(frozen=True)
class Record:
    """What is known of the mutants of one line, or of all of a module or function.

    A record of one line speaks of every line of the same `form`, whatever the names and the module are by now; module
    and names within are there for the reader. A record without a line speaks of a module and names within, as globs.

    Attributes:
        module: Dotted name.
        within: Classes and functions around the line.
        why: The reason.
        before: The line, white space collapsed, or `*` for every line.
        after: The line as it is changed, or `*` for any change of it.
        signature: The `def` line of the function around it.
        operator: Kind of change, or `*` for any.
        around: Digest of the form of the function and the place in it, where another line has the same form.
    """

    module: str
    within: str
    why: str
    before: str = "*"
    after: str = "*"
    signature: str = ""
    operator: str = "*"
    around: str = ""

    def fits(self, mutant: Mutant) -> bool:
        """Whether it speaks of `mutant`."""
        if self.operator not in ("*", mutant.operator) or self.around not in ("", mutant.around):
            return False
        if self.before == "*":
            return fnmatchcase(mutant.module, self.module) and fnmatchcase(mutant.within, self.within)
        after = mutant.after if self.after != "*" else "*"
        return form(self.signature, self.before, self.after) == form(mutant.signature, mutant.before, after)


@dataclass(frozen=True)
class Known:
    """Both lists."""

    equivalent: tuple[Record, ...]
    not_run: tuple[Record, ...]

    def within(self, modules: list[str]) -> "Known":
        """What speaks of these modules, or of one of the same room that has another name since."""
        rooms = {name.split(".")[0] for name in modules}

        def speaks(one: Record) -> bool:
            moved = one.module.split(".")[0] in rooms and not _there(one.module)
            return moved or any(fnmatchcase(name, one.module) for name in modules)

        return Known(tuple(filter(speaks, self.equivalent)), tuple(filter(speaks, self.not_run)))

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
        records = [*self.equivalent, *self.not_run]
        unfit = [one for one in records if not any(one.fits(mutant) for mutant in mutants)]
        return [f"{one.module} {one.within}: {one.before}" for one in unfit]


@cache
def _there(module: str) -> bool:
    """Whether there is a module of that name."""
    try:
        return find_spec(module) is not None
    except ModuleNotFoundError:  # its folder is gone
        return False


def known(file: Path = FILE) -> Known:
    """What the file beside this module holds."""
    content = json.loads(file.read_text(encoding="utf-8"))
    return Known(
        tuple(Record(**one) for one in content["equivalent"]), tuple(Record(**one) for one in content["not_run"])
    )
