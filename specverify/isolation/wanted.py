"""Wanted: which backend a process shall open, and how; what crosses to that process before anything else."""

from dataclasses import dataclass


@dataclass(frozen=True)
class Wanted:
    """The backend that a process shall open.

    Attributes:
        backend: Name or `pkg.module:factory`.
        fault: Catalogue fault to plant, or None.
        mode: `reference`, `performance`, or None for what the environment's flags say.
        threads: Torch threads of a backend on the CPU; 0 leaves them alone.
    """

    backend: str
    fault: str | None = None
    mode: str | None = None
    threads: int = 1
