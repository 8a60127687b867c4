"""Aims: every second round of draws is made for a pair of labels that no case before it had.

The swarm of such a round keeps what a request with both labels needs and switches off what stands in its place: other
kinds of draft, layout and rule, other actions and settings. What a case has decides alone, not what its run reached:
the seed decides the cases, whatever an engine does. Of a pair with an event nobody knows before the run whether it was
met: it counts as missing while so few requests had its value that the event, at its usual share, is hardly expected
beside it. Such pairs take turns with the others.
"""

from collections.abc import Callable, Iterator, Mapping, Sequence
from dataclasses import fields, replace
from functools import cache
from typing import Any

from specverify.campaign.novelty import Novelty
from specverify.properties.strategies.serving.second_tier import TIERS
from specverify.properties.strategies.swarm import (
    ADAPTERS,
    ALWAYS,
    EVERYTHING,
    GRAMMARS,
    IMAGES,
    LARGE_TREES,
    LARGE_VOCABULARY,
    LONG_PROMPTS,
    MANY_REQUESTS,
    PROMPT_SCORES,
    QUANTISED_TARGETS,
    SESSIONS,
    SHARES,
    TIGHT_POOLS,
    TOGETHER,
    WIDE_HEADS,
    Dice,
    Swarm,
    draw_swarm,
    takes_size,
)
from specverify.properties.target_traits import TRAITS
from specverify.properties.verdict.coverage.declared import is_declared
from specverify.properties.verdict.coverage.events import EVENTS
from specverify.properties.verdict.coverage.impossible import is_impossible
from specverify.properties.verdict.coverage.pairs import EVENT, LABELS, Label, Pair, candidate_pairs
from specverify.reference.abilities import Abilities
from specverify.reference.session import OVERLAPPED

AIMED = 2
"""Every round of so many, at random, is made for a pair."""

LIKELY = 3
"""A value and an event are taken to have met where so many requests are expected to have both.

Were they independent, one such pair in twenty (e to the power of -3) would still be missing.
"""

TRIES = 400
"""Pairs that are looked at in search of one that is missing; behind so many, few are, and the round has a swarm."""

KINDS_OF_AXIS = {"draft": "drafts", "layout": "layouts", "rule": "rules", "draws": "draws"}
"""Axes of which a request has one value, each with the field of abilities that lists the values."""

SETTINGS = ("tree_kinds", "layout_settings", "commits", "page_states", "actions", "processes", "stops")
"""Fields of abilities that list what a request may have several of."""

EXTRAS = ("adapters", "images", "prompt_logprobs", "quantised")
"""Fields of abilities that are on or off."""

SIZE_OF_LABEL = {
    "tree up to 64 nodes": LARGE_TREES,
    "tree over 64 nodes": LARGE_TREES,
    "company over 4 requests": MANY_REQUESTS,
    "event waits for room, then steps": MANY_REQUESTS,
}
"""Labels that small cases lack, each with its size; sizes of heads and vocabularies have a table of their own."""

HEAD_DIMS_OF_LABEL = {
    "head size up to 16 per head": (16,),
    "head size up to 32 per head": (32,),
    "head size up to 64 per head": (64,),
    "head size over 64 per head": (80, 96, 128, 256),
}
VOCABULARIES_OF_LABEL = {
    "vocabulary up to 1,000 token ids": (300,),
    "vocabulary over 1,000 token ids": (2_049,),
}
"""Labels of sizes, each with the values that are drawn then."""

TRAIT_OF_LABEL = {
    "layout's traits recurrent states in slots": "recurrent state",
    "layout's traits tree cut at a chunk": "chunk",
    "layout's traits latent cache": "latent attention",
    "event tree crosses a window": "window",
    "event tree crosses a chunk": "chunk",
}
"""Labels that a request has only on a target of a trait."""

DRAFT_TRAIT_OF_LABEL = {"draft's traits draft with a recurrent state": "recurrent state"}
"""Labels that a request has only with a draft model of a trait."""

