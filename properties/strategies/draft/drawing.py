"""The table of draft strategies by tag, and the argument that all of them take."""

from collections.abc import Callable, Sequence
from dataclasses import dataclass
from typing import Any

from hypothesis import strategies as st

from specverify.properties.strategies.swarm import ALL_ON, Swarm
from specverify.reference.abilities import Abilities
from specverify.reference.architecture import Seeded
from specverify.reference.draft_trees import TREE_KINDS
from specverify.reference.quantisation import QUANTISED


@dataclass(frozen=True)
class DraftSetting:
    """The parts of a case that are drawn before its draft.

    Attributes:
        ahead: The target's next greedy tokens after the prompt.
        fills: Whether the engine fills the draft's tree; else it takes the draft's model alone.
        tree_kinds: The kinds of tree of a draft with scores, of `specverify.reference.draft_trees.TREE_KINDS`.
        quantises: Whether the engine runs draft models and heads with quantised weights.
        large_trees: Whether trees have more nodes, or longer paths, than most cases need.
        loading: The abilities that decide which models the engine loads; None for any.
        swarm: The features of the round.
    """

    model: Seeded
    prompt: tuple[int, ...]
    ahead: Sequence[int]
    fills: bool = True
    tree_kinds: tuple[str, ...] = TREE_KINDS
    quantises: bool = True
    large_trees: bool = False
    loading: Abilities | None = None
    swarm: Swarm = ALL_ON


def kinds_of_weights(setting: DraftSetting) -> st.SearchStrategy[str]:
    """The weights of a model or of a head: as they are (an empty word), or one time in four in four or eight bits."""
    every = ("",) * 9 + tuple(QUANTISED)
    return st.sampled_from(every if setting.quantises else ("",))


DRAWN: dict[str, Callable[[DraftSetting], st.SearchStrategy[Any]]] = {}
"""For each tag, the function that makes the strategy of drafts of that kind."""


def draws(tag: str) -> Callable[[Any], Any]:
    """Register the decorated function as the strategy of drafts with this tag."""

    def enter(function: Any) -> Any:
        DRAWN[tag] = function
        return function

    return enter
