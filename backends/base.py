"""The contract of a backend: one method, `run(case) -> Trace`, and a declaration of what it can do."""

from dataclasses import dataclass
from typing import Protocol, runtime_checkable

from reference.case import Case
from reference.trace import Stage, Trace


@dataclass(frozen=True)
class Declaration:
    """What a backend says of itself; differences are declared here and never branched on by name.

    Attributes:
        name: As users type it.
        device: Where it computes: cpu, cuda, npu.
        reveals: Stages its traces hold.
        dtypes: Working dtypes it offers, its default first.
        drafts: Kinds of draft it runs: scripted, ngram, model.
        commits: KvLayout.commit values it implements.
        takes_tape: Whether every uniform it uses comes from the case's tape.
        max_temperature: 0.0 for a backend that is greedy only.
        emulated: Whether it stands in for a device that is not there; such a run never counts as hardware.
    """

    name: str
    device: str
    reveals: frozenset[Stage]
    dtypes: tuple[str, ...]
    drafts: tuple[str, ...]
    commits: tuple[str, ...]
    takes_tape: bool = False
    max_temperature: float = 0.0
    emulated: bool = False


@runtime_checkable
class Backend(Protocol):
    """An engine under test. It may keep weights between runs, and nothing else that a later run could notice."""

    declaration: Declaration

    def run(self, case: Case) -> Trace:
        """Run `case` and reveal what happened.

        Raises:
            Unsupported: when the declaration, or the model, does not admit the case.
            StageFailure: when the engine's own checks stopped the run, with the stage they guard.
        """
        ...


class Unsupported(Exception):
    """The backend cannot take this case; the message says what is missing and what to use instead."""


class Unavailable(Exception):
    """The backend cannot be opened on this machine; the message names the missing device or package."""


class StageFailure(Exception):
    """An engine's own check stopped the run at `stage`."""

    def __init__(self, stage: Stage, why: str) -> None:
        super().__init__(why)
        self.stage = stage
        self.why = why
