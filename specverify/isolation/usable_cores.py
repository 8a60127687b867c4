"""The cores that this process may use."""

import math
import os
from contextlib import suppress
from pathlib import Path

from specverify.isolation.control_groups import own_groups


def usable_cores() -> int:
    """The number of cores that this process may use: its affinity, and at most its groups' share of processor time."""
    cores = len(os.sched_getaffinity(0)) if hasattr(os, "sched_getaffinity") else os.cpu_count() or 1
    for group in own_groups("cpu"):
        cores = min(cores, _cores_of_group(group) or cores)
    return max(1, cores)


def _cores_of_group(group: Path) -> int | None:
    """The cores whose time a control group may use, rounded up; None where it has no limit."""
    # Version 2 has one file and says `max` where there is no limit, version 1 has two and says -1.
    for names in (("cpu.max",), ("cpu.cfs_quota_us", "cpu.cfs_period_us")):
        with suppress(OSError, ValueError):
            quota, period = (int(word) for name in names for word in (group / name).read_text().split())
            return math.ceil(quota / period) if quota > 0 else None
    return None
