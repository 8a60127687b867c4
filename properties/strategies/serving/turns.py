"""The next turn of a conversation: its prompt finds the pages of the last turn.

The prefix cache of a hybrid keeps recurrent states at the ends of pages. A state shows that it is of another place only
where a later request continues the text of one that went on behind a full page.
"""

from properties.strategies.acceptance import continuation
from reference.abilities import Abilities
from reference.architecture import Seeded
from reference.case import Case
from reference.layout import KINDS
from reference.session import Action

PREFIX = next(kind for kind, traits in KINDS.items() if traits.keeps_prefixes)
"""The layout whose pages later requests find."""


def takes_next_turn(case: Case, kind: str | None, within: Abilities | None) -> bool:
    """Whether a session of `case`, on a layout that is still free to choose, may have a next turn."""
    hybrid = isinstance(case.model, Seeded) and case.model.architecture.recurrent
    # No page holds the hidden states that a draft reads.
    if kind not in (None, PREFIX) or not hybrid or case.draft.reads is not None:
        return False
    return within is None or (PREFIX in within.layouts and {"add", "cancel", "step"} <= {*within.actions})


def next_turn(case: Case) -> tuple[int, ...]:
    """The prompt of `case` with what the target says after it, and the first token of the prompt once more."""
    assert isinstance(case.model, Seeded)
    return (*case.prompt, *continuation(case.model, case.prompt), case.prompt[0])


def after_the_first(happened: tuple[Action, ...], late: int) -> tuple[Action, ...]:
    """`happened` without request `late`, which enters after the first request has stepped twice and is cancelled."""
    before = tuple(one for one in happened if late not in one.requests)
    first = Action("step", (0,))
    return (*before, first, first, Action("cancel", (0,)), Action("add", (late,)), Action("step", (late,)))
