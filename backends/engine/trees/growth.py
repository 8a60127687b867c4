"""The growth of a dynamic tree: candidate scores, frontier and rerank."""

from collections.abc import Callable
from dataclasses import dataclass

import torch
from torch import Tensor

from specverify.backends.engine.trees.dispatch import dispatch
from specverify.reference.draft_trees import Dispatch
from specverify.reference.tree import RankTree


def log_probabilities(logits: Tensor) -> Tensor:
    """The log-probabilities of draft logits [V], in float64 for float64 and in float32 otherwise."""
    wide_logits = logits.double() if logits.dtype == torch.float64 else logits.float()
    return torch.log_softmax(wide_logits, -1)


def cumulate(above: Tensor, logits: Tensor, ids: list[int], tokens: list[int]) -> Tensor:
    """The scores [k] of the children `ids` of a node: the node's own score plus each child's log-probability.

    Args:
        above: The score of the node, a scalar; 0 for the root.
        logits: The node's scores, [draft vocabulary].
        ids: The draft ids of the children.
        tokens: The target ids of the children.
    """
    # Rounding may lift a log-probability above 0, and with it a child above its parent.
    return above + log_probabilities(logits)[ids].clamp(max=0)


def frontier(scores: Tensor, most: int) -> list[int]:
    """The places of the `most` best of `scores` [candidates] of a level, ascending; the first of equal scores wins."""
    return sorted(torch.sort(scores, descending=True, stable=True).indices[:most].tolist())


def rerank(scores: Tensor, parents: list[int], most: int) -> list[int]:
    """The numbers of the `most` best candidates, ascending, so that parents come first; the lower of equal scores wins.

    Args:
        scores: The score of each candidate, the root's first.
        parents: The number of each candidate's parent.
        most: Number of candidates to keep, beside the root.
    """
    best_nodes = torch.sort(scores[1:], descending=True, stable=True).indices[:most] + 1
    return sorted(best_nodes.tolist())


@dataclass(frozen=True)
class GrowthSeams:
    """The functions that decide the shape of a drafted tree; the defaults are the fault-free engine.

    Attributes:
        cumulate: From a node's score and its draft logits to the scores of its children.
        frontier: From the scores of a level to the candidates that are expanded.
        rerank: From the scores of all candidates to those that the tree holds.
        dispatch: From a table of static trees and the batches so far to the tree of this step.
    """

    cumulate: Callable[[Tensor, Tensor, list[int], list[int]], Tensor] = cumulate
    frontier: Callable[[Tensor, int], list[int]] = frontier
    rerank: Callable[[Tensor, list[int], int], list[int]] = rerank
    dispatch: Callable[[Dispatch, list[int]], RankTree] = dispatch


@dataclass
class Candidates:
    """The candidates of a tree under construction, by number; candidate 0 is the root.

    Attributes:
        parent, token, draft_id: The parent's number, the target id and the draft id of each candidate.
        scores: The score of each candidate, scalars on the device of the draft's logits.
        logits: The draft's scores of each expanded candidate, [draft vocabulary].
    """

    parent: list[int]
    token: list[int]
    draft_id: list[int]
    scores: list[Tensor]
    logits: dict[int, Tensor]
