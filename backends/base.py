"""The contract of a backend: one method, `run(case) -> Trace`, and a declaration of what it can do."""

from dataclasses import dataclass
from typing import Protocol, runtime_checkable

from reference.case import Case
from reference.probability_world import Blocks, Given, World
from reference.session import Action
from reference.trace import Array, Stage, Trace


@dataclass(frozen=True)
class Declaration:
    """The declaration of a backend: differences are declared here and never branched on by name.

    A word that we do not know, or a field of another type, is refused when the backend is opened.

    Attributes:
        name: As users type it.
        device: Where it computes: cpu, cuda, npu.
        reveals: Stages its traces hold. A stage that a trace holds beyond these is looked at where it helps, and none
            of the invariants that need it is asked.
        dtypes: Working dtypes it offers, its default first.
        drafts: Kinds of draft it runs: scripted, ngram, model.
        commits: KvLayout.commit values it implements.
        layouts: KvLayout.kind values it implements.
        sessions: Whether it runs several requests at once and plays a case's session.
        takes_tape: Whether every uniform it uses comes from the case's tape, at the places that `reference.tape` gives.
        max_temperature: 0.0 for a backend that is greedy only.
        rules: Acceptance rules it has for temperatures above 0.
        processes: Whether it applies penalties, bad words, min_tokens, top-k, top-p, min-p and custom processors.
        stops: Fields of `Stops` that it heeds.
        emulated: Whether it stands in for a device that is not there; such a run never counts as hardware.
        variant_interval: How many times as seldom invariants that run variants of a case take their turn: above 1 for a
            backend whose forwards take long; its control run is as much shorter. A replay asks all of them.
    """

    name: str
    device: str
    reveals: frozenset[Stage]
    dtypes: tuple[str, ...]
    drafts: tuple[str, ...]
    commits: tuple[str, ...]
    layouts: tuple[str, ...] = ("branch",)
    sessions: bool = False
    takes_tape: bool = False
    max_temperature: float = 0.0
    rules: tuple[str, ...] = ()
    processes: bool = False
    stops: tuple[str, ...] = ("max_new_tokens", "eos", "stop_tokens")
    emulated: bool = False
    variant_interval: int = 1


@runtime_checkable
class Backend(Protocol):
    """An engine under test. It may keep weights between runs, and nothing else that a later run could notice."""

    declaration: Declaration

    def run(self, case: Case) -> Trace:
        """Run `case` and reveal what happened.

        Types and shapes are those of `reference.trace`; `backends.admission` looks at them before any invariant does.
        Lists, NumPy arrays of any width and torch tensors of any device go in the place of arrays and tuples of that
        shape; anything else is a finding of lossless.completes that names step and field, and says what was found and
        what is expected. Arrays have no batch axis: logits are [nodes, vocabulary], attention outputs [layers, heads,
        nodes, head_dim], keys and values [layers, kv_heads, length, head_dim], all in the row order of the tree.

        Raises:
            Unsupported: when the declaration, or the model, does not admit the case.
            StageFailure: when the engine's own checks stopped the run, with the stage they guard.
        """
        ...


@runtime_checkable
class ExactLaw(Protocol):
    """A backend whose own drafting and acceptance can be run on tables in place of models, many requests at once.

    It is optional: it lets the law of a rule be enumerated instead of estimated. A backend may have it without a tape
    (only `samples`), and then raises Unsupported from the others.
    """

    def verify(self, given: Given, tape: Array) -> Blocks:
        """Accept from the settled probabilities of `given`, one request per row of `tape` [B, stride(nodes)]."""
        ...

    def rounds(self, world: World, tape: Array) -> Blocks:
        """Draft and accept in `world`, one request per row of `tape` [B, stride(nodes)]."""
        ...

    def samples(self, world: World, seeds: Array) -> Blocks:
        """Draft and accept in `world` on the backend's own random numbers, request b seeded with `seeds[b]`."""
        ...


class Live(Protocol):
    """A session that goes on: its requests, and what was done to them so far."""

    def do(self, action: Action) -> None:
        """Do `action` to those of its requests to which it can happen; nothing, if there are none.

        Raises:
            StageFailure: when the engine's own checks stopped it; the session is over.
        """
        ...

    @property
    def trace(self) -> Trace:
        """The trace so far: with `shared`, and with one account for each action if pages are counted at all."""
        ...


@runtime_checkable
class Serving(Protocol):
    """A backend whose sessions can be played action by action, so that each action depends on what came before.

    It is optional; who declares sessions and has it is driven by the session machine of `properties.live.machine`.
    """

    def serve(self, case: Case) -> Live:
        """Open the session of `case` and play the actions that it names; more may come.

        What comes later names requests that the session lists, and the trees of a switch are no larger than the
        largest that the session names by then. A fork may come at any time.

        Raises:
            Unsupported, StageFailure: as `Backend.run`.
        """
        ...


class Unsupported(Exception):
    """The backend cannot take this case; the message says what is missing and what to use instead."""


class WrongFlag(ValueError):
    """An environment flag has a value that means nothing."""


class Unavailable(Exception):
    """The backend cannot be opened on this machine; the message names the missing device or package."""


class StageFailure(Exception):
    """An engine's own check stopped the run at `stage`."""

    def __init__(self, stage: Stage, why: str) -> None:
        super().__init__(why)
        self.stage = stage
        self.why = why
