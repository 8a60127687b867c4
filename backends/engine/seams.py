"""The engine's seams: the replaceable functions and classes that compose it.

Each seam has a name and a contract, so that a composition or a planted fault can replace one of them by name.
"""

from collections.abc import Callable
from dataclasses import dataclass

from specverify.backends.engine.captured.runner import CapturedDrafts
from specverify.backends.engine.handover.mailbox import HandOver
from specverify.backends.engine.kv.arena import Arena
from specverify.backends.engine.model.causal_lm import Rows
from specverify.backends.engine.overlap import Futures
from specverify.backends.engine.request import Request
from specverify.backends.engine.step_seams import StepSeams


@dataclass(frozen=True, kw_only=True)
class Seams(StepSeams):
    """The whole engine; the default one is `specverify.backends.engine.composition.SEAMS`.

    Attributes:
        gather: From the requests of a batch, each with its tree, to their rows in the verify forward.
        arena: The class that hands out caches and takes them back.
        request: The class of one request and the phases of its step.
        hand_over: The ends of a hand-over.
        futures: The class of the results of launched steps.
        captured_drafts: The parts of draft forwards by capture size; None for drafts that run one by one.
    """

    gather: Callable[[list[Request]], list[Rows]]
    arena: type[Arena]
    request: type[Request]
    hand_over: HandOver
    futures: type[Futures] = Futures
    captured_drafts: CapturedDrafts | None = None
