"""What is known of mutants beforehand: those that change nothing, and those that nothing here can run, with reasons."""

import json
from dataclasses import dataclass
from fnmatch import fnmatchcase
from functools import cache
from importlib.util import find_spec
from pathlib import Path

from tests.measure.mutation.generate import Mutant

FILE = Path(__file__).with_name("known.json")


@dataclass(frozen=True)
class Record:
    """What is known of the mutants of one form, or of all of a module or function.

    A record with a marker speaks of every change of that form, whatever the names and the module are by now, and
    however its lines are broken; module and names within are there for the reader. A record without one speaks of a
    module and names within, as globs.

    Attributes:
        module: Dotted name.
        within: Classes and functions around the change.
        why: The reason.
        marker: `Mutant.marker`, or `*` for every change; `MARKER@PLACE` where others of this form are meant otherwise.
    """

    module: str
    within: str
    why: str
    marker: str = "*"

    def fits(self, mutant: Mutant) -> bool:
        """Whether it speaks of `mutant`."""
        if self.marker == "*":
            return fnmatchcase(mutant.module, self.module) and fnmatchcase(mutant.within, self.within)
        marker, _, place = self.marker.partition("@")
        return marker == mutant.marker and place in ("", mutant.place)


@dataclass(frozen=True)
class MutantRecords:
    """Both lists."""

    equivalent: tuple[Record, ...]
    not_run: tuple[Record, ...]

    def within(self, modules: list[str]) -> "MutantRecords":
        """What speaks of these modules, or of one of the same room that has another name since."""
        rooms = {name.split(".")[0] for name in modules}

        def speaks(record: Record) -> bool:
            moved = record.module.split(".")[0] in rooms and not _there(record.module)
            return moved or any(fnmatchcase(name, record.module) for name in modules)

        return MutantRecords(tuple(filter(speaks, self.equivalent)), tuple(filter(speaks, self.not_run)))

    def why_equivalent(self, mutant: Mutant) -> str | None:
        """Why the mutant changes nothing, or None."""
        return next((record.why for record in self.equivalent if record.fits(mutant)), None)

    def why_not_run(self, mutant: Mutant) -> str | None:
        """Why the mutant cannot run here, or None."""
        if mutant.before.count("device=") > mutant.after.count("device="):
            return "leaves out a device, and all that runs here is on the CPU"
        return next((record.why for record in self.not_run if record.fits(mutant)), None)

    def idle(self, mutants: list[Mutant]) -> list[str]:
        """Records that fit none of `mutants`: their line has changed, and somebody must think again."""
        records = [*self.equivalent, *self.not_run]
        unfit = [record for record in records if not any(record.fits(mutant) for mutant in mutants)]
        return [f"{record.module} {record.within}: {record.marker}" for record in unfit]


@cache
def _there(module: str) -> bool:
    """Whether there is a module of that name."""
    try:
        return find_spec(module) is not None
    except ModuleNotFoundError:  # its folder is gone
        return False


def read_records(file: Path = FILE) -> MutantRecords:
    """What the file beside this module holds."""
    content = json.loads(file.read_text(encoding="utf-8"))
    return MutantRecords(_records(content["equivalent"]), _records(content["not_run"]))


def _records(content: dict[str, dict[str, dict[str, str]]]) -> tuple[Record, ...]:
    """The records of reasons by module, names within, and marker."""
    return tuple(
        Record(module, within, why, marker)
        for module, functions in content.items()
        for within, reasons in functions.items()
        for marker, why in reasons.items()
    )
