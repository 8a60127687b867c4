"""Medusa: heads that each guess one token ahead from the last hidden state.

The source is arXiv 2401.10774. The state s is that of the token before the pending root x_L. Head k, counted from 0, is
one residual block (or several in a row) and a matrix: `out (s + silu(W s + b))` scores the token x_{L+1+k}, that of a
node at depth k + 1. No head sees a token of the tree, so there is one law for each depth: the best token of a node
depends on its depth and its rank alone, and a static tree of best tokens is a part of a cartesian product. Medusa heads
keep no rows and no KV cache.

Where tokens are drawn, the children of each node are drawn from the law of their depth by coins of their own, and not
once for the whole depth. A rule is then told the law that the siblings were drawn from, as it is with any other draft,
and it is lossless here wherever it is lossless there.
"""

from collections.abc import Iterator
from dataclasses import dataclass, field, replace
from typing import ClassVar

from specverify.reference.architecture import Architecture, Model
from specverify.reference.draft.head import Head, head_schema
from specverify.reference.malformed import Malformed
from specverify.reference.rules import OMIT_DEFAULT
from specverify.reference.tree import RankTree, Tree

HEADS_PREFIX = "medusa_head"
"""The prefix of the heads in published checkpoints."""


@dataclass(frozen=True)
class Medusa(Head):
    """Medusa heads.

    Attributes:
        heads: The number of heads; the tree is no deeper.
        bias: Whether the residual block has a bias (published heads have one, vLLM's have none unless asked).
        shared_head: Whether the target's own head scores every block's output, in place of a matrix for each head.
        layers: The number of residual blocks of each head, one after the other.
    """

    TAG = "medusa"
    WORD = "Medusa"
    _FLAG = {"type": "boolean"}  # noqa: RUF012 - a part of SCHEMA
    SCHEMA = head_schema(
        {"layers": {"type": "integer", "minimum": 1, "maximum": 64}},
        heads={"type": "integer", "minimum": 1, "maximum": 64},
        bias=_FLAG,
        shared_head=_FLAG,
    )
    SHIFT: ClassVar[int] = 0
    vocabulary = ()

    heads: int
    bias: bool = True
    shared_head: bool = False
    layers: int = field(default=1, metadata=OMIT_DEFAULT, kw_only=True)

    def __post_init__(self) -> None:
        super().__post_init__()
        if self.heads < 1:
            raise Malformed("heads", f"{self.heads} is no number of heads")
        if self.layers < 1:
            raise Malformed("layers", f"{self.layers} is no number of blocks")
        deepest = self.height if self.expansion is None else self.expansion.depth
        if deepest > self.heads:
            raise Malformed("shape", f"a tree of depth {deepest} needs as many heads, and there are {self.heads}")

    def tensors(self, target: Architecture) -> dict[str, tuple[int, ...]]:
        """See `Head`."""
        hidden = target.hidden_size
        shapes: dict[str, tuple[int, ...]] = {}
        for head in range(self.heads):
            for layer in range(self.layers):
                shapes[f"{HEADS_PREFIX}.{head}.{layer}.linear.weight"] = (hidden, hidden)
                if self.bias:
                    shapes[f"{HEADS_PREFIX}.{head}.{layer}.linear.bias"] = (hidden,)
            if not self.shared_head:
                shapes[f"{HEADS_PREFIX}.{head}.{self.layers}.weight"] = (target.vocab_size, hidden)
        return shapes

    def by_token(self, target: Architecture) -> tuple[str, ...]:
        """See `Head`."""
        if self.shared_head:
            return ()
        return tuple(f"{HEADS_PREFIX}.{head}.{self.layers}.weight" for head in range(self.heads))

    def as_chain(self) -> "Medusa":
        """See `Static`; the chain is no deeper than there are heads."""
        height = min(max(self.height, 2), self.heads)
        return self.with_shapes((RankTree((0, *range(height)), (0,) * (height + 1)),))

    def with_fixed_tree(self, tree: Tree) -> "Medusa | None":
        """See `Draft`; None for a tree that is deeper than there are heads."""
        return super().with_fixed_tree(tree) if tree.height <= self.heads else None

    def simpler(self) -> Iterator["Medusa"]:
        """Heads with a smaller dynamic tree, without heads that the tree does not reach, and without each flag."""
        yield from super().simpler()
        if self.files is not None:
            return
        least = max(self.height if self.expansion is None else self.expansion.depth, 1)
        if self.heads > least:
            yield replace(self, heads=least)
        if self.bias:
            yield replace(self, bias=False)
        if self.shared_head:
            yield replace(self, shared_head=False)

    def check_target(self, target: Model) -> None:
        """See `Draft`; every Medusa head reads one state."""
        super().check_target(target)
        if self.reads.parts != 1:
            raise Malformed("reads", f"Medusa weights expect one hidden state, and the case gives the {self.reads}")
