"""Processes that a backend keeps open between its runs are no residue; a forked copy that it does not name is."""

import os
import signal
import time

from specverify.isolation.engine import Copies


def test_a_copy_that_the_backend_keeps_is_told_from_one_that_it_left() -> None:
    copies = Copies()
    child = os.fork()
    if child == 0:
        time.sleep(60)
        os._exit(0)
    try:
        assert copies.phrases((child,)) == []
        other_pid = os.fork()
        if other_pid == 0:
            time.sleep(60)
            os._exit(0)
        try:
            assert copies.phrases((child,)) == [f"a forked copy of the process goes on (process {other_pid})"]
        finally:
            os.kill(other_pid, signal.SIGKILL)
            os.waitpid(other_pid, 0)
    finally:
        os.kill(child, signal.SIGKILL)
        os.waitpid(child, 0)
