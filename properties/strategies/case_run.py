"""A case with the oracle's run of it, and the type of conditions on cases."""

from collections.abc import Callable
from dataclasses import dataclass
from functools import cached_property, lru_cache

from specverify.properties.strategies.acceptance import ORACLE
from specverify.reference.architecture import Seeded
from specverify.reference.case import Case
from specverify.reference.draft import Draft
from specverify.reference.session import Action
from specverify.reference.trace import Step
from specverify.reference.tree import Tree


class CaseRun:
    """A case and the oracle's run of it, which is computed when a predicate first asks."""

    def __init__(self, case: Case) -> None:
        self.case = case

    @cached_property
    def steps(self) -> tuple[Step, ...]:
        """Steps of request 0, alone."""
        return ORACLE(self.case.alone()).steps

    @cached_property
    def walks(self) -> tuple[tuple[Tree, tuple[int, ...]], ...]:
        """Tree and accepted path of each step."""
        return tuple((step.drafted.tree, step.accepted.path) for step in self.steps if step.drafted and step.accepted)

    @cached_property
    def actions(self) -> tuple[Action, ...]:
        """The actions of the session; empty without a session."""
        return self.case.session.actions if self.case.session is not None else ()

    @cached_property
    def requests(self) -> tuple[Case, ...]:
        """Each request as the case that it would be alone."""
        count = len(self.case.session.mates) if self.case.session is not None else 0
        return tuple(self.case.alone(number) for number in range(count + 1))

    @cached_property
    def batches(self) -> tuple[tuple[int, ...], ...]:
        """The requests of each step that names at least two requests which have entered and not left."""
        inside: set[int] = set()
        batches = []
        for action in self.actions:
            if action.kind in ("add", "restore"):
                inside |= set(action.requests)
            elif action.kind == "fork" and action.requests[0] in inside:
                inside.add(action.requests[1])
            elif action.kind in ("cancel", "evict"):
                inside -= set(action.requests)
            elif action.kind in ("step", "launch"):
                # A request that was named and is not there takes no part in the forward.
                together = tuple(request for request in action.requests if request in inside)
                batches += [together] if len(together) > 1 else []
        return tuple(batches)

    def drafts(self, number: int) -> Draft | None:
        """The draft of a request, if it runs a model."""
        draft = self.requests[number].draft
        return None if draft.model is None else draft

    @property
    def chunk(self) -> int:
        """The target's shortest attention chunk; 0 if it has none."""
        arch = self.case.model.architecture if isinstance(self.case.model, Seeded) else None
        return min((chunk for chunk in arch.chunks if chunk), default=0) if arch is not None else 0

    @property
    def windows(self) -> tuple[int, ...]:
        """The target's sliding windows."""
        arch = self.case.model.architecture if isinstance(self.case.model, Seeded) else None
        return tuple(window for window in arch.windows if window) if arch is not None else ()


@lru_cache(maxsize=8)
def case_run(case: Case) -> CaseRun:
    """The `CaseRun` of a case, shared by the predicates."""
    return CaseRun(case)


@dataclass(frozen=True)
class Condition:
    """A named predicate on cases."""

    name: str
    sentence: str
    predicate: Callable[[CaseRun], bool]

    def is_met(self, case: Case) -> bool:
        """Whether `case` meets the condition."""
        return self.predicate(case_run(case))
