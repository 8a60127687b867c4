"""The control groups around this process, which say how much memory and processor time it may take.

A limit may stand at any group around a process: at its container's, which the container sees as the root, or at one
inside, as schedulers of batch jobs and `systemd-run` make them. https://docs.kernel.org/admin-guide/cgroup-v2.html and
cgroup-v1/cgroups.html say where the files are.
"""

from collections.abc import Iterator
from contextlib import suppress
from pathlib import Path

MOUNTED = Path("/sys/fs/cgroup")
"""Where control groups are mounted: those of version 2, and below it each controller's of version 1."""

OWN = Path("/proc/self/cgroup")
"""The groups of this process, a line `number:controllers:path` for each hierarchy; version 2 names no controller."""


def own_groups(controller: str) -> tuple[Path, ...]:
    """The folders of the groups around this process that may limit what `controller` counts, and each one's parents.

    A container may be told paths of its host, which it does not see: folders need not exist. The mounted roots are
    always among them.
    """
    return tuple(dict.fromkeys((*_named_groups(controller), MOUNTED, MOUNTED / controller)))


def _named_groups(controller: str) -> Iterator[Path]:
    with suppress(OSError, ValueError):
        for line in OWN.read_text().splitlines():
            _, controllers, place = line.split(":", 2)
            if controllers and controller not in controllers.split(","):
                continue
            root = MOUNTED / controller if controllers else MOUNTED
            group = root / place.lstrip("/")
            yield from (folder for folder in (group, *group.parents) if folder == root or root in folder.parents)
