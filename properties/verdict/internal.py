"""An exception inside the judge, as a fact of one case: who raised it, why, and where in the code."""

import linecache
import traceback
from dataclasses import dataclass, field
from pathlib import Path

JUDGE = "judge"
"""The name in the place of an invariant's where the judge itself raised: routing, members of a session, variants."""

ANSWER = "an answer"
"""The expected value of the finding that stands for an internal error in a saved case."""

FRAMES = 4
"""Most frames of a traceback that are kept, the innermost ones."""

LONGEST = 300
"""Most characters of an exception's text."""


@dataclass(frozen=True)
class InternalError:
    """An exception that an invariant, or the judge around it, raised on one case.

    Attributes:
        invariant: The invariant that was asked, or JUDGE.
        why: The exception in one line, with the file and the line of code that raised it.
        said: The last frames of the traceback, `file:line in function: source line`, the innermost last. They do not
            count in comparisons.
        request: The request of a session that was judged; None for the case as a whole.
    """

    invariant: str
    why: str
    said: tuple[str, ...] = field(default=(), compare=False)
    request: int | None = None


def internal_error(invariant: str, error: Exception) -> InternalError:
    """The fact that `invariant` raised `error`."""
    frames = traceback.extract_tb(error.__traceback__)[-FRAMES:]
    text = " ".join(str(error).split())[:LONGEST]
    place = f" ({Path(frames[-1].filename).name}:{frames[-1].lineno})" if frames else ""
    return InternalError(
        invariant,
        f"{type(error).__name__}{f': {text}' if text else ''}{place}",
        tuple(_line(frame) for frame in frames),
    )


def _line(frame: traceback.FrameSummary) -> str:
    source = (frame.line or linecache.getline(frame.filename, frame.lineno or 0)).strip()
    return f"{Path(frame.filename).name}:{frame.lineno} in {frame.name}: {source}"
