"""The engine's seams: what it is composed of, each part with a contract, so that one can be exchanged by name."""

from collections.abc import Callable
from dataclasses import dataclass

from backends.engine.kv.arena import Arena
from backends.engine.model.causal_lm import Rows
from backends.engine.request import Request
from backends.engine.step_seams import StepSeams


@dataclass(frozen=True, kw_only=True)
class Seams(StepSeams):
    """The whole engine; the default one is `backends.engine.composition.SEAMS`.

    Attributes:
        gather: Requests of a batch, each with its tree, to what they bring to the verify forward.
        arena: Where caches come from and go back to.
        request: One request, phase by phase.
    """

    gather: Callable[[list[Request]], list[Rows]]
    arena: type[Arena]
    request: type[Request]
