"""Rule: how drafted tokens are accepted when the target samples.

Each rule declares a `Promise`: whether its output follows the target's law, and under which condition.
"""

from collections.abc import Callable, Mapping
from dataclasses import dataclass, field, fields
from typing import Any

from specverify.reference.malformed import Malformed

OMIT_DEFAULT: dict[str, Any] = {"omit_default": True}
"""Metadata of a field that files and ids leave out at its default, so that a field added later changes neither."""

DRAWS = ("top-k", "without-replacement", "with-replacement")
"""How a draft names siblings: its best tokens, or tokens drawn one after the other from its law."""


PLAIN = "multi-round"
"""The rule of a case that names no other."""


def _as_declared(rule: "Rule", draws: str, distinct: bool) -> bool:
    return True


@dataclass(frozen=True)
class Promise:
    """The declaration of a rule.

    Attributes:
        lossless: Whether the output follows the target's law wherever `condition` holds.
        condition: The condition, in words; empty where there is none.
        chains_only: Whether the rule verifies chains alone.
        source: Where the rule was published.
        sentence: What the rule does.
        keeps: Function from a rule with its thresholds, how siblings are named, and whether all siblings differ, to
            whether `condition` holds as far as the case decides it.
        draws: How siblings are named in its publication, one of DRAWS.
        thresholds: The fields of `Rule` that it reads, each with the values that cases draw.
        reads_draft_law: Whether it compares p with q; other rules read the target alone.
        tries_in_turn: Whether it tries siblings one after the other, each with its own coin, against the residual of p.
        joins_twins: Whether siblings with one token are one candidate.
        law_by_sibling: Whether siblings may come from drafts with different laws.
        takes_coins: Whether coins decide.
        rejects_equal_laws: Whether it may reject a token where p is q, so that relu(p - q) is rounding alone.
    """

    lossless: bool
    condition: str
    chains_only: bool
    source: str
    sentence: str
    keeps: Callable[["Rule", str, bool], bool] = _as_declared
    draws: str = "without-replacement"
    thresholds: Mapping[str, tuple[float, ...]] = field(default_factory=dict)
    reads_draft_law: bool = True
    tries_in_turn: bool = False
    joins_twins: bool = False
    law_by_sibling: bool = False
    takes_coins: bool = True
    rejects_equal_laws: bool = False


