"""JudgedRequest: one request of a case with the run of it that the backend showed."""

from dataclasses import dataclass
from functools import cached_property

from specverify.properties.verdict.filling import FIRST_ACCOUNT
from specverify.properties.verdict.taken_steps import TakenStep, taken_steps
from specverify.reference.architecture import Architecture, Seeded
from specverify.reference.case import Case
from specverify.reference.session import Account, Action
from specverify.reference.trace import Shared, Step, Trace
from specverify.reference.tree import Tree


@dataclass(frozen=True)
class JudgedRequest:
    """A request of a case, and what the backend showed of it.

    Attributes:
        case: The whole case.
        number: The request's number; 0 without a session.
        trace: The request's own trace: what it does not show was not reached, as far as anybody knows.
        shared: The part of the session's trace that shows all requests; None without a session.
    """

    case: Case
    number: int
    trace: Trace
    shared: Shared | None = None

    @cached_property
    def alone(self) -> Case:
        """The request as the case that it would be alone."""
        return self.case.alone(self.number)

    @property
    def architecture(self) -> Architecture | None:
        """The target's architecture; None for a checkpoint."""
        model = self.case.model
        return model.architecture if isinstance(model, Seeded) else None

    @cached_property
    def walks(self) -> tuple[tuple[Step, Tree, tuple[int, ...]], ...]:
        """Each step that shows its tree and its accepted path, with both."""
        return tuple(
            (step, step.drafted.tree, step.accepted.path)
            for step in self.trace.steps
            if step.drafted is not None and step.accepted is not None
        )

    @cached_property
    def actions(self) -> tuple[tuple[int, Action], ...]:
        """The actions that name the request, each with its number in the session."""
        session = self.case.session
        if session is None:
            return ()
        return tuple(
            (number, action) for number, action in enumerate(session.actions) if self.number in action.requests
        )

    @cached_property
    def taken(self) -> tuple[TakenStep, ...]:
        """The steps that the request took in its session; none where the session's accounts do not tell."""
        return () if self.shared is None else taken_steps(self.case, self.shared).get(self.number, ())

    def accounts_around(self, number: int) -> tuple[Account, Account] | None:
        """The state of the page pool before and after an action of the session; None where it is not shown."""
        accounts = (FIRST_ACCOUNT, *(self.shared.accounts if self.shared is not None else ()))
        return None if number + 1 >= len(accounts) else (accounts[number], accounts[number + 1])

    def steps_after(self, number: int) -> bool:
        """Whether the request takes a step after this action of the session."""
        return any(step.action > number for step in self.taken)
