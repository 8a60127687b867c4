"""The acceptance of a head on held-out texts, simulated exactly.

Greedy verification emits the target's own tokens whatever the draft is. So the accepted tokens of every step follow
from the target's continuation and the drafted trees alone, and no verification has to run.
"""

from dataclasses import dataclass, field, replace

import numpy as np
import torch
from torch import Tensor

from specverify.reference.draft import Ngram
from specverify.reference.draft_trees import Expansion
from specverify.reference.oracle.draft.ngram import followers
from specverify.training.heads.base import OpenedHead, TrainedHead

CHAIN = Expansion(1, 4, 5)
"""A chain of four tokens."""

TREE = Expansion(8, 6, 25)
"""A dynamic tree of 24 nodes below the root."""


@dataclass(frozen=True)
class HeldOutText:
    """A text that is never learned: a prompt and the target's greedy continuation.

    Attributes:
        tokens: int64 [T], prompt and continuation.
        prompt: The number of the prompt's tokens, at least 2.
        states: float32 [T, width]; the states that the head reads.
    """

    tokens: Tensor
    prompt: int
    states: Tensor


@dataclass
class Acceptance:
    """The accepted drafted tokens of each step of all texts."""

    steps: list[int] = field(default_factory=list)

    @property
    def mean(self) -> float:
        """Accepted drafted tokens per step."""
        return float(np.mean(self.steps)) if self.steps else 0.0

    @property
    def tokens_per_call(self) -> float:
        """Tokens that a call of the target emits: the accepted ones and its own."""
        return 1 + self.mean

    def by_depth(self, depth: int) -> list[float]:
        """The share of steps that accepted at least 1, 2, ... `depth` drafted tokens."""
        return [
            float(np.mean([length >= level for length in self.steps])) if self.steps else 0.0
            for level in range(1, depth + 1)
        ]


def head_acceptance(head: TrainedHead, texts: list[HeldOutText], tree: Expansion) -> Acceptance:
    """The acceptance of `head` with dynamic trees `tree`, over all texts in lockstep.

    Each tree grows as the words of `Expansion` say, down to the last level that the head can score. A step near the
    end of a text accepts no more than the text holds.
    """
    accepted = Acceptance()
    tree = _within_levels(tree, head.levels)
    device = head.embedding.device
    longest = max(len(text.tokens) for text in texts)
    tokens = torch.stack([_pad_rows(text.tokens, longest) for text in texts]).to(device)
    states = torch.stack([_pad_rows(text.states, longest) for text in texts]).to(device)
    opened, names = head.open(tokens, states), head.names()
    roots = [text.prompt - 1 for text in texts]
    # The last token of a text may be emitted, but nothing after it is known.
    ends = [len(text.tokens) - 1 for text in texts]
    while any(root < end for root, end in zip(roots, ends, strict=True)):
        root_rows = torch.tensor([min(root, end) for root, end in zip(roots, ends, strict=True)], device=device)
        paths = grow_paths(opened, names, root_rows, tree)
        for lane, (root, end) in enumerate(zip(roots, ends, strict=True)):
            if root < end:
                length = _accepted_length(paths[lane], tokens[lane, root + 1 : end + 1].tolist())
                accepted.steps.append(length)
                roots[lane] += length + 1
    return accepted


def _within_levels(tree: Expansion, levels: int | None) -> Expansion:
    """`tree` with at most so many levels below the root, and no more nodes than these have."""
    if levels is None or tree.depth <= levels:
        return tree
    candidates = tree.top_k + (levels - 1) * tree.top_k**2
    return replace(tree, depth=levels, total=min(tree.total, candidates + 1))


def ngram_acceptance(draft: Ngram, texts: list[HeldOutText]) -> Acceptance:
    """The acceptance of an n-gram lookup with the static tree of `draft`; its formulas are the oracle's."""
    accepted = Acceptance()
    for text in texts:
        tokens = tuple(text.tokens.tolist())
        root = text.prompt - 1
        while root < len(tokens) - 1:
            context = tokens[: root + 1]
            node = 0
            length = 0
            while root + length + 1 < len(tokens):
                followers_of_path = _continuations(draft.order, context, context + tokens[root + 1 : root + 1 + length])
                children = {
                    followers_of_path[draft.shape.rank[child]]: child
                    for child in draft.shape.children[node]
                    if draft.shape.rank[child] < len(followers_of_path)
                }
                if tokens[root + 1 + length] not in children:
                    break
                node = children[tokens[root + 1 + length]]
                length += 1
            accepted.steps.append(length)
            root += length + 1
    return accepted


def _continuations(order: int, context: tuple[int, ...], sequence: tuple[int, ...]) -> list[int]:
    """The tokens that followed the longest suffix of `sequence` that occurs in `context` with a successor."""
    for width in range(min(order - 1, len(sequence)), 0, -1):
        successors = followers(context, sequence[-width:])
        if successors:
            return successors
    return []


def _pad_rows(tensor: Tensor, rows: int) -> Tensor:
    return torch.cat([tensor, tensor.new_zeros(rows - len(tensor), *tensor.shape[1:])])


def grow_paths(opened: OpenedHead, names: Tensor, roots: Tensor, tree: Expansion) -> list[set[tuple[int, ...]]]:
    """For each text, the paths of target ids of the nodes of a dynamic tree.

    Args:
        opened: The head, opened on the texts.
        names: The target id of each id that the head scores, int64 [V].
        roots: The position of the pending root in each text, int64 [B].
        tree: The settings of the tree.
    """
    lanes, width = len(roots), min(tree.top_k, len(names))
    law = torch.log_softmax(opened.root(roots).float(), -1)[:, None]  # [B, F, V]
    above = torch.zeros(lanes, 1, device=law.device)
    paths: list[list[tuple[int, ...]]] = [[()] for _ in range(lanes)]
    scored_paths: list[list[tuple[float, tuple[int, ...]]]] = [[] for _ in range(lanes)]
    for depth in range(1, tree.depth + 1):
        # Of two children whose scores are equal to the last bit, either may stand first.
        best, ids = torch.topk(law, width, -1)
        scores = (above[..., None] + best.clamp(max=0)).flatten(1)  # [B, F * k]
        tokens = names[ids].flatten(1)
        parents = torch.arange(law.shape[1], device=law.device).repeat_interleave(width)
        listed = tokens.tolist()
        child_paths = [
            [(*paths[lane][int(parent)], token) for parent, token in zip(parents, listed[lane], strict=True)]
            for lane in range(lanes)
        ]
        for lane, row in enumerate(scores.tolist()):
            scored_paths[lane] += list(zip(row, child_paths[lane], strict=True))
        if depth == tree.depth:
            break
        kept_places = torch.sort(
            torch.sort(scores, dim=-1, descending=True, stable=True).indices[:, : tree.top_k], -1
        ).values
        paths = [[child_paths[lane][place] for place in row] for lane, row in enumerate(kept_places.tolist())]
        above = scores.gather(1, kept_places)
        law = torch.log_softmax(opened.level(tokens.gather(1, kept_places), parents[kept_places]).float(), -1)
    # Sorting is stable: of equal scores the lower number stays in front.
    return [{path for _, path in sorted(lane, key=lambda pair: -pair[0])[: tree.total - 1]} for lane in scored_paths]


def _accepted_length(paths: set[tuple[int, ...]], truth: list[int]) -> int:
    """The number of tokens of `truth` along which the tree has a path."""
    length = 0
    while length < len(truth) and tuple(truth[: length + 1]) in paths:
        length += 1
    return length
