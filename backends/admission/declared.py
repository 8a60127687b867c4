"""Admission of declarations: a backend's `Declaration` is checked when it opens.

Every field must have its type, and every word in it must be one that this project defines.
"""

import dataclasses
from typing import Any

from specverify.backends.admission.misshapen import describe, refusal
from specverify.backends.admission.numbers import admit_flag, admit_float, admit_int, admit_ints
from specverify.backends.base import Declaration
from specverify.reference import draft
from specverify.reference.abilities import (
    CHAIN_RULES,
    CHOICES,
    GRAMMAR_WORDS,
    LAYOUT_SETTINGS,
    LOGPROBS,
    PROCESSING,
    SOFT_CAPS,
    TREES,
    Chains,
)
from specverify.reference.architecture import ROPE_KINDS
from specverify.reference.case import DTYPES
from specverify.reference.draft.layer_head import ALIGNMENTS, FIRST_TOKENS
from specverify.reference.draft_trees import TREE_KINDS
from specverify.reference.family import FAMILIES
from specverify.reference.layout import COMMITS, KINDS, PAGE_STATES
from specverify.reference.parallel import RANKS
from specverify.reference.rules import DRAWS, RULES
from specverify.reference.sampling import Stops
from specverify.reference.session import ACTIONS
from specverify.reference.trace import Stage


def words() -> dict[str, tuple[str, ...]]:
    """The fields of a declaration that hold words, each with the words that are admitted there."""
    return {
        "dtypes": DTYPES,
        "drafts": tuple(draft.KINDS),
        "tree_kinds": TREE_KINDS,
        "first_tokens": FIRST_TOKENS,
        "alignments": ALIGNMENTS,
        "page_states": PAGE_STATES,
        "commits": COMMITS,
        "layouts": tuple(KINDS),
        "layout_settings": LAYOUT_SETTINGS,
        "actions": tuple(ACTIONS),
        "rules": tuple(RULES),
        "draws": DRAWS,
        "stops": tuple(field.name for field in dataclasses.fields(Stops)),
    }


FLAGS = (
    "sessions",
    "continuous",
    "own_seed",
    "own_drafts",
    "bare_rows",
    "images",
    "draft_images",
    "spread",
    "draft_ranks",
    "takes_tape",
    "emulated",
    "draft_trees",
    "seeded",
    "same_bits",
    "same_seed",
    "interruptible",
    "greedy",
)
"""The fields of a declaration that hold True or False."""


LEAST = {"most_requests": 0, "least_window": 0, "head_multiple": 1, "longest": 0, "least_prompt": 1}
"""The fields of a declaration that hold whole numbers, each with its least value."""


LEAST_ROOM = 32
"""Fewest tokens that an engine must take behind its shortest prompt, so that cases of some length can be drawn."""