FEATURE_OF_LABEL = {
    "target quantised": QUANTISED_TARGETS,
    "target images": IMAGES,
    "draft's traits sees the images": IMAGES,
    "target adapter": ADAPTERS,
    "sampling log-probabilities of the prompt": PROMPT_SCORES,
    "prompt up to 512 prompt tokens": LONG_PROMPTS,
    "prompt over 512 prompt tokens": LONG_PROMPTS,
    "event closes its grammar": GRAMMARS,
    # A pool is shared by the requests of a session.
    "layout's traits recurrent states in slots": SESSIONS,
    "event waits for room, then steps": TIGHT_POOLS,
    # Pages leave a tier where requests come and go.
    "layout's traits first tier": SESSIONS,
    "layout's traits second tier": SESSIONS,
    "event brought back from the second tier": SESSIONS,
}
ACTIONS_OF_LABEL = {
    "event waits for room, then steps": ("cancel", "evict", "restore"),
    "event brought back from the second tier": ("cancel", "evict", "restore"),
}
"""Events that may follow any of several kinds of action, none of which they need."""

FEATURE_OF_AXIS = {"grammar": GRAMMARS, "grammar's beginning": GRAMMARS, "ranks": SHARES, "draft's ranks": SHARES}
"""Labels, or axes with all their labels, that few cases have, each with the feature that is drawn more often then."""

GREEDY, SAMPLED = Label("sampling", "greedy"), Label("sampling", "sampled")
LAUNCHED = Label(EVENT, "launched step")


INTERVALS = {event.name: event.interval for event in EVENTS}
PLACES = {label: place for place, label in enumerate(LABELS)}


def swarm_of_round(number: int, within: Abilities | None, slow: bool, novelty: Novelty) -> Swarm:
    """The swarm of the round with the seed `number`; `novelty` has the values and pairs of the cases before it.

    A `slow` engine gets no aims: its runs are short, and few shapes are opened for it.
    """
    swarm = draw_swarm(number, within, slow)
    dice = Dice(number ^ (1 << 62))
    if slow or not dice.happens(AIMED):
        return swarm
    pair = _missing_pair(dice, within or EVERYTHING, novelty)
    return swarm if pair is None else aim(pair, within, swarm, dice)


def _missing_pair(dice: Dice, abilities: Abilities, novelty: Novelty) -> Pair | None:
    with_event = dice.happens(2)
    pairs = candidate_pairs()
    for _ in range(TRIES):
        pair = dice.member(pairs)
        if (pair.second.axis == EVENT) is with_event and _is_missing(pair, novelty) and _is_possible(pair, abilities):
            return pair
    return None


def _is_missing(pair: Pair, novelty: Novelty) -> bool:
    if pair.second.axis == EVENT:
        return novelty.requests[PLACES[pair.first]] < LIKELY * INTERVALS[pair.second.value]
    return not pair.bit & novelty.met


def _is_possible(pair: Pair, abilities: Abilities) -> bool:
    return is_declared(pair.first, abilities) and is_declared(pair.second, abilities) and not never_meet(*_labels(pair))


def _labels(pair: Pair) -> tuple[Label, Label]:
    return pair.first, pair.second


@cache
def never_meet(first: Label, second: Label) -> bool:
    """Whether no request can have both labels."""
    return is_impossible(Pair(first, second))


