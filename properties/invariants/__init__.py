"""All invariants, in the order in which reports list them.

The name of a file or folder here is the prefix of its invariants: `cache/` holds `cache.isolation`.
"""

from specverify.properties.invariants import (
    acceptance,
    attention,
    cache,
    draft,
    layers,
    lossless,
    pair,
    serving,
    structure,
)
from specverify.properties.verdict.invariant import Invariant

ALL: tuple[Invariant, ...] = (
    *structure.INVARIANTS,
    *attention.INVARIANTS,
    *acceptance.INVARIANTS,
    *cache.INVARIANTS,
    *draft.INVARIANTS,
    *lossless.INVARIANTS,
    *serving.INVARIANTS,
)

WITHOUT_ORACLE = frozenset(
    {
        "attention.page-permutation",
        *(f"acceptance.{name}" for name in ("greedy-walk", "support", "sampled-walk", "coins-once", "law-exact")),
        "acceptance.path-in-tree",
        *(f"acceptance.{name}" for name in ("proposal-consistent", "law-joint", "support-at-edges", "renamed-law")),
        "acceptance.streams-disjoint",
        *(f"cache.{name}" for name in ("isolation", "untouched-slots", "fast-equals-full", "stale-unreachable")),
        *(f"cache.{name}" for name in ("page-boundary", "allocator-conserves")),
        *(f"draft.{name}" for name in ("rollback", "vocabulary-map")),
        *(f"lossless.{name}" for name in ("completes", "stops", "state-isolated", "accounting", "deterministic")),
        *(f"lossless.{name}" for name in ("processors-per-node", "seeded", "takes-part", "grammar-per-node")),
        "lossless.ranks-agree",
        *(f"serving.{name}" for name in ("matcher-in-step", "frames-in-epoch", "writes-in-owned-pages")),
        *(f"serving.{name}" for name in ("no-placeholder", "steps-after-finish")),
    }
)
"""Names of the invariants of ALL that read the backend's own runs and no oracle."""

BESIDE_TOKENS: tuple[Invariant, ...] = (
    *pair.INVARIANTS,
    *(invariant for invariant in ALL if invariant.name in WITHOUT_ORACLE),
)
"""The invariants of a run whose reference shows tokens alone (`specverify.properties.verdict.peer`).

Those of the pair come first: they know a divergence from nondeterminism, and the first finding locates a failure.
"""

BESIDE_LAYERS: tuple[Invariant, ...] = (
    *layers.INVARIANTS,
    *(invariant for invariant in ALL if invariant.name in WITHOUT_ORACLE),
)
"""The invariants of a run whose oracle runs a part of the target's layers alone."""

EVERY_INVARIANT: tuple[Invariant, ...] = (*ALL, *pair.INVARIANTS, *layers.INVARIANTS)
"""ALL, and those that need such references."""
