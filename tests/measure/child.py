"""A command that a measure runs: it ends before the measure does, also where the measure is ended from outside."""

import os
import signal
import subprocess
from collections.abc import Mapping, Sequence
from pathlib import Path
from types import FrameType

GRACE_S = 60.0
"""Seconds that an interrupted command has to write what it knows; then it is killed."""


def raise_on_signals() -> None:
    """Let SIGINT, SIGTERM and SIGHUP raise KeyboardInterrupt.

    SIGINT too: a shell that starts a job in the background lets it ignore SIGINT, and Python then does not set its own.
    """

    def interrupt(number: int, frame: FrameType | None) -> None:
        raise KeyboardInterrupt

    for name in ("SIGINT", "SIGTERM", "SIGHUP"):
        if hasattr(signal, name):
            signal.signal(getattr(signal, name), interrupt)


def run_child(
    command: Sequence[str], folder: Path, environment: Mapping[str, str] | None = None
) -> subprocess.CompletedProcess[str]:
    """Run `command` in `folder`, with the output caught.

    Raises:
        KeyboardInterrupt: An interrupt came; the command was told to end, and has ended.
    """
    with subprocess.Popen(
        command, cwd=folder, env=environment or os.environ, text=True, stdout=subprocess.PIPE, stderr=subprocess.PIPE
    ) as child:
        try:
            output, errors = child.communicate()
        except BaseException:
            child.terminate()
            try:
                child.communicate(timeout=GRACE_S)
            except subprocess.TimeoutExpired:
                child.kill()
            raise
        return subprocess.CompletedProcess(command, child.returncode, output, errors)
