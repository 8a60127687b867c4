"""The interface of a draft, its proposal, and the registry of the kinds of draft.

A draft proposes a tree for the tokens so far, and is then told which rows of the tree were kept.
"""

from abc import ABC, abstractmethod
from collections.abc import Callable
from dataclasses import dataclass
from typing import Protocol

import torch
from torch import Tensor

from specverify.backends.engine.draft.ngram_trie import NgramTrie
from specverify.backends.engine.kv.base import KvCache
from specverify.backends.engine.model.causal_lm import CausalLm
from specverify.backends.engine.model.head import HeadModel, MakeHead
from specverify.backends.engine.reach import Reach
from specverify.backends.engine.sampling.step import StepSampling
from specverify.backends.engine.step_seams import StepSeams
from specverify.backends.engine.uploads import upload
from specverify.reference.case import Case
from specverify.reference.draft.hidden import HiddenStates
from specverify.reference.tree import Tree


@dataclass(frozen=True)
class HeadRows:
    """Rows of committed tokens that a head has run.

    Attributes:
        first: The number of the first row.
        tokens: The token of each row.
        hidden: The target's hidden states of each row, [rows, width].
        adopted: The number of first rows that the head found in its cache when it was opened there.
        own_rows: Rows that hold states of the head's own.
    """

    first: int
    tokens: list[int]
    hidden: Tensor
    adopted: int = 0
    own_rows: tuple[int, ...] = ()


@dataclass(frozen=True)
class Proposal:
    """A proposed tree, with the scores and the proposal distributions of the draft.

    Attributes:
        tree: The tree; node 0 is the pending root.
        logits: [nodes, draft vocabulary]; NaN for nodes whose children were never ranked. None without scores.
        draft_ids: Each node's id in the draft's own vocabulary (0 for the root). None without a vocabulary of its own.
        proposal: [nodes, target vocabulary]; the distribution that the verifier takes each node's token to be drawn
            from. None if every token is deterministic, hence its distribution one-hot.
        head_rows: The committed tokens' rows that the draft's head has run since the step before; None without a head.
        confidence: [nodes]; the log-probability that a confidence head gives the children of each node, NaN where they
            were not scored. None without such a head.
    """

    tree: Tree
    logits: Tensor | None = None
    draft_ids: tuple[int, ...] | None = None
    proposal: Tensor | None = None
    head_rows: HeadRows | None = None
    confidence: Tensor | None = None


class Draft(Protocol):
    """A draft of one request, which proposes a tree for every step.

    Attributes:
        calls: Number of forwards of the draft's model so far.
        reads: The hidden states of the target that the draft's weights expect; None for a draft that reads none.
    """

    calls: int
    reads: HiddenStates | None

    @property
    def cache(self) -> KvCache | None:
        """The draft's own committed KV, or None for a draft without a model."""
        ...

    def propose(self, tokens: list[int], chance: StepSampling | None = None, hidden: Tensor | None = None) -> Proposal:
        """Propose a tree under the pending root.

        Args:
            tokens: Prompt and output so far; the last token is the root.
            chance: The step's sampling, None for a greedy request. It draws tokens, or gives the proposal
                distributions of tokens that the draft only ranked.
            hidden: The target's hidden states that the draft reads, [len(tokens) - 1, width], in the working dtype,
                one row for each committed token; None for a draft that reads none.
        """
        ...

    def settle(self, rows: list[int]) -> None:
        """End the step: keep `rows` of the tree (root first), and roll back all other speculated rows."""
        ...

    def resume(self, cache: KvCache | None) -> None:
        """Continue with `cache`, which replaces a cache that was evicted; None for a draft without a model."""
        ...

    def abandon(self) -> None:
        """Discard the proposal before it is verified; the next `propose` begins from the same state."""
        ...


