"""The environment flags of the engine, and the mode that they select.

The mode says which forwards run fused attention. The option `--mode` takes precedence over the flags, which are those
of EAGLE-Pangu. Further flags name the largest dense mask, what carries a hand-over, and a table of attention times.
"""

import os
from collections.abc import Mapping
from dataclasses import dataclass

from specverify.backends.base import WrongFlag

MODES = ("reference", "performance", "eager-aligned")

NO_FUSED, NO_FUSED_TREE = "PANGU_DISABLE_NPU_FUSED", "PANGU_DISABLE_NPU_FUSED_TREE"
FORCE_EAGER, FAST_REORDER = "PANGU_FORCE_EAGER_ATTN", "EA_FAST_CACHE_REORDER"
FLAGS = {
    NO_FUSED: "1: no fused attention at all",
    NO_FUSED_TREE: "1: no fused attention for the rows of a tree; prefill and single rows stay fused",
    FORCE_EAGER: "1: eager attention everywhere, in the baselines of `bench decode` too (eager-aligned)",
    FAST_REORDER: "1: commits append to the cache where they can; 0: they never do",
}
"""Flags of EAGLE-Pangu, with the same meaning on every fused backend; a flag is 0, 1 or unset."""

DENSE_MASK_BYTES = "SPECVERIFY_DENSE_MASK_BYTES"
"""The flag that gives masks a budget: a mask of at most so many bytes is dense, and a larger one compact.

Backends whose attention reads words obey it; without it, those of words make no dense mask and the others no compact
one. An attention that reads dense masks alone counts the larger ones among its fallbacks.
"""


ATTENTION_TABLE = "SPECVERIFY_ATTENTION_TABLE"
"""The flag of backends that choose their attention: the file of `bench attention --table` by which they do."""

HAND_OVER = "SPECVERIFY_HAND_OVER"
WAYS = ("shared-memory", "gloo", "nccl", "hccl")
"""HAND_OVER: what carries a hand-over between two processes. WAYS: its values; the first one where it is not set."""


@dataclass(frozen=True)
class Mode:
    """The modes that say which forwards run fused attention.

    Attributes:
        fused: Whether any forward does.
        trees: Whether forwards of several rows over a committed prefix do. Such a forward verifies a tree, or runs a
            later chunk of a chunked prefill.
        aligned: Whether what speculation is compared with, transformers' own generation among it, runs eager attention
            too: the eager-aligned variant of EAGLE-Pangu (4.1), in which no kernel is part of a speed-up.
    """

    fused: bool = True
    trees: bool = True
    aligned: bool = False

    @property
    def word(self) -> str:
        """The mode as run manifests write it."""
        if not self.fused:
            return "eager-aligned" if self.aligned else "reference"
        return "performance" if self.trees else "performance, trees eager"


def flags_set(environment: Mapping[str, str] = os.environ) -> dict[str, str]:
    """The flags that are set, with their unparsed values."""
    # An empty value counts as unset.
    return {
        name: environment[name]
        for name in (*FLAGS, DENSE_MASK_BYTES, HAND_OVER, ATTENTION_TABLE)
        if environment.get(name)
    }


def dense_mask_bytes(environment: Mapping[str, str] = os.environ) -> int | None:
    """The number of bytes that the flag DENSE_MASK_BYTES allows a dense mask; None where it is unset.

    Raises:
        WrongFlag: if its value is not a whole number from 0 on.
    """
    value = environment.get(DENSE_MASK_BYTES)
    if not value:
        return None
    if not value.isdecimal():
        raise WrongFlag(f"{DENSE_MASK_BYTES}={value!r}: set it to a number of bytes from 0 on, or leave it unset")
    return int(value)


def attention_table(environment: Mapping[str, str] = os.environ) -> str | None:
    """The file that ATTENTION_TABLE names; None where it is unset."""
    return environment.get(ATTENTION_TABLE) or None


def hand_over_by(environment: Mapping[str, str] = os.environ) -> str:
    """The value of HAND_OVER, one of WAYS.

    Raises:
        WrongFlag: if it has another one.
    """
    by = environment.get(HAND_OVER) or WAYS[0]
    if by not in WAYS:
        raise WrongFlag(f"{HAND_OVER}={by!r}: set it to {', '.join(WAYS[:-1])} or {WAYS[-1]}, or leave it unset")
    return by


def mode_of(word: str | None = None, environment: Mapping[str, str] = os.environ) -> Mode:
    """The mode that `word`, one of MODES, names; if `word` is None, the mode that the environment's flags select.

    Raises:
        WrongFlag: if the value of a flag is neither 0 nor 1.
    """
    # Flags are checked even where `word` decides: a mistyped flag never passes in silence.
    flags = flags_set(environment)
    for name, value in flags.items():
        if name in FLAGS and value not in ("0", "1"):
            raise WrongFlag(f"{name}={value!r}: set it to 0 or 1, or leave it unset")
    if word is not None:
        return Mode(fused=word == "performance", aligned=word == "eager-aligned")
    if "1" in (flags.get(NO_FUSED), flags.get(FORCE_EAGER)):
        return Mode(fused=False, aligned=flags.get(FORCE_EAGER) == "1")
    return Mode(trees=flags.get(NO_FUSED_TREE) != "1")
