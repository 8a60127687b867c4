"""A measure that is ended from outside ends the command that it runs."""

import os
import signal
import subprocess
import sys
import time
from pathlib import Path

import pytest

from tests.measure.child import run_child

MEASURE = """
import sys
from pathlib import Path
from tests.measure.child import raise_on_signals, run_child
raise_on_signals()
run_child([sys.executable, "-c", sys.argv[1]], Path(sys.argv[2]))
"""

CHILD = """
import pathlib, signal, sys, time
signal.signal(signal.SIGTERM, lambda *_: sys.exit(pathlib.Path("ended").touch()))
pathlib.Path("begun").touch()
time.sleep(300)
"""


def wait_for(file: Path) -> None:
    while not file.exists():
        time.sleep(0.02)


@pytest.mark.skipif(os.name != "posix", reason="signals are those of POSIX")
@pytest.mark.parametrize("name", ["SIGTERM", "SIGHUP", "SIGINT"])
def test_a_measure_that_is_ended_ends_its_command_first(name: str, tmp_path: Path) -> None:
    # As a shell starts a job in the background.
    measure = subprocess.Popen(
        [sys.executable, "-c", MEASURE, CHILD, str(tmp_path)],
        stderr=subprocess.DEVNULL,
        preexec_fn=lambda: signal.signal(signal.SIGINT, signal.SIG_IGN),
    )
    wait_for(tmp_path / "begun")
    measure.send_signal(getattr(signal, name))
    assert measure.wait(timeout=100) != 0
    assert (tmp_path / "ended").exists()


def test_output_and_exit_code_are_those_of_the_command(tmp_path: Path) -> None:
    code = "import os, sys; print(os.getcwd()); print('wrong', file=sys.stderr); sys.exit(4)"
    ended = run_child([sys.executable, "-c", code], tmp_path)
    assert (ended.returncode, ended.stdout.strip(), ended.stderr) == (4, str(tmp_path), "wrong\n")
