"""Swarm: what the cases of one round may have; the rest is switched off.

Features crowd each other out: where every case may have all of them, two rare ones seldom meet. A swarm leaves a random
subset of them out of each round, and so draws what is left more often (Groce et al., "Swarm testing", ISSTA 2012). It
draws classes alone: traits of targets, kinds of drafts and layouts, actions, settings, sizes. None is about a fault.
"""

from collections.abc import Iterable
from dataclasses import dataclass, fields, replace
from random import Random
from typing import Any, TypeVar

from specverify.properties.target_traits import TRAITS
from specverify.reference.abilities import ENDS, LAYOUT_SETTINGS, PROCESSING, Abilities
from specverify.reference.case import DTYPES
from specverify.reference.draft import KINDS as DRAFTS
from specverify.reference.draft.layer_head import ALIGNMENTS, FIRST_TOKENS
from specverify.reference.draft_trees import TREE_KINDS
from specverify.reference.layout import COMMITS, KINDS, PAGE_STATES
from specverify.reference.parallel import RANKS
from specverify.reference.rules import DRAWS, RULES
from specverify.reference.session import ACTIONS

Value = TypeVar("Value")

EVERYTHING = Abilities(
    dtypes=DTYPES,
    ranks=RANKS,
    bare_rows=True,
    spread=True,
    draft_ranks=True,
    drafts=tuple(DRAFTS),
    tree_kinds=TREE_KINDS,
    first_tokens=FIRST_TOKENS,
    alignments=ALIGNMENTS,
    page_states=PAGE_STATES,
    commits=COMMITS,
    layouts=tuple(KINDS),
    sessions=True,
    actions=tuple(ACTIONS),
    takes_tape=True,
    max_temperature=float("inf"),
    rules=tuple(RULES),
    processes=True,
    stops=("max_new_tokens", *ENDS),
    quantised=True,
    adapters=True,
    prompt_logprobs=True,
    images=True,
    draft_images=True,
    indexed=True,
)
"""The abilities of an engine that has all of them: from these a swarm is drawn where no engine is given."""

WIDE_HEADS, LARGE_VOCABULARY, LARGE_TREES, MANY_REQUESTS, LONG_OUTPUTS = (
    "wide heads", "large vocabulary", "large trees", "many requests", "long outputs",
)  # fmt: skip

SIZES = {WIDE_HEADS: 4, LARGE_VOCABULARY: 6, LARGE_TREES: 10, MANY_REQUESTS: 8, LONG_OUTPUTS: 32}
"""Sizes that real models and servers have and that small cases lack; each is on in one round of so many."""

SESSIONS, GRAMMARS, IMAGES, ADAPTERS, SHARES, PROMPT_SCORES, LONG_PROMPTS, QUANTISED_TARGETS, TIGHT_POOLS = (
    "sessions", "grammars", "images", "adapters", "shares of ranks", "scores of prompts", "long prompts",
    "quantised targets", "tight pools",
)  # fmt: skip
"""Features that few cases have, and that the cases of a round may have more often; so may settings of layouts."""

FAVOURED = 2
"""Every case of so many, at random, has a feature that its round favours, where the rest of the case can have it."""

ROOM = 512
"""Tokens that an engine must take for large trees and long outputs."""

ABILITIES = tuple(field.name for field in fields(Abilities))
"""The fields of abilities, without what a backend declares of itself."""

TRAITED = 2
"""Every round of so many, at random, has targets of one trait, or of either of two."""

DRAFTS_TRAITED = 4
"""Of so many rounds one, at random, has unrelated draft models of one trait."""

NARROWED = 3
"""In one round of so many, a group of features is narrowed."""

TOGETHER = {"launch": "resolve", "evict": "restore"}
"""Actions that only make sense with another, which is on or off with them."""

ALWAYS = ("add", "step")
"""Actions that no swarm switches off."""


@dataclass(frozen=True)
class Swarm:
    """The features that cases of a round may have.

    Attributes:
        within: The engine's abilities without what is switched off; None for any.
        traits: Names of `specverify.properties.target_traits.TRAITS`, of which a target has at least one; empty for any
            target.
        sizes: The members of SIZES that are on.
        favours: The features, and the settings of layouts, that cases have more often than elsewhere.
        head_dims: The head dimensions of wide heads; empty for any.
        vocabularies: The sizes of large vocabularies; empty for any.
        draft_traits: Names of TRAITS, of which an unrelated draft model has one; empty for any.
    """

    within: Abilities | None = None
    traits: tuple[str, ...] = ()
    sizes: tuple[str, ...] = ()
    favours: tuple[str, ...] = ()
    head_dims: tuple[int, ...] = ()
    vocabularies: tuple[int, ...] = ()
    draft_traits: tuple[str, ...] = ()

    def interval(self, feature: str, usual: int) -> int:
        """One case of so many has the feature; elsewhere it is one of `usual`."""
        return min(FAVOURED, usual) if feature in self.favours else usual

    def has(self, size: str) -> bool:
        """Whether a size is on."""
        return size in self.sizes


ALL_ON = Swarm()
"""The swarm that switches nothing off."""


