"""Pairs that no request can have, each with its reason: they count neither as met nor as missing.

A pair that is only never drawn does not belong here: it is a gap, and a run says so.
"""

from dataclasses import dataclass
from fnmatch import fnmatchcase

from specverify.properties.verdict.coverage.pairs import LABELS, Label, Pair
from specverify.reference.rules import RULES


@dataclass(frozen=True)
class Exclusion:
    """Labels that never meet in a request.

    Attributes:
        left, right: Patterns of labels, `axis value` with `*` for anything; a tuple means each of its patterns.
        reason: Why.
    """

    left: tuple[str, ...]
    right: tuple[str, ...]
    reason: str

    def holds(self, pair: Pair) -> bool:
        """Whether the exclusion is about a pair, in either order."""
        first, second = pair.first, pair.second
        return (_matches(first, self.left) and _matches(second, self.right)) or (
            _matches(second, self.left) and _matches(first, self.right)
        )


def _matches(label: Label, patterns: tuple[str, ...]) -> bool:
    return any(fnmatchcase(str(label), pattern) for pattern in patterns)


WITHOUT_MODEL = ("draft scripted", "draft ngram", "draft trie", "draft automaton")
CHAIN_RULES = tuple(f"rule {name}" for name, promise in RULES.items() if promise.chains_only)
WITHOUT_SCORES = (*WITHOUT_MODEL, "draft merged")
HEADS = ("draft block", "draft eagle1", "draft eagle3", "draft medusa", "draft mtp", "draft peagle")
SAMPLED = ("sampling sampled", "sampling temperature *", "rule *", "draws *")
PAGED = ("layout paged", "layout prefix")
BARE_ROWS = (
    "event without its draft beside drafted trees", "event launched without its draft",
    "event drafts again behind accepted and bare steps",
)  # fmt: skip
COMPANY = (
    "event in a batch",
    "event without its draft beside drafted trees",
    "event forked, *",
    "event twin of a fork",
)


def _all_except(prefix: str, *values: str) -> tuple[str, ...]:
    """The labels of an axis but those with these values."""
    return tuple(str(label) for label in LABELS if label.axis == prefix and label.value not in values)


def _classes_of(axis: str, unit: str) -> tuple[str, ...]:
    return tuple(str(label) for label in LABELS if label.axis == axis and label.value.endswith(unit))


BLOCKS_APART: dict[str, tuple[str, ...]] = {
    "window": ("chunk", "indexed columns", "latent attention", "recurrent state", "three axes"),
    "chunk": (
        "soft cap", "sinks", "indexed columns", "latent attention", "recurrent state", "three axes", "adapter", "ranks",
    ),
    "no rotary": (
        "soft cap", "sinks", "indexed columns", "latent attention", "recurrent state", "three axes", "4 ranks",
    ),
    "soft cap": (
        "sinks", "indexed columns", "latent attention", "experts", "recurrent state", "norms of queries and keys",
        "three axes",
    ),
    "sinks": (
        "indexed columns", "latent attention", "recurrent state", "norms of queries and keys", "three axes", "adapter",
        "ranks",
    ),
    "indexed columns": ("recurrent state", "norms of queries and keys", "three axes", "adapter", "ranks"),
    "latent attention": ("recurrent state", "norms of queries and keys", "three axes", "adapter", "ranks"),
    "experts": ("three axes", "adapter", "ranks"),
    "recurrent state": ("three axes", "adapter", "ranks"),
    "norms of queries and keys": ("three axes",),
    "three axes": ("adapter", "ranks"),
}  # fmt: skip
"""Blocks of targets that no family has together, by the model that cases are drawn on; a test compares the two."""

LABELS_OF_BLOCK = {
    "window": ("target window", "event tree crosses a window"),
    "chunk": ("target chunk", "event tree crosses a chunk", "layout's traits tree cut at a chunk"),
    "latent attention": ("target latent attention", "layout's traits latent cache"),
    "three axes": ("target three axes", "target images", "draft's traits sees the images"),
    "ranks": ("ranks 2 ranks", "ranks 4 ranks", "draft's ranks *"),
    "4 ranks": ("ranks 4 ranks",),
}
"""The labels that a request has only on a target with such a block, or with a target that can be shared out."""


