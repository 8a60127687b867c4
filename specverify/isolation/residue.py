"""Residue: global state of a process that a run changed and did not restore.

Changed state could make the next run differ from the same run alone. A backend may keep weights between runs, and
nothing else that a later run could notice (`specverify.backends.base.Backend`). The state below is torch's, NumPy's and
the process's own; each entry is read in microseconds after every run. What a run leaves that changes no answer by
itself is no part of it (`specverify.isolation.leftovers`).
"""

import os
import signal
import sys
import warnings
from collections.abc import Callable
from typing import Any

AUTOCAST = ("cpu", "cuda")
"""The devices whose autocast is read."""

TIMERS = ("ITIMER_REAL", "ITIMER_VIRTUAL", "ITIMER_PROF")
"""The interval timers of a process."""

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


def _clocks() -> list[str]:
    """The interval timers that run: each will interrupt a later case, or end it."""
    return [name for name in TIMERS if signal.getitimer(getattr(signal, name))[0]]


def _raising_warnings() -> int:
    """The number of filters that make an exception of a warning."""
    return sum(rule[0] == "error" for rule in warnings.filters)


def _autocast(torch: Any) -> dict[str, str]:
    """The dtype of each device on which torch casts by itself."""
    devices = [device for device in AUTOCAST if torch.is_autocast_enabled(device)]
    return {device: str(torch.get_autocast_dtype(device)) for device in devices}


def _modes(torch: Any) -> list[str]:
    """The modes that stand before every call of torch; the default device, which has an entry of its own, is one."""
    functions = [torch._C._get_function_stack_at(i) for i in range(torch._C._len_torch_function_stack())]
    dispatchers = [torch._C._get_dispatch_stack_at(i) for i in range(torch._C._len_torch_dispatch_stack())]
    names = [type(mode).__name__ for mode in (*functions, *dispatchers)]
    return [name for name in names if name != "DeviceContext"]


def _attention_kernels(torch: Any) -> list[str]:
    """The kinds of kernel that scaled dot product attention may take."""
    flags = torch.backends.cuda
    return [kind for kind in ("flash", "mem_efficient", "math", "cudnn") if getattr(flags, f"{kind}_sdp_enabled")()]


def _reduced_sums(torch: Any) -> dict[str, bool]:
    """The flags by which products on a device may be less exact than their dtype."""
    products = torch.backends.cuda.matmul
    return {
        "float16 sums": products.allow_fp16_reduced_precision_reduction,
        "bfloat16 sums": products.allow_bf16_reduced_precision_reduction,
        "TF32 in cuDNN": torch.backends.cudnn.allow_tf32,
    }


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
        "torch's autocast": lambda: _autocast(torch),
        "torch's stack of modes": lambda: _modes(torch),
        "torch's attention kernels": lambda: _attention_kernels(torch),
        "torch's reduced sums": lambda: _reduced_sums(torch),
        # Read by arithmetic: the flag is the processor's, and with it every product that is a denormal number is 0.
        "torch's flush of denormal numbers": lambda: SMALLEST * SMALL == 0.0,
    }


def state() -> dict[str, Any]:
    """The value of each piece of global state, by name."""
    # Read again each time: a run may import torch, whose state is then part of the next comparison.
    readers: dict[str, Callable[[], Any]] = {
        "the current folder": _folder,
        "the list of timers that run": _clocks,
        "the number of warnings filters that raise": _raising_warnings,
        "NumPy's error handling": _numpy_errors,
        **_of_torch(),
    }
    return {name: read() for name, read in readers.items()}


def changes(before: dict[str, Any], now: dict[str, Any]) -> list[str]:
    """The differences between two states, one phrase each: `torch's default dtype is torch.float64, was ...`."""
    return [f"{name} is {now[name]}, was {was}" for name, was in before.items() if now[name] != was]