class Dice:
    """Choices of one round; `random.Random.random` alone gives the same numbers in every version of Python."""

    def __init__(self, number: int) -> None:
        self._random = Random(number)

    def happens(self, interval: int) -> bool:
        """True in one call of `interval`."""
        return self._random.random() * interval < 1

    def member(self, values: tuple[Value, ...]) -> Value:
        """One of `values`, at least one of which there is."""
        return values[int(self._random.random() * len(values))]

    def subset(self, values: Iterable[Value]) -> tuple[Value, ...]:
        """Each of `values` with probability one half; one of them where that leaves none."""
        every = tuple(values)
        chosen_values = tuple(value for value in every if self._random.random() < 0.5)
        return chosen_values or ((self.member(every),) if every else ())


def draw_swarm(number: int, within: Abilities | None, slow: bool = False) -> Swarm:
    """The swarm of the round with the seed `number`, for an engine with the abilities `within` (None: with all).

    The same number gives the same swarm to engines with the same abilities. A `slow` engine gets wide heads alone of
    all sizes, since its kernels have tiles of them; an engine that takes wide heads alone gets no further shapes.
    """
    dice = Dice(number)
    abilities = EVERYTHING if within is None else Abilities(**{name: getattr(within, name) for name in ABILITIES})
    traits = tuple(TRAITS) if dice.happens(TRAITED) else ()
    traits = tuple(dict.fromkeys(dice.member(traits) for _ in range(1 + dice.happens(3)))) if traits else ()
    sizes = tuple(
        size for size, interval in SIZES.items() if dice.happens(interval) and takes_size(size, abilities, slow)
    )
    narrowed: dict[str, Any] = {}
    for narrow in (_narrow_drafts, _narrow_layouts, _narrow_sessions, _narrow_sampling, _narrow_ends, _narrow_extras):
        if dice.happens(NARROWED):
            narrowed |= narrow(abilities, dice)
    draft_traits = (dice.member(tuple(TRAITS)),) if dice.happens(DRAFTS_TRAITED) else ()
    return Swarm(replace(abilities, **narrowed) if narrowed else within, traits, sizes, draft_traits=draft_traits)


def takes_size(size: str, abilities: Abilities, slow: bool = False) -> bool:
    """Whether an engine gets cases of a size."""
    # Engines of wide heads alone are opened for each shape of a model, which takes some of them half a minute.
    if abilities.head_multiple > 2 and size in (WIDE_HEADS, LARGE_VOCABULARY):
        return False
    if slow:
        return size == WIDE_HEADS
    if size in (LARGE_TREES, LONG_OUTPUTS):
        return not 0 < abilities.longest < ROOM
    return True


def _narrow_drafts(abilities: Abilities, dice: Dice) -> dict[str, Any]:
    """Some kinds of draft, and one kind of tree."""
    trees = tuple(kind for kind in TREE_KINDS if kind in abilities.tree_kinds)
    return {
        "drafts": dice.subset(kind for kind in DRAFTS if kind in abilities.drafts),
        "tree_kinds": (dice.member(trees),) if dice.happens(2) else trees,
    }


def _narrow_layouts(abilities: Abilities, dice: Dice) -> dict[str, Any]:
    """Some kinds of layout, and some of the settings of layouts."""
    return {
        "layouts": dice.subset(kind for kind in KINDS if kind in abilities.layouts),
        "layout_settings": dice.subset(name for name in LAYOUT_SETTINGS if name in abilities.layout_settings),
    }


def _narrow_sessions(abilities: Abilities, dice: Dice) -> dict[str, Any]:
    """Some kinds of action, beside those that every session has."""
    companions = set(TOGETHER.values())
    kinds = dice.subset(
        kind for kind in ACTIONS if kind in abilities.actions and kind not in ALWAYS and kind not in companions
    )
    action_kinds = {*ALWAYS, *kinds, *(TOGETHER[kind] for kind in kinds if kind in TOGETHER)}
    return {"actions": tuple(kind for kind in ACTIONS if kind in action_kinds and kind in abilities.actions)}


def _narrow_sampling(abilities: Abilities, dice: Dice) -> dict[str, Any]:
    """Greedy requests alone or sampled ones alone, some rules, and some processing of logits."""
    narrowed: dict[str, Any] = {
        "rules": dice.subset(name for name in RULES if name in abilities.rules),
        "draws": dice.subset(name for name in DRAWS if name in abilities.draws),
        "processes": dice.subset(name for name in PROCESSING if name in abilities.processed),
    }
    if abilities.max_temperature and abilities.greedy and dice.happens(2):
        narrowed |= {"greedy": False} if dice.happens(2) else {"max_temperature": 0.0}
    return narrowed


def _narrow_ends(abilities: Abilities, dice: Dice) -> dict[str, Any]:
    """Some of the ends of an output beside its budget."""
    ends = dice.subset(name for name in ENDS if name in abilities.stops)
    return {"stops": tuple(name for name in abilities.stops if name not in ENDS or name in ends)}


def _narrow_extras(abilities: Abilities, dice: Dice) -> dict[str, Any]:
    """One rank or several, and some of what a request may have beside its draft."""
    on = dice.subset(
        name for name in ("adapters", "images", "prompt_logprobs", "quantised") if getattr(abilities, name)
    )
    several = tuple(ranks for ranks in RANKS if ranks in abilities.ranks and ranks > 1)
    ranks = abilities.ranks
    if several and 1 in ranks and dice.happens(2):
        ranks = several if dice.happens(2) else (1,)
    narrowed: dict[str, Any] = {name: name in on for name in ("adapters", "images", "prompt_logprobs", "quantised")}
    return {**narrowed, "ranks": ranks, "spread": abilities.spread and max(ranks) > 1}
