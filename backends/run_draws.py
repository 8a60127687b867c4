"""The random numbers that a run reads, as its trace holds them (`specverify.reference.trace`).

Draws that decide no token are left out: weights of a model that is made, normal numbers, what the standard library
draws for itself, and coins of a case's tape, whose places the trace shows already.
"""

import linecache
import sys
import sysconfig
from collections.abc import Callable, Iterable, Iterator
from itertools import takewhile
from pathlib import Path
from types import FrameType
from typing import TypeVar

from specverify.backends.randomness.hooks import Call
from specverify.backends.randomness.places import Draw as DrawInProcess
from specverify.backends.randomness.places import Site
from specverify.backends.randomness.recorder import Recorder
from specverify.reference import tape
from specverify.reference.case import Case
from specverify.reference.trace import Draw

T = TypeVar("T")

NORMAL = frozenset(
    ("randn", "randn_like", "normal", "normal_", "log_normal_", "standard_normal", "lognormal", "multivariate_normal",
     "gauss", "normalvariate", "lognormvariate")
)  # fmt: skip
"""Functions that draw normal numbers; samplers decide by uniform and exponential ones."""

INITIAL = ("torch/nn/init.py", "transformers/initialization.py")
"""Files that draw the weights of new models, as their paths end."""

STANDARD, PACKAGES = (Path(sysconfig.get_path(name)) for name in ("stdlib", "purelib"))

SOURCE = 120
"""Most characters of a source line in a frame."""


def recording_run(run: Callable[[Case], T], draws: list[Draw]) -> Callable[[Case], T]:
    """`run`, which notes in `draws` the random numbers that it reads in the thread of its caller."""

    def run_recorded(case: Case) -> T:
        recorder = Recorder(may_decide)
        with recorder:
            result = run(case)
        draws.extend(decisions(recorder.draws))
        return result

    return run_recorded


def may_decide(call: Call) -> bool:
    """Whether a draw may decide about a token: it is neither normal nor an initial weight."""
    return call.method not in NORMAL and not any(file.endswith(INITIAL) for file in _files(sys._getframe(1)))


def _files(frame: FrameType | None) -> Iterator[str]:
    """The files of the frames of the run, the innermost first."""
    while frame is not None and frame.f_code.co_filename != __file__:
        yield frame.f_code.co_filename
        frame = frame.f_back


def decisions(draws: Iterable[DrawInProcess]) -> Iterator[Draw]:
    """The draws of a run as its trace holds them."""
    for draw in draws:
        if _is_own(draw.site.file):
            continue
        # Frames of the harness are the same for all draws of a run.
        stack = tuple(takewhile(lambda site: site.file != __file__, draw.stack))[::-1]
        library = draw.call.partition(".")[0]
        # Equal words make unlike numbers in other libraries.
        stream = f"{library}'s {draw.place.stream}"
        call = f"{draw.call} by {draw.source}"
        yield Draw(stream, draw.place.offset, draw.place.size, tuple(map(_frame, stack)), call)


def _is_own(file: str) -> bool:
    """Whether code of the standard library or the tape of a case draws in this file."""
    parents = Path(file).parents
    return file == tape.__file__ or (STANDARD in parents and PACKAGES not in parents)


def _frame(site: Site) -> str:
    """A frame as findings show it: `file:line in function: source line`, the file by the last two parts of its path."""
    source = linecache.getline(site.file, site.line).strip()[:SOURCE]
    return f"{'/'.join(Path(site.file).parts[-2:])}:{site.line} in {site.function}: {source}"
