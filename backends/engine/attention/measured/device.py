"""The name of the device to which a table of measured times belongs."""

import platform
from contextlib import suppress
from pathlib import Path

import torch


def device_name(device: str) -> str:
    """The name of the GPU, or of the processor, as tables of measured times hold it."""
    if device == "cuda":
        return str(torch.cuda.get_device_name())
    with suppress(OSError):
        for line in Path("/proc/cpuinfo").read_text("utf-8", "replace").splitlines():
            name, _, value = line.partition(":")
            if name.strip() == "model name" and value.strip():
                return value.strip()
    return platform.processor() or platform.machine() or "cpu"
