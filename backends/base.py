"""The contract that every backend fulfils.

A backend has one method, `run(case) -> Trace`, and a `Declaration` of its abilities. Five further protocols are
optional: `ExactLaw` for sampling on tables, `Serving` for sessions that are played action by action, `Keeping` for
processes that stay open between runs, `Preparing` for engines that are dear to open, and `SharesPrefills` for variants
whose prompts are prefilled once.
"""

from dataclasses import dataclass
from typing import Protocol, runtime_checkable

from specverify.reference.abilities import Abilities
from specverify.reference.case import Case
from specverify.reference.gone import EngineGone
from specverify.reference.probability_world import Blocks, GivenTree, World
from specverify.reference.session import Action
from specverify.reference.trace import Array, Stage, Trace


@dataclass(frozen=True, kw_only=True)
class Declaration(Abilities):
    """The abilities of a backend, and facts on itself; callers read these fields and never branch on a backend's name.

    A backend is refused when it is opened if its declaration names an unknown value or a field has another type. Cases
    are drawn within the abilities, so that a narrow declaration still gets a full run of what it has.

    Attributes:
        name: The name as users type it.
        device: The device on which the backend computes: cpu, cuda, npu, or another name for a device that this process
            does not see.
        reveals: Stages that its traces hold. If a trace holds a further stage, that stage is used where it helps to
            explain a difference, and the invariants that need the stage are still not asked.
        emulated: Whether the backend stands in for an absent device; such a run never counts as hardware.
        variant_interval: Invariants that run variants of a case take their turn this many times less often, and the
            control run is shorter by the same factor. Above 1 for a backend with slow forwards; of one that shows every
            stage, turns are as if it were 2. A replay asks all invariants whatever the interval.
        tables_dtype: float64 or float32: the dtype in which its sampling computes on given tables (`ExactLaw.verify`).
        excluded: What the declaration leaves out although the engine has it, a sentence each, `region: why`. Every
            verdict names the regions, since nothing in them was judged.
        environment: Variables with their values that the process must have before its first import.
    """

    name: str
    device: str
    reveals: frozenset[Stage]
    emulated: bool = False
    variant_interval: int = 1
    tables_dtype: str = "float64"
    excluded: tuple[str, ...] = ()
    environment: tuple[tuple[str, str], ...] = ()

    def outside(self, case: Case) -> str | None:
        """The reason why the declaration does not admit the case, in one line with the backend's name, or None."""
        beyond = super().outside(case)
        return None if beyond is None else f"{self.name} declares no {beyond}"


@runtime_checkable
class Backend(Protocol):
    """An engine under test; it may keep weights between runs, and no other state that a later run could notice."""

    declaration: Declaration

    def run(self, case: Case) -> Trace:
        """Run `case` and return the trace of the run.

        Types and shapes are those of `specverify.reference.trace`; `specverify.backends.admission` checks them before
        any invariant reads the trace. Where `specverify.reference.trace` names an array or a tuple, a backend may
        return a list, a NumPy array of any width or a torch tensor on any device, of the same shape. Anything else is a
        finding of lossless.completes
        that names the step, the field, the value found and the value expected. Arrays have no batch axis: logits are
        [nodes, vocabulary], attention outputs [layers, heads, nodes, head_dim], keys and values [layers, kv_heads,
        length, head_dim]. All nodes are in the row order of the tree.

        Raises:
            Unsupported: when the declaration, or the model, does not admit the case.
            StageFailure: when a check of the engine itself stopped the run; it names the stage that the check guards.
        """
        ...


@runtime_checkable
class ExactLaw(Protocol):
    """A backend that can run its own drafting and acceptance on tables in place of models, for many requests at once.

    The protocol is optional. With it, the law of an acceptance rule is enumerated instead of estimated. A backend
    without a tape may implement `samples` alone, and raises Unsupported from `verify` and `rounds`. If it knows the
    exact law of its own draws, its `verify` and `rounds` may choose from that law by the bonus coin.
    """

    def verify(self, given: GivenTree, tape: Array) -> Blocks:
        """Run acceptance on the probabilities of `given`, one request per row of `tape` [B, stride(nodes)]."""
        ...

    def rounds(self, world: World, tape: Array) -> Blocks:
        """Draft and accept in `world`, one request per row of `tape` [B, stride(nodes)]."""
        ...

    def samples(self, world: World, seeds: Array) -> Blocks:
        """Draft and accept in `world` on the backend's own random numbers, request b seeded with `seeds[b]`."""
        ...


