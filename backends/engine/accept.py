"""Greedy tree acceptance, and the gathering of the logits that it reads.

The walk starts at the root and descends to the child whose token is the arg-max of the target at the current node. It
ends where no child has that token; the arg-max of the last node is the bonus token.
"""

import torch
from torch import Tensor

from specverify.backends.engine.lower_tree import TreeTensors
from specverify.backends.engine.uploads import upload


def retrieve(batch: list[TreeTensors], lane: int) -> Tensor:
    """The rows int64 [nodes] of the nodes of request `lane` among the rows of all requests, laid end to end.

    The rows of a request, those that pad its tree included, follow the rows of the requests before it (SGLang's
    `retrieve_index`, which indexes a flattened batch).
    """
    rows_before = sum(len(tensors.token) for tensors in batch[:lane])
    return batch[lane].retrieve_index + rows_before


def greedy_walk(tensors: TreeTensors, logits: Tensor) -> tuple[list[int], int]:
    """Return the accepted rows, root first, and the bonus token, which the target chooses after the last row.

    `logits` is [nodes, vocabulary]. Children are tried in row order along next_token / next_sibling, so the first of
    two siblings with the same token wins. An arg-max tie goes to the lowest id (SGLang's EAGLE-2 greedy verification).
    """
    choice, token, first, sibling = read_together(
        [logits.argmax(-1), tensors.token, tensors.next_token, tensors.next_sibling]
    )
    path = [0]
    candidate = first[0]
    while candidate:  # 0 stands for "no child" and "no sibling": the root is neither
        if token[candidate] == choice[path[-1]]:
            path.append(candidate)
            candidate = first[candidate]
        else:
            candidate = sibling[candidate]
    return path, choice[path[-1]]


def read_together(tensors: list[Tensor]) -> list[list[int]]:
    """The numbers of int64 tensors, with one transfer from each device: each transfer waits for it."""
    numbers: dict[torch.device, list[int]] = {
        device: torch.cat([tensor for tensor in tensors if tensor.device == device]).tolist()
        for device in {tensor.device for tensor in tensors}
    }
    rows = []
    for tensor in tensors:
        rest = numbers[tensor.device]
        rows.append(rest[: len(tensor)])
        numbers[tensor.device] = rest[len(tensor) :]
    return rows


def gather_rows(flat: Tensor, retrieve_index: Tensor) -> Tensor:
    """The logits of the tree's nodes [nodes, V], gathered from the rows [R, V] of the verify forward."""
    return flat[upload(retrieve_index, flat.device)]  # `retrieve_index` leaves padding rows out


def logprobs(logits: Tensor) -> Tensor:
    """Log-probabilities [nodes, V] of unprocessed logits, row by row: float64 for float64 logits, else float32."""
    return (logits if logits.dtype == torch.float64 else logits.float()).log_softmax(-1)
