"""Labels that an engine can have by its abilities: what it does not declare is no gap."""

from collections.abc import Callable, Mapping

from specverify.properties.verdict.coverage.axes import (
    APART,
    MIXED,
    RECURRENT,
    SEES,
    SLOTS,
    STATES,
    STORED_BY_ROW,
    STORED_DTYPES,
    SYNC,
)
from specverify.properties.verdict.coverage.pairs import EVENT, Label
from specverify.reference.abilities import Abilities
from specverify.reference.draft import KINDS as DRAFTS
from specverify.reference.family import FAMILIES, Family
from specverify.reference.layout import KINDS as LAYOUTS
from specverify.reference.layout import PAGE_STATES
from specverify.reference.rules import PLAIN

READERS = ("block", "eagle1", "eagle3", "medusa", "mtp", "peagle")
"""Kinds of draft that read hidden states of the target."""

STOP_FIELDS = {
    "eos": "eos",
    "stop token": "stop_tokens",
    "stop string": "stop_strings",
    "longest length": "max_length",
}

PROCESSING_FIELDS = {
    "top-k": "top_k",
    "top-p": "top_p",
    "min-p": "min_p",
    "repetition penalty": "repetition_penalty",
    "presence or frequency penalty": "presence_penalty",
    "bad words": "bad_words",
    "min_tokens": "min_tokens",
}

LAYOUT_FIELDS = {
    "padded rows": "padded_nodes",
    "prefill in chunks": "prefill_chunk",
    "over-allocated": "overhang",
    SYNC: "draft_sync",
    "tree cut at a chunk": "stay_in_chunk",
    "latent cache": "latent",
    "first tier": "first_tier",
    "second tier": "second_tier",
    "several branches": "branches",
    "padded on the left": "left_pad",
    MIXED: "mixed_prefill",
    APART: "draft_page_size",
    SLOTS: "state_slots",
    **dict.fromkeys((*STORED_DTYPES.values(), STORED_BY_ROW), "kv_dtype"),
    "cells of large": "poison",
    "cells of nan": "poison",
    "cells of others": "poison",
}

ACTION_OF_EVENT = {
    "step without a draft": "first",
    "launched step": "launch",
    "result of a launch skipped": "launch",
    "thrown back, then steps": "preempt",
    "evicted and restored, then steps": "restore",
    "handed over, then steps": "hand-over",
    "switches drafts, then steps": "switch",
    "forked, then steps": "fork",
    "twin of a fork": "fork",
    "in a batch": "step",
}

BARE_ROWS = (
    "without its draft beside drafted trees", "launched without its draft",
    "drafts again behind accepted and bare steps",
)  # fmt: skip
"""Events of requests whose drafts are not asked where others' are."""

SHOWN_BY_STEPS = (
    "accepts one", "accepts two", "accepts four", "rejects behind an accepted node", "goes on after a rejection",
    "path leaves the row order", "ends inside a block", "accepted path crosses a page", "tree crosses a window",
    "tree crosses a chunk",
)  # fmt: skip
"""Events that a run shows by its trees and paths."""

FAMILY_TRAITS: Mapping[str, Callable[[Family], bool]] = {
    "sinks": lambda family: family.sinks,
    "indexed columns": lambda family: family.indexed,
    "latent attention": lambda family: family.projections is not None,
    "experts": lambda family: family.mixes_rows,
    "recurrent state": lambda family: family.hybrid,
    "three axes": lambda family: family.three_axes,
}


def is_declared(label: Label, abilities: Abilities, shows_steps: bool = True) -> bool:
    """Whether a request of an engine with these abilities may have the label.

    `shows_steps` says whether the engine shows the trees and paths of its steps.
    """
    rule = RULES_BY_AXIS.get(label.axis)
    if label.axis == EVENT and label.value in SHOWN_BY_STEPS and not shows_steps:
        return False
    return rule is None or rule(label.value, abilities)


def _target(value: str, abilities: Abilities) -> bool:
    families = [family for name, family in FAMILIES.items() if abilities.families is None or name in abilities.families]
    trait = FAMILY_TRAITS.get(value)
    if trait is not None and not any(trait(family) for family in families):
        return False
    return {
        "window": abilities.least_window > 0,
        "chunk": abilities.least_window > 0,
        "soft cap": abilities.soft_caps != "none",
        "sinks": abilities.sinks,
        "indexed columns": abilities.indexed,
        "latent attention": abilities.unequal_widths,
        "images": abilities.images,
        "adapter": abilities.adapters,
        "quantised": abilities.quantised,
    }.get(value, True)


def _draft(value: str, abilities: Abilities) -> bool:
    # An engine that drafts in its own way has cases whose own draft is an empty script.
    return value in (abilities.drafts or ("scripted",))