def check_declaration(declaration: Declaration) -> None:
    """Raise Misshapen unless every field of a declaration has its type and holds only words that this project defines.

    The refusal begins with the field: `declaration.dtypes: 'float32', expected a tuple of words: float64, ...`. A
    device may have any name, since a stranger's engine may run on a device that this project does not know.
    """
    for name in ("name", "device"):
        text = getattr(declaration, name)
        if not isinstance(text, str) or not text.strip():
            raise refusal(f"declaration.{name}", text, "a word")
    _check_reveals(declaration.reveals)
    for name, admitted_words in words().items():
        _check_words(f"declaration.{name}", getattr(declaration, name), admitted_words)
    if not declaration.dtypes:
        raise refusal("declaration.dtypes", declaration.dtypes, "at least one dtype, the default first")
    # Without one of these no case could be drawn.
    for name, least in (("commits", "path"), ("layouts", "branch"), ("stops", "max_new_tokens")):
        if not getattr(declaration, name):
            raise refusal(f"declaration.{name}", getattr(declaration, name), f"at least one, such as {least!r}")
    counts = admit_ints("declaration.ranks", declaration.ranks)
    if not counts or not set(counts) <= set(RANKS):
        raise refusal("declaration.ranks", declaration.ranks, f"some of {', '.join(map(str, RANKS))}")
    for name, admitted_words in (("families", tuple(FAMILIES)), ("ropes", ROPE_KINDS)):
        entries = getattr(declaration, name)
        if entries is not None:
            _check_words(f"declaration.{name}", entries, admitted_words)
            if not entries:
                raise refusal(f"declaration.{name}", entries, "at least one, or None for all")
    for name, admitted_words in (
        ("soft_caps", SOFT_CAPS),
        ("logprobs", LOGPROBS),
        ("trees", TREES),
        ("grammar_words", GRAMMAR_WORDS),
    ):
        if getattr(declaration, name) not in admitted_words:
            raise refusal(f"declaration.{name}", getattr(declaration, name), f"one of {', '.join(admitted_words)}")
    if not isinstance(declaration.processes, bool):
        _check_words("declaration.processes", declaration.processes, PROCESSING)
    for name, fewest in (
        ("most_requests", 0),
        ("least_window", 0),
        ("longest", 0),
        ("least_prompt", 1),
        ("head_multiple", 1),
    ):
        admit_int(f"declaration.{name}", getattr(declaration, name), fewest)
    if declaration.longest and declaration.longest < LEAST_ROOM + declaration.least_prompt:
        line = f"0, or at least {LEAST_ROOM} tokens more than the shortest prompt of {declaration.least_prompt}"
        raise refusal("declaration.longest", declaration.longest, line)
    if not isinstance(declaration.excluded, tuple) or not all(map(_is_exclusion, declaration.excluded)):
        raise refusal("declaration.excluded", declaration.excluded, "a tuple of sentences, each `region: why`")
    if not isinstance(declaration.environment, tuple) or not all(map(_is_variable, declaration.environment)):
        raise refusal("declaration.environment", declaration.environment, "pairs of a variable's name and its value")
    if not isinstance(declaration.settings, tuple) or not all(map(_is_name, declaration.settings)):
        raise refusal("declaration.settings", declaration.settings, "a tuple of words, such as prefix-cache")
    for name in ("cutting_settings", "processed_settings"):
        some = getattr(declaration, name)
        if not isinstance(some, tuple) or not {*some} <= {*declaration.settings}:
            raise refusal(f"declaration.{name}", some, "a tuple of some of its settings")
    _check_chains(declaration.chains)
    for name in FLAGS:
        admit_flag(f"declaration.{name}", getattr(declaration, name))
    # The comparison is negated so that NaN is refused as well.
    hottest = admit_float("declaration.max_temperature", declaration.max_temperature)
    if not hottest >= 0:
        raise refusal("declaration.max_temperature", hottest, "a temperature of at least 0.0 (0.0: greedy only)")
    if not declaration.greedy and not hottest:
        raise refusal(
            "declaration.greedy", declaration.greedy, "True, or a max_temperature above 0: no case could be drawn"
        )
    if declaration.tables_dtype not in ("float64", "float32"):
        raise refusal("declaration.tables_dtype", declaration.tables_dtype, "float64 or float32")
    admit_int("declaration.variant_interval", declaration.variant_interval, 1)


def _check_chains(chains: object) -> None:
    if chains is None:
        return
    if not isinstance(chains, Chains):
        raise refusal("declaration.chains", chains, "specverify.adapt.Chains, or None")
    admit_int("declaration.chains.tokens", chains.tokens, 1)
    for name, words_of_field in (("choice", CHOICES), ("rule", CHAIN_RULES)):
        if getattr(chains, name) not in words_of_field:
            raise refusal(f"declaration.chains.{name}", getattr(chains, name), f"one of {', '.join(words_of_field)}")


def _is_exclusion(value: Any) -> bool:
    """Whether a value names a region and, behind a colon, why it is left out."""
    return isinstance(value, str) and all(part.strip() for part in value.partition(": "))


def _is_name(value: Any) -> bool:
    """Whether a value is a text of at most 64 characters, and not empty."""
    return isinstance(value, str) and 0 < len(value) <= 64


def _is_variable(value: Any) -> bool:
    """Whether a value is the name of a variable with its value, two texts."""
    return isinstance(value, tuple) and len(value) == 2 and all(isinstance(part, str) for part in value)


def _check_reveals(value: Any) -> None:
    """Raise Misshapen unless `value` is a set of stages."""
    expected = "a frozenset of specverify.reference.trace.Stage, such as frozenset({Stage.EMITTED})"
    if not isinstance(value, (frozenset, set)):
        raise refusal("declaration.reveals", value, expected)
    stranger = next((entry for entry in value if not isinstance(entry, Stage)), None)
    if stranger is not None:
        raise refusal("declaration.reveals", value, expected, f"a set with {describe(stranger)}")


def _check_words(field: str, value: Any, admitted_words: tuple[str, ...]) -> None:
    """Raise Misshapen unless `value` is a tuple or list of words that are in `admitted_words`."""
    if not isinstance(value, (tuple, list)):
        raise refusal(field, value, f"a tuple of words: {', '.join(admitted_words)}")
    for index, word in enumerate(value):
        if not isinstance(word, str) or word not in admitted_words:
            raise refusal(f"{field}[{index}]", word, f"one of {', '.join(admitted_words)}")