RULES = {
    "chain": Promise(
        True,
        "",
        True,
        "Leviathan et al. 2023, algorithm 1; Chen et al. 2023",
        "Accept x with probability min(1, p(x)/q(x)); a rejection is replaced from relu(p - q), normalised.",
        tries_in_turn=True,
    ),
    PLAIN: Promise(
        True,
        "",
        False,
        "Chen et al. 2024 (Sequoia), Jeon et al. 2024 (RSD), EAGLE-1",
        "Siblings are tried in the order in which they were drawn, p becoming relu(p - q) after each rejection.",
        tries_in_turn=True,
    ),
    "eagle": Promise(
        True,
        "the tree does not depend on the coins",
        False,
        "EAGLE-2 and EAGLE-3, evaluate_posterior",
        "Tokens are tried as if surely drafted: accept x with probability p(x), else zero it; twins are one candidate.",
        draws="top-k",
        reads_draft_law=False,
        tries_in_turn=True,
        joins_twins=True,
    ),
    "specinfer": Promise(
        True,
        "siblings drawn independently of each other, or deterministic and distinct",
        False,
        "Miao et al. 2024 (SpecInfer), multi-step speculative sampling",
        "Siblings are tried in random order, each against the law of the draft that proposed it.",
        keeps=lambda rule, draws, distinct: draws == "with-replacement" or (draws == "top-k" and distinct),
        draws="with-replacement",
        law_by_sibling=True,
    ),
    "target-only": Promise(
        True,
        "threshold_acc = 1, threshold_single >= 1, distinct siblings",
        False,
        "SGLang, tree_speculative_sampling_target_only",
        "One coin a level: the first sibling at which the covered mass of p exceeds the coin is accepted.",
        keeps=lambda rule, draws, distinct: rule.threshold_acc == 1.0 and rule.threshold_single >= 1.0 and distinct,
        draws="top-k",
        thresholds={"threshold_single": (1.0, 0.5, 0.2), "threshold_acc": (1.0, 0.9, 0.5)},
        reads_draft_law=False,
    ),
    "typical": Promise(
        False,
        "",
        False,
        "Cai et al. 2024 (Medusa), typical acceptance",
        "Accept x where p(x) > min(epsilon, delta * exp(-entropy of p)); the longest path wins, then the likeliest.",
        draws="top-k",
        thresholds={"epsilon": (0.3, 0.09), "delta": (0.09, 0.3)},
        reads_draft_law=False,
        takes_coins=False,
    ),
    "block": Promise(
        True,
        "",
        True,
        "Sun et al. 2024, block verification",
        "The whole chain is accepted up to the last node whose coin lies below its block ratio.",
    ),
    "traversal": Promise(
        True,
        "",
        False,
        "Weng et al. 2025, traversal verification (arXiv 2505.12398)",
        "Paths are tried from the first leaf to the root, each by its block ratio; on a chain it is the rule block.",
    ),
    "sample-and-match": Promise(
        True,
        "",
        False,
        "llama.cpp, common_sampler_sample_and_accept_n; vLLM, strict rejection sampling",
        "At each node a token is drawn from p; the child with that token is accepted, or else the token is emitted.",
        draws="top-k",
        reads_draft_law=False,
    ),
    "ensemble": Promise(
        False,
        "",
        True,
        "DIVERSED (arXiv 2604.07622), static ensemble; transformers, assistant_ensemble_weight",
        "Accept x, unless p(x) is 0, with probability min(1, 1 - weight + weight p(x)/q(x)); a rejection is replaced"
        " from relu(p - q), normalised.",
        thresholds={"weight": (0.7, 0.3)},
    ),
    "fly": Promise(
        False,
        "",
        True,
        "FLy (arXiv 2511.22972); vllm-project/vllm PR #50808",
        "The rule chain, but a rejected x is accepted where p(x) is not 0, the entropy of p reaches its threshold and"
        " all of the next window nodes are accepted.",
        thresholds={"entropy": (1.0, 0.3), "window": (1.0, 2.0)},
    ),
    "synthetic": Promise(
        False,
        "",
        True,
        "vLLM, rejection_sample_method synthetic: a load of a known acceptance for benches",
        "Accept x, unless p(x) is 0, with the probability acceptance_rate; a rejection is replaced from relu(p - q),"
        " normalised.",
        thresholds={"acceptance_rate": (0.8, 0.4)},
        rejects_equal_laws=True,
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
        weight: ensemble: the share of p in the mixture of p and q that accepts, at most 1.
        entropy: fly: the least entropy of p, in nats, at which a rejection may be passed over.
        window: fly: the number of accepted nodes that must follow it, a whole number.
        acceptance_rate: synthetic: the probability that a node is accepted, at most 1.
    """

    name: str = PLAIN
    threshold_single: float = field(default=1.0, metadata=OMIT_DEFAULT)
    threshold_acc: float = field(default=1.0, metadata=OMIT_DEFAULT)
    epsilon: float = field(default=0.3, metadata=OMIT_DEFAULT)
    delta: float = field(default=0.09, metadata=OMIT_DEFAULT)
    weight: float = field(default=0.7, metadata=OMIT_DEFAULT)
    entropy: float = field(default=1.0, metadata=OMIT_DEFAULT)
    window: float = field(default=1.0, metadata=OMIT_DEFAULT)
    acceptance_rate: float = field(default=0.8, metadata=OMIT_DEFAULT)

    def __post_init__(self) -> None:
        if self.name not in RULES:
            raise Malformed("name", f"{self.name!r} is no acceptance rule: known are {', '.join(RULES)}")
        for name in THRESHOLDS:
            value = getattr(self, name)
            # Refuses NaN as well.
            if not 0.0 < value < float("inf"):
                raise Malformed(name, f"{value} is not a threshold (above 0)")
        for name in ("weight", "acceptance_rate"):
            if getattr(self, name) > 1:
                raise Malformed(name, f"{getattr(self, name)} is not a share (above 0, at most 1)")
        if self.window != int(self.window):
            raise Malformed("window", f"{self.window} is not a number of nodes (1 or more)")

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
        return self.promise.lossless and self.promise.keeps(self, draws, distinct)

    def refuses(self, branches: bool) -> str | None:
        """Why the rule cannot verify a tree, or None; `branches` tells whether a node may have more than one child."""
        # Siblings have no place in the formulas of these rules.
        if self.promise.chains_only and branches:
            return f"rule {self.name} verifies chains; this tree branches (use {PLAIN})"
        return None


THRESHOLDS = tuple(threshold.name for threshold in fields(Rule) if threshold.name != "name")
"""The names of all thresholds."""