def aim(pair: Pair, within: Abilities | None, swarm: Swarm, dice: Dice) -> Swarm:
    """The swarm made for a pair: what the pair says nothing about is as in `swarm`."""
    abilities = _engine(within)
    narrowed: dict[str, Any] = {**_kinds(pair, abilities), **_settings(pair, abilities, dice)}
    narrowed |= {**_extras(pair, abilities), **_sampling(pair, abilities), **_ranks(pair, abilities)}
    base = swarm.within or abilities
    aimed = replace(base, **narrowed)
    if not all(is_declared(label, aimed) for label in _labels(pair)):
        aimed = replace(abilities, **narrowed)  # what the swarm left out is needed
    names = [str(label) for label in _labels(pair)]
    traits = _traits(pair)
    draft_traits = tuple(DRAFT_TRAIT_OF_LABEL[name] for name in names if name in DRAFT_TRAIT_OF_LABEL)
    # Tokens of a draft model are accepted where it is near the target, which then has its traits.
    if not traits and dice.happens(2):
        traits = tuple(trait for trait in draft_traits if _meets_both(Label("target", trait), pair))
    head_dims = _of_labels(HEAD_DIMS_OF_LABEL, names)
    vocabularies = _of_labels(VOCABULARIES_OF_LABEL, names)
    sizes = [SIZE_OF_LABEL[name] for name in names if name in SIZE_OF_LABEL]
    sizes += [WIDE_HEADS] * bool(head_dims) + [LARGE_VOCABULARY] * bool(vocabularies)
    favours = (*_features(pair, abilities), *narrowed.get("layout_settings", ()))
    return Swarm(
        aimed,
        (dice.member(traits),) if traits else _meeting_traits(swarm, pair),
        tuple(dict.fromkeys((*swarm.sizes, *(size for size in sizes if takes_size(size, abilities))))),
        tuple(dict.fromkeys(favours)),
        head_dims,
        vocabularies,
        draft_traits or swarm.draft_traits,
    )


def _traits(pair: Pair) -> tuple[str, ...]:
    """The traits of targets that the labels are or need."""
    own = (label.value for label in _labels(pair) if label.axis == "target" and label.value in TRAITS)
    return (*own, *(TRAIT_OF_LABEL[str(label)] for label in _labels(pair) if str(label) in TRAIT_OF_LABEL))


def _meeting_traits(swarm: Swarm, pair: Pair) -> tuple[str, ...]:
    """The traits of a swarm's targets that can meet both labels: a model with experts, say, runs on no ranks."""
    return tuple(trait for trait in swarm.traits if _meets_both(Label("target", trait), pair))


def _of_labels(table: Mapping[str, tuple[int, ...]], names: Sequence[str]) -> tuple[int, ...]:
    return next((table[name] for name in names if name in table), ())


def _engine(within: Abilities | None) -> Abilities:
    if within is None:
        return EVERYTHING
    return Abilities(**{field.name: getattr(within, field.name) for field in fields(Abilities)})


def _kinds(pair: Pair, abilities: Abilities) -> Mapping[str, Any]:
    """For each axis of KINDS_OF_AXIS the values that can meet both labels, where others cannot."""
    narrowed = {}
    for axis, field in KINDS_OF_AXIS.items():
        values = getattr(abilities, field)
        fitting = tuple(value for value in values if _meets_both(Label(axis, value), pair))
        if fitting and len(fitting) < len(values):
            narrowed[field] = fitting
    return narrowed


def _meets_both(value: Label, pair: Pair) -> bool:
    """Whether a request with the value of an axis can have both labels of a pair, of one value of which it is."""
    return all(label == value if label.axis == value.axis else not never_meet(label, value) for label in _labels(pair))


def _settings(pair: Pair, abilities: Abilities, dice: Dice) -> Mapping[str, Any]:
    """For each field of SETTINGS what the labels need of it, where one needs anything; its other values are off."""
    narrowed: dict[str, Any] = {}
    for field in SETTINGS:
        values = abilities.processed if field == "processes" else getattr(abilities, field)
        needs = {value for label in _labels(pair) for value in _needs(label, field, values, abilities)}
        if needs:
            on = needs | COMPANIONS[field](needs) if field in COMPANIONS else needs
            if field == "actions":
                on |= _further_actions(values, on, dice)
            if field == "actions" and not any(never_meet(label, LAUNCHED) for label in _labels(pair)):
                on |= {*OVERLAPPED}  # a way to serve any other action, and the place of none
            narrowed[field] = tuple(value for value in values if value in on)
    return narrowed


