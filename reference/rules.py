"""Rule: how drafted tokens are accepted when the target samples.

Each rule declares a `Promise`: whether its output follows the target's law, and under which condition.
"""

from dataclasses import dataclass, field
from typing import Any

from specverify.reference.malformed import Malformed

OMIT_DEFAULT: dict[str, Any] = {"omit_default": True}
"""Metadata of a field that files and ids leave out at its default, so that a field added later changes neither."""

DRAWS = ("top-k", "without-replacement", "with-replacement")
"""How a draft names siblings: its best tokens, or tokens drawn one after the other from its law."""


@dataclass(frozen=True)
class Promise:
    """The declaration of a rule.

    Attributes:
        lossless: Whether the output follows the target's law wherever `condition` holds.
        condition: The condition, in words; empty where there is none.
        chains_only: Whether the rule verifies chains alone.
        source: Where the rule was published.
        sentence: What the rule does.
    """

    lossless: bool
    condition: str
    chains_only: bool
    source: str
    sentence: str


RULES = {
    "chain": Promise(
        True,
        "",
        True,
        "Leviathan et al. 2023, algorithm 1; Chen et al. 2023",
        "Accept x with probability min(1, p(x)/q(x)); a rejection is replaced from relu(p - q), normalised.",
    ),
    "multi-round": Promise(
        True,
        "",
        False,
        "Chen et al. 2024 (Sequoia), Jeon et al. 2024 (RSD), EAGLE-1",
        "Siblings are tried in the order in which they were drawn, p becoming relu(p - q) after each rejection.",
    ),
    "eagle": Promise(
        True,
        "the tree does not depend on the coins",
        False,
        "EAGLE-2 and EAGLE-3, evaluate_posterior",
        "Tokens are tried as if surely drafted: accept x with probability p(x), else zero it; twins are one candidate.",
    ),
    "specinfer": Promise(
        True,
        "siblings drawn independently of each other, or deterministic and distinct",
        False,
        "Miao et al. 2024 (SpecInfer), multi-step speculative sampling",
        "Siblings are tried in random order, each against the law of the draft that proposed it.",
    ),
    "target-only": Promise(
        True,
        "threshold_acc = 1, threshold_single >= 1, distinct siblings",
        False,
        "SGLang, tree_speculative_sampling_target_only",
        "One coin a level: the first sibling at which the covered mass of p exceeds the coin is accepted.",
    ),
    "typical": Promise(
        False,
        "",
        False,
        "Cai et al. 2024 (Medusa), typical acceptance",
        "Accept x where p(x) > min(epsilon, delta * exp(-entropy of p)); the longest path wins, then the likeliest.",
    ),
    "block": Promise(
        True,
        "",
        True,
        "Sun et al. 2024, block verification",
        "The whole chain is accepted up to the last node whose coin lies below its block ratio.",
    ),
}
"""Every acceptance rule by name."""


@dataclass(frozen=True)
class Rule:
    """An acceptance rule with its thresholds; thresholds of other rules are ignored.

    Attributes:
        name: One of RULES.
        threshold_single: target-only: a token with p(x) at or above this is accepted whatever the coin.
        threshold_acc: target-only: the covered mass is divided by this.
        epsilon: typical: the hard threshold.
        delta: typical: the factor of exp(-entropy).
    """

    name: str = "multi-round"
    threshold_single: float = field(default=1.0, metadata=OMIT_DEFAULT)
    threshold_acc: float = field(default=1.0, metadata=OMIT_DEFAULT)
    epsilon: float = field(default=0.3, metadata=OMIT_DEFAULT)
    delta: float = field(default=0.09, metadata=OMIT_DEFAULT)

    def __post_init__(self) -> None:
        if self.name not in RULES:
            raise Malformed("name", f"{self.name!r} is no acceptance rule: known are {', '.join(RULES)}")
        for name in ("threshold_single", "threshold_acc", "epsilon", "delta"):
            value = getattr(self, name)
            # Refuses NaN as well.
            if not 0.0 < value < float("inf"):
                raise Malformed(name, f"{value} is not a threshold (above 0)")

    @property
    def promise(self) -> Promise:
        """The rule's declaration."""
        return RULES[self.name]

    def lossless(self, draws: str, distinct: bool) -> bool:
        """Whether the rule promises the target's law.

        Args:
            draws: How siblings are named, one of DRAWS.
            distinct: Whether no two siblings carry the same token.
        """
        # These two conditions depend on the case; those of other rules are constants of the Promise.
        if self.name == "target-only":
            return self.threshold_acc == 1.0 and self.threshold_single >= 1.0 and distinct
        if self.name == "specinfer":
            return draws == "with-replacement" or (draws == "top-k" and distinct)
        return self.promise.lossless

    def refuses(self, branches: bool) -> str | None:
        """Why the rule cannot verify a tree, or None; `branches` tells whether a node may have more than one child."""
        # Siblings have no place in the formulas of these rules.
        if self.promise.chains_only and branches:
            return f"rule {self.name} verifies chains; this tree branches (use multi-round)"
        return None
