"""World: tables of logits in place of models, so that a round has an exact law.

Target and draft are tables, so that drafting and acceptance of one round can be enumerated.
"""

from dataclasses import dataclass, field, replace

import numpy as np

from specverify.reference.malformed import Malformed
from specverify.reference.sampling import Sampling, Stops
from specverify.reference.trace import Array
from specverify.reference.tree import Shape, Tree


@dataclass(frozen=True, eq=False)
class World:
    """The logits of target and draft after every path below the root; -inf is probability 0.

    After the path of tokens t1..td below the root, target and draft s use row `row(t1..td)` of their tables, so any two
    contexts have rows of their own while there are rows enough.

    Attributes:
        shape: The tree to draft; a node's children are named in row order.
        target: Logits [rows, vocabulary].
        drafts: Logits [drafts, rows, vocabulary]; the k-th child of a node is named by draft `k % drafts`.
        sampling: Rule, draws, temperature and processing; its tape and seed are not used.
        prompt: Token ids so far, the root last.
        stops: Its eos and stop tokens matter to min_tokens alone: blocks are not cut.
        dtype: float64 or float32, in which an engine is to compute.
        tokens: The drafted tokens where the tree is given instead of drafted (the root's first); the draft tables are
            then ignored, and each token counts as surely proposed.
        ranks: Number of ranks over which an engine shards the vocabulary of the target.
    """

    shape: Shape
    target: Array
    drafts: Array
    sampling: Sampling
    prompt: tuple[int, ...] = (0,)
    stops: Stops = field(default=Stops())
    dtype: str = "float64"
    tokens: tuple[int, ...] | None = None
    ranks: int = 1

    def __post_init__(self) -> None:
        if self.target.ndim != 2 or self.drafts.ndim != 3 or self.drafts.shape[1:] != self.target.shape:
            raise Malformed("drafts", f"{self.drafts.shape} does not fit target rows {self.target.shape}")
        for name, table in (("target", self.target), ("drafts", self.drafts)):
            if np.isnan(table).any() or np.isposinf(table).any():
                raise Malformed(name, "a logit is NaN or infinite")
            # -inf is probability 0, so a row needs one finite logit.
            if np.isneginf(table).all(axis=-1).any():
                raise Malformed(name, "a row gives no token any probability")
        if self.sampling.greedy:
            raise Malformed("sampling.temperature", "a greedy world has no law (temperature above 0)")
        refused = self.sampling.rule.refuses(self.shape.branches)
        if refused is not None:
            raise Malformed("sampling.rule", refused)
        if not self.prompt:
            raise Malformed("prompt", "empty; the root is its last token")
        if self.tokens is not None:
            Tree(self.shape.parent, self.tokens)

    @property
    def vocab(self) -> int:
        """Size of the vocabulary."""
        return int(self.target.shape[1])

    def row(self, path: tuple[int, ...]) -> int:
        """The row of the tables after `path`, a tuple of tokens below the root."""
        row = 0
        for token in path:
            # Digits from 1 to vocab number every path differently; only the modulus lets two paths share a row.
            row = (row * self.vocab + token + 1) % len(self.target)
        return row

    def with_sampling(self, sampling: Sampling) -> "World":
        """The same tables under other settings."""
        return replace(self, sampling=sampling)


@dataclass(frozen=True, eq=False)
class GivenTree:
    """One verification of a fixed tree whose laws are given, so that acceptance alone is left to decide.

    Attributes:
        tree: The drafted tree.
        target: The target's law at each node, float [nodes, vocabulary].
        proposal: The law from which each node's token was drawn, before siblings were removed, [nodes, vocabulary];
            row 0 is not used.
        sampling: Rule and draws; temperature and processing have been applied already.
        ranks: As in `World`.
    """

    tree: Tree
    target: Array
    proposal: Array
    sampling: Sampling
    ranks: int = 1

    def __post_init__(self) -> None:
        shape = (len(self.tree), self.target.shape[-1])
        for name in ("target", "proposal"):
            table = getattr(self, name)
            if table.shape != shape:
                raise Malformed(name, f"has shape {table.shape} where {shape} is needed")
            if np.isnan(table).any() or (table < 0).any():
                raise Malformed(name, "holds a negative number or NaN")
            # The boolean slices off row 0 of `proposal`, the root's, which no rule reads.
            errors = np.abs(table[name == "proposal" :].sum(axis=1) - 1.0)
            if (errors > 1e-6).any():
                row = int(errors.argmax()) + (name == "proposal")
                raise Malformed(f"{name}[{row}]", f"sums to {table[row].sum():.9g}, not to 1")
        refused = self.sampling.rule.refuses(self.tree.branches)
        if refused is not None:
            raise Malformed("sampling.rule", refused)


@dataclass(frozen=True, eq=False)
class Blocks:
    """The blocks that a batch of B requests emitted in one round.

    Attributes:
        path: Accepted rows, root first, then -1: int [B, height + 1].
        tokens: Emitted tokens, then -1: int [B, height + 1].
        low: For each coin of the tape, the lower end, inclusive, of the interval in which the coin may move without
            changing a decision while the other coins stay: float64 [B, coins]; None where the backend cannot tell.
        high: The upper ends of the same intervals, exclusive.
    """

    path: Array
    tokens: Array
    low: Array | None = None
    high: Array | None = None
