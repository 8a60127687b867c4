"""The table of strategies that draw drafts, by the tag of the kind, and their common argument."""

from collections.abc import Callable
from dataclasses import dataclass
from typing import Any

from hypothesis import strategies as st

from reference.architecture import Seeded


@dataclass(frozen=True)
class Given:
    """The parts of a case that are drawn before its draft.

    Attributes:
        model: The target.
        prompt: The request's prompt.
        ahead: What greedy decoding of the target would write after it.
    """

    model: Seeded
    prompt: tuple[int, ...]
    ahead: tuple[int, ...]


DRAWN: dict[str, Callable[[Given], st.SearchStrategy[Any]]] = {}
"""For each tag, what makes the strategy of drafts of that kind."""


def draws(tag: str) -> Callable[[Any], Any]:
    """Enter the decorated function as the strategy of drafts with this tag."""

    def enter(function: Any) -> Any:
        DRAWN[tag] = function
        return function

    return enter
