"""Residue: global state of a process that a run changed and did not restore.

Changed state could make the next run differ from the same run alone. A backend may keep weights between runs, and
nothing else that a later run could notice (`backends.base.Backend`). The state below is torch's, NumPy's and the
process's own; each entry is read in microseconds after every run.
"""

import os
import sys
from collections.abc import Callable
from typing import Any

SMALLEST, SMALL = sys.float_info.min, 0.25
"""The smallest normal number of float64, and a factor that makes it denormal."""


def _folder() -> str:
    try:
        return os.getcwd()
    except OSError:
        return "a folder that is gone"


def _numpy_errors() -> dict[str, object]:
    import numpy as np

    return dict(np.geterr())


def _of_torch() -> dict[str, Callable[[], Any]]:
    # Looked up, not imported: a process that has not imported torch has no state of torch.
    torch: Any = sys.modules.get("torch")
    if torch is None:
        return {}
    return {
        "torch's default dtype": torch.get_default_dtype,
        # Five times faster than `torch.get_default_device`, which looks through the stack of function modes.
        "torch's default device": lambda: torch.empty(0).device,
        "torch's gradient mode": torch.is_grad_enabled,
        "torch's inference mode": torch.is_inference_mode_enabled,
        "torch's thread count": torch.get_num_threads,
        "torch's deterministic mode": torch.are_deterministic_algorithms_enabled,
        "torch's float32 matmul precision": torch.get_float32_matmul_precision,
        # Read by arithmetic: the flag is the processor's, and with it every product that is a denormal number is 0.
        "torch's flush of denormal numbers": lambda: SMALLEST * SMALL == 0.0,
    }


def state() -> dict[str, Any]:
    """The value of each piece of global state, by name."""
    # Read again each time: a run may import torch, whose state is then part of the next comparison.
    readers = {"the current folder": _folder, "NumPy's error handling": _numpy_errors, **_of_torch()}
    return {name: read() for name, read in readers.items()}


def changed(before: dict[str, Any], now: dict[str, Any]) -> list[str]:
    """The differences between two states, one phrase each: `torch's default dtype is torch.float64, was ...`."""
    return [f"{name} is {now[name]}, was {was}" for name, was in before.items() if now[name] != was]
