"""The run of a first contact: part after part, each written before the next begins.

A part whose process ended before it did, by a kill, a crash or a hang that someone cut off, runs again behind all
others: it cannot keep them from running. So does a part whose time was over before all its items ran. After a part
that failed the device is asked for a sum. An error of a kernel can leave a process without its device, and all parts
behind it would fail: the run ends then, and the next one goes on.
"""

import time
from collections.abc import Callable
from contextlib import suppress
from dataclasses import replace
from pathlib import Path
from typing import Any

import torch

from specverify.first_contact.folder import Folder
from specverify.first_contact.memory import begin_peak, memory_figures
from specverify.first_contact.parts import BEGUN, SHORT, Part, Result, parts_of

SHARE = 1 / 3
"""The share of the time that is left which one part may spend on its items: what follows tells of something else."""


def run_parts(device: str, path: Path, minutes: float, tell: Callable[[str], object]) -> int:
    """Run the parts that `path` does not hold yet, and begin no part or item after `minutes`; returns the exit code.

    Raises:
        UnusableInput: The folder holds something else.
        Unwritable: The system refuses to write.
    """
    folder = Folder(path, device)
    until = time.monotonic() + 60 * minutes
    parts = parts_of(device, path)
    folder.write_page(parts)
    unfinished = folder.unfinished()
    for part in sorted(parts, key=lambda part: part.name in unfinished):
        if part.name in folder.results and part.name not in unfinished:
            continue
        if time.monotonic() >= until:
            break
        folder.keep(part, Result(BEGUN, 0.0))
        folder.write_page(parts)
        part_until = time.monotonic() + SHARE * (until - time.monotonic())
        result = part.result(part_until) if part is parts[0] else with_memory(part, device, part_until)
        folder.keep(part, result)
        folder.write_page(parts)
        tell(f"{part.name}: {result.state} ({result.seconds:.1f} s)")
        if part is parts[0] and result.state == "absent":
            break  # without the device no other part can run
        if result.state == "failed" and not answers(device):
            tell("the device answers this process no more; the same command goes on behind this part")
            break
    tell(folder.write_page(parts))
    states = {folder.results[part.name].state if part.name in folder.results else "not run" for part in parts}
    if states & {"differ", "failed"}:
        return 1
    return 3 if states & {"absent", "not run", SHORT, BEGUN} else 0


def with_memory(part: Part, device: str, until: float) -> Result:
    """The result of a part that runs `until` then, with the memory of the device among its figures."""
    with suppress(RuntimeError):  # of a driver that has lost the device: the part then says so itself
        begin_peak(device)
    result = part.result(until)
    try:
        memory: dict[str, Any] = memory_figures(device)
    except RuntimeError as why:
        memory = {"why": " ".join(str(why).split())[:200]}
    return replace(result, figures=result.figures | {"memory": memory})


def answers(device: str) -> bool:
    """Whether the device still computes for this process."""
    try:
        return float(torch.ones(4, device=device).sum()) == 4.0
    except RuntimeError:
        return False