class Live(Protocol):
    """A running session: its requests, to which a caller applies one action after another."""

    def do(self, action: Action) -> None:
        """Apply `action` to each of its requests that admits the action; do nothing if no request admits it.

        Raises:
            StageFailure: when a check of the engine itself stopped the action; the session is then over.
        """
        ...

    @property
    def trace(self) -> Trace:
        """The trace so far, with `shared` filled in, and with one account per action if the backend counts pages."""
        ...


@runtime_checkable
class Serving(Protocol):
    """A backend whose sessions can be played action by action, so that each action may depend on the earlier ones.

    The protocol is optional. The session machine of `specverify.properties.live.machine` drives every backend that
    declares sessions and implements it.
    """

    def serve(self, case: Case) -> Live:
        """Open the session of `case` and play its actions; the caller may add further actions.

        A later action names only requests that the session lists. The trees of a later switch are no larger than the
        largest tree that the session names when it is opened. A fork may come at any time.

        Raises:
            Unsupported, StageFailure: as `Backend.run`.
        """
        ...


@runtime_checkable
class Keeping(Protocol):
    """A backend that forks processes and keeps them open between runs, for ranks or for the sides of a hand-over.

    The protocol is optional. A forked process that it does not name, and that outlives its run, is a finding.
    """

    @property
    def processes(self) -> tuple[int, ...]:
        """The ids of the processes that are open now."""
        ...


@runtime_checkable
class Preparing(Protocol):
    """A backend whose engine is dear to open, and stays open for later cases.

    The protocol is optional. Opening has a time limit of its own (`--start-timeout`), and what it changes in the
    process is no residue of the case.
    """

    def prepare(self, case: Case) -> None:
        """Open whatever `run(case)` needs; return at once where it is open."""
        ...


@runtime_checkable
class SharesPrefills(Protocol):
    """A backend that can run variants of a case on the columns of one prefill.

    The protocol is optional. Variants that differ in their trees have the same prompt, whose prefill takes most of the
    time of a checkpoint's variant.
    """

    def run_variant(self, case: Case, extends: bool) -> Trace:
        """Run `case`; its prompt may begin with the columns that an earlier such run left, bit for bit.

        The earlier run had the same model, dtype, layout and prompt; with `extends`, its prompt may also be the
        beginning of that of `case`. The trace is that of `Backend.run`, the prefill's calls of the target included; its
        seconds and calls of attention are those of the forwards that ran now.

        Raises:
            Unsupported, StageFailure: as `Backend.run`.
        """
        ...


class BrokenContract(Exception):
    """A user's function returned no answer in any form of its contract, whatever the case."""


class Unsupported(Exception):
    """The backend cannot take this case; the message says what is missing and what to use instead."""


class WrongFlag(ValueError):
    """An environment flag has a value that is not defined."""


class Unavailable(EngineGone):
    """The backend cannot be opened on this machine; the message names the missing device or package.

    Raised from `run`, it says that an engine elsewhere, such as a server, is gone or answers nothing that can be
    judged. The run then ends with what was judged so far.
    """


class ProgramFailure(Exception):
    """The engine's own process broke in a run; `last_lines` holds the last lines that the process wrote."""

    def __init__(self, why: str, last_lines: tuple[str, ...] = ()) -> None:
        super().__init__(why)
        self.why = why
        self.last_lines = last_lines


class StageFailure(Exception):
    """An engine's own check stopped the run at `stage`."""

    def __init__(self, stage: Stage, why: str) -> None:
        super().__init__(why)
        self.stage = stage
        self.why = why
