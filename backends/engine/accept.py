"""Greedy tree acceptance: walk from the root along children that the target itself would have chosen."""

import torch
from torch import Tensor

from backends.engine.lower_tree import TreeTensors


def greedy_walk(tensors: TreeTensors, logits: Tensor) -> tuple[list[int], int]:
    """Return the accepted rows, root first, and the bonus token that the target chooses after the last of them.

    `logits` is [nodes, vocabulary]. Children are tried in row order along next_token / next_sibling, so the first of
    two equal siblings wins; an arg-max tie goes to the lowest id (SGLang's EAGLE-2 greedy verification).
    """
    choice = logits.argmax(-1).tolist()
    token, first, sibling = tensors.token.tolist(), tensors.next_token.tolist(), tensors.next_sibling.tolist()
    path = [0]
    candidate = first[0]
    while candidate:
        if token[candidate] == choice[path[-1]]:
            path.append(candidate)
            candidate = first[candidate]
        else:
            candidate = sibling[candidate]
    return path, choice[path[-1]]


def gather_rows(flat: Tensor, retrieve_index: Tensor) -> Tensor:
    """Logits of the tree's nodes [nodes, V], out of the flat rows [R, V] of the verify forward."""
    return flat[retrieve_index.to(flat.device)]


def logprobs(logits: Tensor) -> Tensor:
    """Log-probabilities [nodes, V] of unprocessed logits, each row by itself, in float32 or float64."""
    return (logits if logits.dtype == torch.float64 else logits.float()).log_softmax(-1)