class CachelessDraft:
    """A draft without a cache of its own: it has nothing to roll back, and its state holds committed tokens alone."""

    cache: KvCache | None = None
    calls = 0
    reads: HiddenStates | None = None

    def settle(self, rows: list[int]) -> None:
        """Do nothing: no speculated token entered the state."""

    def resume(self, cache: KvCache | None) -> None:
        """Do nothing: there is no cache."""

    def abandon(self) -> None:
        """Do nothing: the next `propose` begins from the same state."""


class OwnRows(ABC):
    """A draft whose cache may hold rows with states of a head's own.

    Attributes:
        own_rows: The rows of the cache that hold states of the head's own, in ascending order.
    """

    own_rows: list[int]

    @abstractmethod
    def follow(self, predecessor: "OwnRows") -> None:
        """Go on with the rows of `predecessor`, a draft of the same head, which this cache holds up to its length."""


@dataclass(frozen=True)
class Opening:
    """The arguments with which a draft is opened.

    Attributes:
        case: The request, written as a case without mates.
        model: The model or the head that the draft runs, or this rank's part; None for a draft without one.
        cache: The KV cache of that model.
        seams: The functions of which the engine is composed.
        target: The target, with whose weights a head may score; None where the engine does not run it.
        batch_size: Tells, whenever a tree is drafted, how many requests step together.
        shared: The trie that the request shares with others; None for a draft that learns from the request alone.
        draft_steps: Number of steps that the request has taken with an earlier draft of the same case.
    """

    case: Case
    model: CausalLm | HeadModel | None
    cache: KvCache | None
    seams: StepSeams
    target: CausalLm | None = None
    batch_size: Callable[[], int] = lambda: 1
    shared: NgramTrie | None = None
    draft_steps: int = 0


OPENERS: dict[str, Callable[[Opening], Draft]] = {}
"""For each tag, the function that opens a draft of that kind."""


def opens(tag: str) -> Callable[[Callable[[Opening], Draft]], Callable[[Opening], Draft]]:
    """Register the decorated function in OPENERS as the function that opens drafts with this tag."""

    def enter(function: Callable[[Opening], Draft]) -> Callable[[Opening], Draft]:
        OPENERS[tag] = function
        return function

    return enter


HEADS: dict[str, MakeHead] = {}
"""For the tag of each kind that runs a head, the function that makes the head of a case on its target."""


def heads(tag: str) -> Callable[[MakeHead], MakeHead]:
    """Register the decorated function in HEADS as the function that makes heads for drafts with this tag."""

    def enter(function: MakeHead) -> MakeHead:
        HEADS[tag] = function
        return function

    return enter


def inside_chunk(tree: Tree, position: int, reaches: list[Reach]) -> list[int]:
    """The rows of `tree` in the chunk of its root, which has position `position`; all rows if no layer has chunks.

    The length of a chunk is the shortest of any layer.
    """
    chunks = [reach.chunk for reach in reaches if reach.chunk]
    if not chunks:
        return list(range(len(tree)))
    positions_left = min(chunks) - position % min(chunks)  # positions left in the chunk, the root's own included
    return [row for row in range(len(tree)) if tree.depth[row] < positions_left]


def truncate_proposal(proposal: Proposal, rows: list[int]) -> Proposal:
    """`proposal` restricted to `rows`; the parent of each of these rows is among them."""
    tree = proposal.tree
    if len(rows) == len(tree):
        return proposal
    place = {row: i for i, row in enumerate(rows)}

    def restrict(table: Tensor | None) -> Tensor | None:
        return None if table is None else table[upload(torch.tensor(rows), table.device)]

    return Proposal(
        Tree(tuple(place[tree.parent[row]] for row in rows), tuple(tree.token[row] for row in rows)),
        restrict(proposal.logits),
        None if proposal.draft_ids is None else tuple(proposal.draft_ids[row] for row in rows),
        restrict(proposal.proposal),
        proposal.head_rows,
        restrict(proposal.confidence),
    )
