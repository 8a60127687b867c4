"""The backend that an engine's process opens, and how; its first message."""

from dataclasses import dataclass


@dataclass(frozen=True)
class BackendSpec:
    """The backend that an engine's process opens.

    Attributes:
        backend: Name or `pkg.module:factory`.
        fault: Catalogue fault to plant, or None.
        mode: `reference`, `performance`, or None to follow the environment's flags.
        threads: Number of torch threads of a backend on the CPU; 0 leaves the number as it is.
    """

    backend: str
    fault: str | None = None
    mode: str | None = None
    threads: int = 1
