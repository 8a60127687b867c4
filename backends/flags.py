"""The environment flags of the two-mode protocol, and the mode that they or an option ask for."""

import os
from collections.abc import Mapping
from dataclasses import dataclass

from backends.base import WrongFlag

MODES = ("reference", "performance")

NO_FUSED, NO_FUSED_TREE = "PANGU_DISABLE_NPU_FUSED", "PANGU_DISABLE_NPU_FUSED_TREE"
FORCE_EAGER, FAST_REORDER = "PANGU_FORCE_EAGER_ATTN", "EA_FAST_CACHE_REORDER"
FLAGS = {
    NO_FUSED: "1: no fused attention at all",
    NO_FUSED_TREE: "1: no fused attention for the rows of a tree; prefill and single rows stay fused",
    FORCE_EAGER: "1: eager attention everywhere",
    FAST_REORDER: "1: commits append to the cache where they can; 0: they never do",
}
"""Flags of EAGLE-Pangu, of one meaning on every fused backend: 0, 1 or unset."""


@dataclass(frozen=True)
class Mode:
    """Which forwards run fused attention.

    Attributes:
        fused: Any.
        trees: Those of several rows over a committed prefix: a tree, and also a later chunk of a chunked prefill.
    """

    fused: bool = True
    trees: bool = True

    @property
    def word(self) -> str:
        """As manifests say it."""
        if not self.fused:
            return "reference"
        return "performance" if self.trees else "performance, trees eager"


def flags_set(environment: Mapping[str, str] = os.environ) -> dict[str, str]:
    """The flags that are set, with their values as they stand there."""
    return {name: environment[name] for name in FLAGS if environment.get(name)}


def mode_of(word: str | None = None, environment: Mapping[str, str] = os.environ) -> Mode:
    """The mode that `word` asks for, one of MODES; for None, the one that the environment's flags do.

    Raises:
        WrongFlag: for a flag whose value is neither 0 nor 1.
    """
    found = flags_set(environment)
    for name, value in found.items():
        if value not in ("0", "1"):
            raise WrongFlag(f"{name}={value!r}: set it to 0 or 1, or leave it unset")
    if word is not None:
        return Mode(fused=word == "performance")
    if "1" in (found.get(NO_FUSED), found.get(FORCE_EAGER)):
        return Mode(fused=False)
    return Mode(trees=found.get(NO_FUSED_TREE) != "1")
