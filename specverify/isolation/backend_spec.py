"""The backend that an engine's process opens, and how; its first message."""

from dataclasses import dataclass

PREPARE = "prepare"
"""The request to an engine's process to open what a case needs."""

THREADS = "threads"
"""The request to an engine's process to compute with another number of torch threads."""

VARIANT = "variant"
"""The request to an engine's process to run a variant on the columns of an earlier variant's prefill."""


@dataclass(frozen=True)
class BackendSpec:
    """The backend that an engine's process opens.

    Attributes:
        backend: Name or `pkg.module:factory`.
        fault: Catalogue fault to plant, or None.
        mode: `reference`, `performance`, or None to follow the environment's flags.
        threads: Number of torch threads of a backend on the CPU; 0 leaves the number as it is.
        variables: Variables that the process has from its start, which is then a fresh interpreter.
    """

    backend: str
    fault: str | None = None
    mode: str | None = None
    threads: int = 1
    variables: tuple[tuple[str, str], ...] = ()
