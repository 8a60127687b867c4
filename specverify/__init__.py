"""The shell of SpecVerify: differential tests for tree speculative decoding.

`from specverify import diff, judge, replay, law` is the Python interface (`specverify.interface`), and `tap` records
what a running engine does (`specverify.traces.taps`).

This package holds commands, plan, campaign and pytest plugin. The work is done in the packages `reference`, `backends`,
`properties` and `reports` below it. Their folders lie beside this one in a checkout, where symbolic links stand for
them here, and inside it in a wheel.
"""

from pathlib import Path
from typing import TYPE_CHECKING, Any

from specverify.shadowing import guard

if TYPE_CHECKING:
    from specverify.interface import DiffResult, JudgeResult, LawResult, Progressed, Replay, diff, judge, law, replay
    from specverify.traces.taps import tap

__version__ = "0.1.0"

__all__ = ["DiffResult", "JudgeResult", "LawResult", "Progressed", "Replay", "diff", "judge", "law", "replay", "tap"]

pytest_plugins = ("specverify.pytest_plugin",)
"""The plugin that `pytest -p specverify` loads; importing this package alone imports nothing of pytest."""

# Git on Windows and some unpackers of archives make files of symbolic links: the folders are searched for beside ours.
if not Path(__file__).with_name("backends").is_dir():
    __path__.append(str(Path(__file__).resolve().parent.parent))


def __getattr__(name: str) -> Any:
    """A name of the Python interface, which is imported when it is first asked for."""
    if name not in __all__:
        raise AttributeError(f"module {__name__!r} has no attribute {name!r}")
    if name == "tap":
        # Apart: the processes of an engine import it, and nothing of the interface.
        from specverify.traces import taps

        return taps.tap
    from specverify import interface

    return getattr(interface, name)


# Before any other import of ours: a shadowing package would be imported in place of the right one.
guard()
