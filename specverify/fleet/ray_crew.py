"""The crew of a campaign as tasks of a Ray cluster, one for each slice.

Ray places, runs and ends the tasks. A task judges its slice in a worker process of its own, as a campaign on one
machine does, and streams the worker's messages.
"""

import os
import shutil
import sys
import tempfile
import time
from collections.abc import Iterator
from contextlib import contextmanager
from dataclasses import replace
from pathlib import Path
from typing import Any

from specverify.campaign.crew import Crew
from specverify.campaign.messages import Broken, Died, Done
from specverify.plan import Plan
from specverify.reports.format import cut
from specverify.setup.errors import MissingInput

SHARES: dict[str, dict[str, Any]] = {
    "cpu": {"num_cpus": 1},
    "cuda": {"num_cpus": 1, "num_gpus": 1},
    "npu": {"num_cpus": 1, "resources": {"NPU": 1}},
}
"""The resources of a task by the device of its backend; Ray calls Ascend's devices NPU."""

EXCLUDED = [".specverify", ".git", ".venv", "venv"]
"""Folders beside the profile that no worker needs."""

TICK_S = 0.5
"""Longest time, in seconds, that a task waits for a message of its worker process before it looks again."""


def slice_messages(plan: Plan, seconds: float, judged: tuple[str, ...]) -> Iterator[object]:
    """Judge the slice `plan` without the cases `judged`, and yield what the worker tells, until it has ended.

    Args:
        plan: One worker's part of a plan.
        seconds: Seconds after which no case begins.
        judged: Ids of cases, each as often as it was judged.
    """
    with own_folder():
        crew = Crew(plan, time.monotonic() + seconds, judged)
        try:
            while True:
                for _, message in crew.messages(TICK_S):
                    yield message
                    if isinstance(message, (Done, Broken, Died)):
                        return
        finally:
            crew.end()


@contextmanager
def own_folder() -> Iterator[Path]:
    """Work in a copy of the present folder, on `sys.path` too, inside the `with`.

    Ray deletes the folder that it gave to the tasks of a job when the job's driver is killed; tasks of the next driver
    have the same folder, since its name is the digest of its files.
    """
    job_folder, path = Path.cwd(), list(sys.path)
    with tempfile.TemporaryDirectory(prefix="specverify-task-", ignore_cleanup_errors=True) as temporary:
        task_folder = Path(temporary) / job_folder.name
        shutil.copytree(job_folder, task_folder, symlinks=True, ignore=shutil.ignore_patterns(*EXCLUDED))
        os.chdir(task_folder)
        sys.path[:] = [str(task_folder) if entry in ("", str(job_folder)) else entry for entry in path]
        try:
            yield task_folder
        finally:
            sys.path[:] = path
            os.chdir(job_folder if job_folder.is_dir() else Path(temporary).parent)


def connect(address: str, folder: Path) -> Any:
    """The module `ray`, connected to the cluster at `address`; workers see the files of `folder`.

    Raises:
        MissingInput: Ray is not installed, or no cluster answers.
    """
    try:
        import ray
    except ImportError:
        raise MissingInput("--ray needs `pip install 'specverify-decoding[fleet]'`") from None
    if not ray.is_initialized():
        files = {"working_dir": str(folder.resolve()), "excludes": EXCLUDED}
        try:
            ray.init(address=address, runtime_env=files, log_to_driver=False, logging_level="error")
        except (ConnectionError, RuntimeError, ValueError, OSError) as why:
            raise MissingInput(f"--ray {cut(address, 80)}: {cut(str(why), 200)}") from None
    return ray


def room(ray: Any, device: str) -> int:
    """The number of tasks for backends of `device` that the cluster runs at once."""
    name = {"cuda": "GPU", "npu": "NPU"}.get(device, "CPU")
    return max(1, int(ray.cluster_resources().get(name, 1)))


class RayCrew:
    """The workers of `plan` as Ray tasks; see `specverify.campaign.crew.AnyCrew`.

    Args:
        ray: The module `ray`, connected.
        plan: The plan, whose jobs are the slices.
        deadline: The time of the monotonic clock after which no case begins.
        device: The device of the backend, a key of SHARES.
        judged: For each place the cases that were judged before; None for a place that has come to its end.
    """

    def __init__(
        self, ray: Any, plan: Plan, deadline: float, device: str, judged: list[tuple[str, ...] | None]
    ) -> None:
        self._ray = ray
        self._plan = plan
        self._deadline = deadline
        # Ray starts no task of ours again by itself: the cases that are judged need not be judged twice.
        self._task = ray.remote(max_retries=0, num_returns="streaming", **SHARES[device])(slice_messages)
        self._streams: dict[Any, int] = {}
        for number, done_cases in enumerate(judged):
            if done_cases is not None:
                self.replace(number, done_cases)

    def messages(self, timeout: float) -> Iterator[tuple[int, object]]:
        """Messages that arrive within `timeout` seconds; `Died` where a task, its worker or its node is lost."""
        streams = list(self._streams)
        if not streams:
            time.sleep(timeout)
            return
        ready, _ = self._ray.wait(streams, num_returns=1, timeout=timeout)
        for stream in ready:
            number = self._streams[stream]
            try:
                message: object = self._ray.get(next(stream))
            except StopIteration:
                message = Died("ended without a word")
            except self._ray.exceptions.RayError as why:
                # The last line of a task's own error is its cause; a lost worker's first line says all.
                lines = str(why).strip().splitlines() or [""]
                at_fault = lines[-1] if isinstance(why, self._ray.exceptions.RayTaskError) else lines[0]
                message = Died(cut(f"{type(why).__name__}: {at_fault}", 200))
            if isinstance(message, (Done, Broken, Died)):
                del self._streams[stream]
            yield number, message

    def tell(self, word: str) -> None:
        """End every task: the orders of a fleet's campaign ask for no more than that."""
        for stream in list(self._streams):
            self._ray.cancel(stream, force=True)

    def replace(self, number: int, judged: tuple[str, ...]) -> None:
        """Start a task for the slice at `number`, without the cases `judged`."""
        plan = replace(self._plan.slice(number), jobs=1)
        remaining_s = self._deadline - time.monotonic()
        self._streams[self._task.remote(plan, remaining_s, judged)] = number

    def end(self) -> None:
        """End every task that is left."""
        self.tell("stop")
        self._streams.clear()