def _draft_trait(value: str, abilities: Abilities) -> bool:
    reads = any(kind in abilities.drafts for kind in READERS)
    return {
        "reads hidden states": reads,
        "vocabulary of its own": abilities.draft_trees and (reads or "model" in abilities.drafts),
        "quantised draft": abilities.quantised,
        "learns from other requests": abilities.sessions and "trie" in abilities.drafts,
        "draft of several layers": reads,
        "draft of another family": "model" in abilities.drafts,
        RECURRENT: "model" in abilities.drafts and _target("recurrent state", abilities),
        SEES: abilities.images and abilities.draft_images,
    }[value]


def _tree(value: str, abilities: Abilities) -> bool:
    if not any(kind in abilities.drafts for kind in DRAFTS):
        return False
    if value.endswith(" tree"):
        return value.removesuffix(" tree") in abilities.tree_kinds
    return value != "branches" or abilities.trees != "chains"


def _sampling(value: str, abilities: Abilities) -> bool:
    if value in PROCESSING_FIELDS:
        return PROCESSING_FIELDS[value] in abilities.processed
    return {
        "greedy": abilities.greedy,
        "sampled": abilities.max_temperature > 0,
        "temperature below 0.5": abilities.max_temperature > 0,
        "temperature above 1.5": abilities.max_temperature > 1.5,
        "log-probabilities of the prompt": abilities.prompt_logprobs,
    }[value]


def _rule(value: str, abilities: Abilities) -> bool:
    return abilities.max_temperature > 0 and value in (abilities.rules or (PLAIN,))


def _draws(value: str, abilities: Abilities) -> bool:
    return abilities.max_temperature > 0 and bool(abilities.drafts) and value in (abilities.draws or ("top-k",))


def _layout_trait(value: str, abilities: Abilities) -> bool:
    if value in LAYOUT_FIELDS:
        return LAYOUT_FIELDS[value] in abilities.layout_settings
    paged = any(LAYOUTS[kind].pages for kind in abilities.layouts)
    return {
        "fast commit": "fast" in abilities.commits,
        "commit by length": "length" in abilities.commits,
        STATES: PAGE_STATES[1] in abilities.page_states,
        "free pages in another order": paged,
    }[value]


def _ranks(value: str, abilities: Abilities) -> bool:
    if value.startswith("requests"):
        return abilities.spread and abilities.sessions
    return int(value.split()[0]) in abilities.ranks


def _draft_ranks(value: str, abilities: Abilities) -> bool:
    return abilities.draft_ranks and max(abilities.ranks) > 1


def _company(value: str, abilities: Abilities) -> bool:
    return value == "up to 1 requests" or abilities.sessions


def _event(value: str, abilities: Abilities) -> bool:
    if value in BARE_ROWS:
        return abilities.sessions and abilities.bare_rows
    if value in ACTION_OF_EVENT:
        return abilities.sessions and ACTION_OF_EVENT[value] in (*abilities.actions, "step")
    keeps_prefixes = any(LAYOUTS[kind].keeps_prefixes for kind in abilities.layouts)
    has_pages = any(LAYOUTS[kind].pages for kind in abilities.layouts)
    return {
        "ends by eos": bool({"eos", "stop_tokens"} & {*abilities.stops}),
        "ends by a stop": bool({"stop_tokens", "stop_strings"} & {*abilities.stops}),
        "closes its grammar": "grammar" in abilities.processed,
        "accepted path crosses a page": has_pages,
        "tree crosses a window": abilities.least_window > 0,
        "tree crosses a chunk": abilities.least_window > 0,
        "waits for room, then steps": has_pages and abilities.sessions,
        "prefix hit": keeps_prefixes and abilities.sessions,
        "brought back from the second tier": keeps_prefixes and "second_tier" in abilities.layout_settings,
    }.get(value, True)


RULES_BY_AXIS: Mapping[str, Callable[[str, Abilities], bool]] = {
    "target": _target,
    "draft": _draft,
    "draft's traits": _draft_trait,
    "tree": _tree,
    "sampling": _sampling,
    "rule": _rule,
    "draws": _draws,
    "grammar": lambda value, abilities: "grammar" in abilities.processed,
    "grammar's beginning": lambda value, abilities: {"grammar", "grammar_markers"} <= {*abilities.processed},
    "end": lambda value, abilities: STOP_FIELDS[value] in abilities.stops,
    "layout": lambda value, abilities: value in abilities.layouts,
    "layout's traits": _layout_trait,
    "dtype": lambda value, abilities: value in abilities.dtypes,
    "ranks": _ranks,
    "draft's ranks": _draft_ranks,
    "company": _company,
    EVENT: _event,
}
"""For each axis, whether an engine with these abilities may have a value of it; sizes are open to all."""