FURTHER_KINDS = 2
"""Most kinds of action that an aimed round keeps beside those that its labels need."""


def _further_actions(values: tuple[str, ...], on: set[str], dice: Dice) -> set[str]:
    """Up to FURTHER_KINDS other kinds of action, at random, with their companions.

    A leftover of one event shows at the next event of another kind.
    """
    others = tuple(kind for kind in values if kind not in {*on, *OVERLAPPED})
    further = {dice.member(others) for _ in range(FURTHER_KINDS) if others and dice.happens(2)}
    return further | _with_actions(further)


def _with_actions(kinds: set[str]) -> set[str]:
    """The actions that every session has, and those without which an action of `kinds` makes no sense."""
    pairs = TOGETHER.items()
    return {*ALWAYS, *(kind for pair in pairs for kind in pair if kinds & {*pair})}


def _with_settings(names: set[str]) -> set[str]:
    """The settings of layouts that are drawn together with those of `names`."""
    return {name for name in TIERS if names & {*TIERS}}


COMPANIONS: Mapping[str, Callable[[set[str]], set[str]]] = {
    "actions": _with_actions,
    "layout_settings": _with_settings,
    "stops": lambda needs: {"max_new_tokens"},
}
"""Values that stay on beside those of a field that are needed."""


def _needs(label: Label, field: str, values: tuple[str, ...], abilities: Abilities) -> Iterator[str]:
    """The values of a field, with one of which alone an engine may have the label, if not every value is one."""
    if field == "actions" and str(label) in ACTIONS_OF_LABEL:
        yield from (kind for kind in ACTIONS_OF_LABEL[str(label)] if kind in values)
        return
    telling = [value for value in values if is_declared(label, _changed(abilities, field, (value,)))]
    if 0 < len(telling) < len(values):
        yield from telling


def _changed(abilities: Abilities, field: str, value: Any) -> Abilities:
    return replace(abilities, **{field: value})


def _extras(pair: Pair, abilities: Abilities) -> Mapping[str, Any]:
    """Those of EXTRAS that a label needs are on, and the others off; as they are where no label needs any."""
    present = [name for name in EXTRAS if getattr(abilities, name)]
    needs = {
        name
        for name in present
        if any(not is_declared(label, _changed(abilities, name, False)) for label in _labels(pair))
    }
    return {name: name in needs for name in present} if needs else {}


def _sampling(pair: Pair, abilities: Abilities) -> Mapping[str, Any]:
    """Requests that sample alone, or greedy ones alone, where the pair is of such a request."""
    if abilities.greedy and any(label == SAMPLED or never_meet(label, GREEDY) for label in _labels(pair)):
        return {"greedy": False, "max_temperature": abilities.max_temperature}
    if abilities.greedy and any(label == GREEDY or never_meet(label, SAMPLED) for label in _labels(pair)):
        return {"greedy": True, "max_temperature": 0.0}
    return {}


def _ranks(pair: Pair, abilities: Abilities) -> Mapping[str, Any]:
    """The number of ranks that a label names."""
    values = [label.value for label in _labels(pair) if label.axis == "ranks"]
    if not values:
        several = any(label.axis == "draft's ranks" for label in _labels(pair))
        return {"spread": False} if several else {}
    if values[0].startswith("requests"):
        return {"spread": True}
    return {
        "ranks": tuple(ranks for ranks in abilities.ranks if ranks in (1, int(values[0].split()[0]))),
        "spread": False,
    }


def _features(pair: Pair, abilities: Abilities) -> Iterator[str]:
    """What is drawn more often than elsewhere."""
    for label in _labels(pair):
        if not is_declared(label, replace(abilities, sessions=False)):
            yield SESSIONS
        feature = FEATURE_OF_LABEL.get(str(label)) or FEATURE_OF_AXIS.get(label.axis)
        if feature is not None:
            yield feature
