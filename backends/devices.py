"""The device types, and the reason why one cannot be used on this machine."""

import multiprocessing
import runpy
from contextlib import suppress
from importlib.util import find_spec
from multiprocessing.connection import Connection
from pathlib import Path
from typing import Any

DEVICES = ("cpu", "cuda", "npu")


def why_no_device(device: str) -> str | None:
    """Why `device` (cpu, cuda, npu) cannot be used on this machine, or None if it can.

    torch is imported only if it was built for such a device, and torch_npu only if it is installed.
    """
    if device == "cuda":
        build = torch_build()
        if build and not build.get("cuda") and not build.get("hip"):
            return f"torch {build['__version__']} is built without CUDA"
        # Imported here, because importing torch takes more than a second.
        import torch

        if torch.cuda.is_available():
            return None
        return "no CUDA device is visible" if build.get("cuda") else f"torch {torch.__version__} is built without CUDA"
    if device == "npu":
        from specverify.backends.ascend.device import why_no_npu

        return why_no_npu()
    return None


def too_few_devices(device: str, count: int) -> str | None:
    """Why there are not `count` devices of the type cuda or npu on this machine, or None if there are.

    A process of its own counts them: a driver that has been asked in this process may not be used in its forks.
    """
    context = multiprocessing.get_context("fork")
    reading_end, writing_end = context.Pipe(duplex=False)
    process = context.Process(target=_count_devices, args=(device, writing_end), daemon=True)
    process.start()
    writing_end.close()
    try:
        visible, why = reading_end.recv()
    except EOFError:
        visible, why = 0, "the process that counts devices died"
    process.join()
    if why is not None:
        return str(why)
    if visible >= count:
        return None
    return f"{visible} of {count} {device} devices are visible"


def _count_devices(device: str, writing_end: Connection) -> None:
    why = why_no_device(device)
    visible = 0
    if why is None:
        import torch

        visible = torch.get_device_module(device).device_count()
    writing_end.send((visible, why))


def torch_build() -> dict[str, Any]:
    """What torch's own `version.py` says of its build: `__version__`, `cuda`, `hip`; empty if it cannot be read."""
    spec = find_spec("torch")
    if spec is not None and spec.origin is not None:
        with suppress(OSError):
            return runpy.run_path(str(Path(spec.origin).with_name("version.py")))
    return {}