def _labels_of_block(block: str) -> tuple[str, ...]:
    return LABELS_OF_BLOCK.get(block, (f"target {block}",))


PAGES_ALONE = (
    "layout's traits over-allocated", "layout's traits free pages in another order", "layout's traits first tier",
    "layout's traits second tier", "layout's traits states of pages recomputed",
    "layout's traits draft's pages of another size",
    "event accepted path crosses a page", "event prefix hit", "event brought back from the second tier",
)  # fmt: skip
BRANCHES_ALONE = (
    "layout's traits fast commit", "layout's traits commit by length", "layout's traits several branches",
)  # fmt: skip
TREES_BY_SCORES = ("tree dynamic tree", "tree dispatched tree", "tree stopped tree")
STORED = ("layout's traits columns in fp8", "layout's traits columns in int8", "layout's traits scales by row")
SHARED = ("draft's traits learns from other requests",)
TOGETHER = ("tree dispatched tree", "draft's traits learns from other requests")

EXCLUSIONS: tuple[Exclusion, ...] = (
    Exclusion(("sampling greedy",), SAMPLED, "a greedy request draws nothing"),
    Exclusion(("tree chain",), ("tree branches",), "a chain has no branches"),
    Exclusion(("tree up to 4 nodes",), ("tree four levels", "event accepts four"), "four levels have five nodes"),
    Exclusion(_classes_of("tree", "nodes"), _classes_of("tree", "nodes"), "a largest tree has one size"),
    Exclusion(CHAIN_RULES, ("tree branches",), "the rule verifies chains alone"),
    Exclusion(WITHOUT_MODEL, _all_except("draft's traits", "learns from other requests"), "such a draft has no model"),
    Exclusion(_all_except("draft", "trie"), SHARED, "tries alone learn, and none that is joined with others"),
    Exclusion(SHARED, SAMPLED, "a request that samples shares no trie with others"),
    Exclusion(("draft medusa", "draft merged", *WITHOUT_MODEL), ("layout's traits draft's pages of another size",),
              "such a draft has no cache"),
    Exclusion(WITHOUT_MODEL, ("draws *",), "such a draft has no law to draw from"),
    Exclusion(("draft model",), ("draft's traits reads hidden states",), "a draft model reads tokens"),
    Exclusion(("draft model", "draft merged", "draft's traits draft of another family",
               "draft's traits draft with a recurrent state", *WITHOUT_MODEL, *SHARED),
              ("layout's traits states of pages recomputed",), "such a draft reads no hidden states"),
    Exclusion(HEADS, ("draft's traits draft of another family",), "a head has the target's own sizes"),
    Exclusion(("draft's traits draft with a recurrent state",),
              (*HEADS, "draft's traits reads hidden states", "draft's traits draft of several layers"),
              "a head's layers are of attention"),
    Exclusion(("draft's traits draft with a recurrent state",), ("draft's ranks draft shared out among ranks",),
              "such a model has no parts"),
    Exclusion(("draft's traits sees the images",),
              ("draft's traits draft of another family", "draft's traits draft with a recurrent state"),
              "one family alone has images"),
    Exclusion(("draft block", "draft medusa", "draft peagle"), ("draft's traits sees the images",),
              "such a head reads tokens, or none"),
    Exclusion(_all_except("layout", "branch"), ("layout's traits fast commit", "layout's traits commit by length",
              "layout's traits several branches"), "only branch caches commit so"),
    Exclusion(_all_except("layout", "paged", "prefix"), ("layout's traits over-allocated",
              "layout's traits free pages in another order", "layout's traits draft's pages of another size",
              "event accepted path crosses a page"), "without pages"),
    Exclusion(_all_except("layout", "prefix"), ("layout's traits first tier", "layout's traits second tier",
              "layout's traits states of pages recomputed", "event prefix hit",
              "event brought back from the second tier"), "no prefixes are kept"),
    Exclusion(("layout's traits fast commit",), ("layout's traits commit by length",), "a layout has one commit"),
    Exclusion(("layout's traits cells of *",), ("layout's traits cells of *",), "cells are filled with one value"),
    Exclusion(("company up to 1 requests",), (*COMPANY, "draft's traits learns from other requests",
              "layout's traits prompts filled beside trees"), "a session of one request"),
    *(
        Exclusion(_labels_of_block(block), tuple(label for other in apart for label in _labels_of_block(other)),
                  "no family has both")
        for block, apart in BLOCKS_APART.items()
    ),
    Exclusion(STORED, ("layout sliding", "layout's traits latent cache", "target indexed columns", "ranks *",
              "draft's ranks *"), "such columns are stored as they are"),
    Exclusion(STORED[:1], STORED[1:2], "columns are stored in one dtype"),
    Exclusion(BRANCHES_ALONE, PAGES_ALONE, "branch caches have no pages"),
    Exclusion(("ranks 2 ranks", "ranks 4 ranks", "draft's ranks *"),
              ("target adapter", "sampling log-probabilities of the prompt"), "one rank alone has them"),
    Exclusion(("ranks requests shared out among ranks",),
              (*TOGETHER, "event launched step", "event launched without its draft",
               "event result of a launch skipped"),
              "such a step follows from requests of other ranks"),
    Exclusion(("ranks requests shared out among ranks",), ("draft's ranks *",),
              "such requests take their drafts along"),
    Exclusion((*WITHOUT_SCORES, "draft medusa", "draft block"), ("draft's ranks draft shared out among ranks",),
              "such a draft has no parts"),
    Exclusion(("event switches drafts, then steps",), SAMPLED, "a request that samples keeps its draft"),
    Exclusion(("event switches drafts, then steps", "event forked, then steps", "event waits for room, then steps"),
              ("company up to 1 requests",),
              "a session of one request"),
    Exclusion(TOGETHER, (*BARE_ROWS, "event step without a draft", "event launched step",
              "event result of a launch skipped"),
              "such a draft needs the texts or the batches of all steps"),
    Exclusion(TREES_BY_SCORES, (*WITHOUT_SCORES, *SHARED), "such a draft has no scores"),
    Exclusion(TREES_BY_SCORES, TREES_BY_SCORES, "a draft has one kind of tree"),
    Exclusion(("tree dynamic tree",), ("draws without-replacement", "draws with-replacement"),
              "the tokens of a dynamic tree are not drawn"),
    Exclusion(("draft merged",), (*_all_except("draft's traits", "learns from other requests"), "draws *"),
              "what is merged has no model and no law"),
    Exclusion(("sampling temperature below 0.5",), ("sampling temperature above 1.5",), "one request, one temperature"),
    Exclusion(("draft's traits reads hidden states", "draft's traits draft of several layers"),
              ("draft's traits draft of another family",), "a head has the target's own sizes"),
    Exclusion(("draft model", "draft medusa"), ("draft's traits draft of several layers",), "a head's are counted"),
    Exclusion(("draft automaton",), ("tree branches", "event path leaves the row order"), "its tree is a chain"),
    Exclusion(("draft eagle1", "draft medusa", "draft mtp"), ("draft's traits vocabulary of its own",),
              "such a head names every id"),
    Exclusion(SHARED, _all_except("draft's traits", "learns from other requests"), "tries alone learn"),
    Exclusion(("sampling bad words", "sampling min_tokens"),
              ("grammar *", "grammar's beginning *", "event closes its grammar"), "they may ban what a grammar leaves"),
)  # fmt: skip
"""Every reason for which two labels never meet."""


def is_impossible(pair: Pair) -> bool:
    """Whether no request can have the pair."""
    return any(exclusion.holds(pair) for exclusion in EXCLUSIONS)
