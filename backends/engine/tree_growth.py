"""The growth of a drafted tree: names of children, scores, frontier, rerank, and trees by batch size."""

from bisect import bisect_left
from dataclasses import dataclass
from math import log

import torch
from torch import Tensor

from specverify.backends.engine.uploads import upload
from specverify.reference.draft_trees import Dispatch, Stopped
from specverify.reference.tree import RankTree


def log_probabilities(logits: Tensor) -> Tensor:
    """The log-probabilities of draft logits [V], in float64 for float64 and in float32 otherwise."""
    wide_logits = logits.double() if logits.dtype == torch.float64 else logits.float()
    return torch.log_softmax(wide_logits, -1)


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


class PathEnds:
    """The paths of one proposal that end by the draft's confidence; a planted fault is a subclass.

    Attributes:
        stop: The bound, and what is compared with it.
        parents: The parent of each node that has a token; the root is its own.
        own: The log-probability of the token of each such node at its parent; 0 for the root.
        scores: The sum of these along the path to each such node.
        survival: The sum of the log-probabilities of a confidence head along that path.
    """

    def __init__(self, stop: Stopped) -> None:
        self.stop = stop
        self.parents = {0: 0}
        self.own = {0: 0.0}
        self.scores = {0: 0.0}
        self.survival = {0: 0.0}

    def falls_short(self, above: float, own: float) -> bool:
        """Whether the last log-probability `own`, behind tokens of the log-probability `above`, ends a path."""
        return (above + own if self.stop.cumulated else own) < log(self.stop.stop_below)

    def ends_before(self, node: int, logits: Tensor, confidence: float) -> bool:
        """Whether `node`, whose children have the `logits` [draft vocabulary], gets none of them.

        A confidence head gives the next token the log-probability `confidence`, 0 without such a head.
        """
        if self.stop.when == "head":
            return self.falls_short(self.survival[node], confidence)
        if self.stop.when != "before":
            return False
        return self.falls_short(self.scores[node], float(log_probabilities(logits.detach()).max()))

    def add(self, node: int, children: list[int], logits: Tensor, ids: list[int], confidence: float) -> None:
        """Take in the `children` of `node`, whose draft ids `ids` were named by `logits`; see `ends_before`."""
        law = log_probabilities(logits.detach()).tolist()
        for child, draft_id in zip(children, ids, strict=True):
            self.parents[child] = node
            self.own[child] = law[draft_id]
            self.scores[child] = self.scores[node] + law[draft_id]
            self.survival[child] = self.survival[node] + confidence

    def goes_on(self, node: int) -> bool:
        """Whether `node` was reached, and may have children."""
        if node not in self.scores:
            return False
        return self.stop.when != "after" or not self.falls_short(self.scores[self.parents[node]], self.own[node])


class TreeGrowth:
    """The decisions on tokens and shape of a drafted tree; a planted fault is a subclass with another method."""

    def name_children(self, logits: Tensor, ranks: list[int], vocabulary: Tensor) -> tuple[list[int], list[int]]:
        """Return the draft id and the target id of the token at each rank; equal logits go to the lowest id.

        `logits` is [draft vocabulary]; `vocabulary` holds the target id of each draft id (EAGLE-3's d2t, as absolute
        ids).
        """
        if not ranks:
            return [], []
        order = torch.sort(
            logits, descending=True, stable=True
        ).indices.cpu()  # stable: equal logits stay in order of ids
        ids = order[torch.tensor(ranks)]
        return ids.tolist(), vocabulary.cpu()[ids].tolist()

    def cumulate(self, above: Tensor, logits: Tensor, ids: list[int], tokens: list[int]) -> Tensor:
        """The scores [k] of the children of a node: the node's own score plus each child's log-probability.

        `above` is the score of the node, a scalar, 0 for the root; `logits` are the node's, [draft vocabulary]; `ids`
        and `tokens` are the draft ids and the target ids of the children.
        """
        # Rounding may lift a log-probability above 0, and with it a child above its parent.
        return above + log_probabilities(logits)[upload(torch.tensor(ids), logits.device)].clamp(max=0)

    def frontier(self, scores: Tensor, most: int) -> list[int]:
        """The places of the `most` best of a level's `scores` [candidates], ascending; the first of equals wins."""
        return sorted(torch.sort(scores, descending=True, stable=True).indices[:most].tolist())

    def rerank(self, scores: Tensor, parents: list[int], most: int) -> list[int]:
        """The numbers of the `most` best candidates, ascending, so that parents come first; the lower of equals wins.

        The root, whose score and parent come first, is not among them.
        """
        best_nodes = torch.sort(scores[1:], descending=True, stable=True).indices[:most] + 1
        return sorted(best_nodes.tolist())

    def path_ends(self, stop: Stopped) -> PathEnds:
        """The ends of paths of a proposal that has just begun."""
        return PathEnds(stop)

    def dispatch(self, table: Dispatch, batches: list[int]) -> RankTree:
        """The tree of `table` for the last of `batches`; a batch beyond all bounds gets the last tree.

        `batches` holds the size of each batch with which the request was drafted; the last one is now.
        """
        row = bisect_left(table.up_to, batches[-1])
        return table.trees[min(row, len(table.trees) - 1)]
