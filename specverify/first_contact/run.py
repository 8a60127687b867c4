"""The run of a first contact: part after part, each written before the next begins."""

import time
from collections.abc import Callable
from pathlib import Path

from specverify.first_contact.folder import Folder
from specverify.first_contact.parts import parts_of


def run_parts(device: str, path: Path, minutes: float, tell: Callable[[str], object]) -> int:
    """Run the parts that `path` does not hold yet, and begin none after `minutes`; returns the exit code.

    Raises:
        UnusableInput: The folder holds something else.
        Unwritable: The system refuses to write.
    """
    folder = Folder(path, device)
    parts = parts_of(device, path)
    until = time.monotonic() + 60 * minutes
    folder.write_page(parts)
    for part in parts:
        if part.name in folder.results:
            continue
        if time.monotonic() >= until:
            break
        result = part.result()
        folder.keep(part, result)
        folder.write_page(parts)
        tell(f"{part.name}: {result.state} ({result.seconds:.1f} s)")
        if part is parts[0] and result.state == "absent":
            break  # without the device no other part can run
    tell(folder.write_page(parts))
    states = {folder.results[part.name].state if part.name in folder.results else "not run" for part in parts}
    if states & {"differ", "failed"}:
        return 1
    return 3 if states & {"absent", "not run"} else 0
