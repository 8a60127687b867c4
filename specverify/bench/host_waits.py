"""How often operators make the host wait for the device.

Copies, numbers that the host reads, and sizes that it must know are such waits. torch tells each in a warning where its
debug mode for synchronisations is switched on. A wait that a program asks for by `synchronize` is not among them.
"""

import warnings
from types import TracebackType
from typing import Any

import torch

WARNING = "called a synchronizing"
"""The beginning of torch's warning."""


class HostWaits:
    """Counts waits inside a `with`.

    Args:
        device: The type of the torch device.

    Attributes:
        count: The waits of the last `with`; None on a device for which torch does not tell them.
    """

    def __init__(self, device: str) -> None:
        self.count: int | None = None
        self._module: Any = None if device == "cpu" else torch.get_device_module(device)
        self._caught = warnings.catch_warnings(record=True)

    def __enter__(self) -> "HostWaits":
        self._caught = warnings.catch_warnings(record=True)
        self._warnings = self._caught.__enter__()
        warnings.simplefilter("always")
        if hasattr(self._module, "set_sync_debug_mode"):
            self._module.set_sync_debug_mode("warn")
        return self

    def __exit__(
        self, kind: type[BaseException] | None, error: BaseException | None, place: TracebackType | None
    ) -> None:
        if hasattr(self._module, "set_sync_debug_mode"):
            self._module.set_sync_debug_mode("default")
            self.count = sum(str(warning.message).startswith(WARNING) for warning in self._warnings or ())
        self._caught.__exit__(kind, error, place)
