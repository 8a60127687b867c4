"""Faults of the greedy walk over a tree, and of the rows of logits that it reads."""

from dataclasses import replace

import torch
from torch import Tensor

from specverify.backends.engine.draft.base import Draft
from specverify.backends.engine.kv.arena import CacheLease
from specverify.backends.engine.lower_tree import TreeTensors
from specverify.backends.engine.model.causal_lm import CausalLm
from specverify.backends.engine.request import Request
from specverify.backends.engine.seams import Seams
from specverify.backends.faults.fault import accepted_fault, in_place_of, scored_fault
from specverify.reference.case import Case


@accepted_fault(
    "first-draft-token-unverified",
    "catalogue BZ-139: first draft token committed without verification",
    "a first child that the target does not choose",
)
@in_place_of("walk")
def first_unverified(seams: Seams, tensors: TreeTensors, logits: Tensor) -> tuple[list[int], int]:
    """The first drafted token is committed without verification."""
    # `next_token` is the first child; 0 means that there is none.
    first = int(tensors.next_token[0])
    path, bonus = seams.walk(tensors, logits)
    if not first or path[1:2] == [first]:
        return path, bonus
    return [0, first], int(logits[first].argmax())


@accepted_fault(
    "token-zero-taken-for-padding",
    "catalogue BZ-004: path padding encoded as token id 0",
    "an accepted token with id 0",
)
@in_place_of("walk")
def zero_is_padding(seams: Seams, tensors: TreeTensors, logits: Tensor) -> tuple[list[int], int]:
    """Token id 0 is taken for padding of a candidate path, so a right token 0 is rejected."""
    path, bonus = seams.walk(tensors, logits)
    kept_rows = [0]
    for row in path[1:]:
        if int(tensors.token[row]) == 0:
            return kept_rows, int(logits[kept_rows[-1]].argmax())
        kept_rows.append(row)
    return path, bonus


@accepted_fault("bonus-from-rejected-row", "catalogue BZ-129: rejection handled one iteration late", "a rejected child")
@in_place_of("walk")
def bonus_one_row_late(seams: Seams, tensors: TreeTensors, logits: Tensor) -> tuple[list[int], int]:
    """Rejection is handled one row late: the next token comes from the rejected row."""
    path, bonus = seams.walk(tensors, logits)
    rejected_row = int(tensors.next_token[path[-1]])
    return (path, int(logits[rejected_row].argmax())) if rejected_row else (path, bonus)


@accepted_fault(
    "bonus-discarded-after-full-acceptance",
    "catalogue BZ-140: bonus token discarded after full acceptance",
    "a path accepted to its leaf",
)
@in_place_of("walk")
def bonus_discarded(seams: Seams, tensors: TreeTensors, logits: Tensor) -> tuple[list[int], int]:
    """After full acceptance there is no bonus token.

    Where the walk ends at a leaf, the last accepted token stands in for the bonus and ends the block.
    """
    path, bonus = seams.walk(tensors, logits)
    if len(path) > 1 and not int(tensors.next_token[path[-1]]):
        return path[:-1], int(tensors.token[path[-1]])
    return path, bonus


@accepted_fault(
    "sampled-request-by-arg-max",
    "a sampling configuration that does not reach the speculative path: its kernels are right and never called",
    "a temperature above 0, and a law that is not sure of its best token",
)
@in_place_of("request")
class ArgMax(Request):
    """A request that samples is decoded by arg-max, its temperature lost on the way to the sampler.

    The sampling kernels stay right, but are never called.
    """

    def __init__(self, case: Case, target: CausalLm, lease: CacheLease, draft: Draft, seams: Seams) -> None:
        greedy = replace(case, sampling=replace(case.sampling, temperature=0.0))
        super().__init__(greedy, target, lease, draft, seams)


@scored_fault(
    "logit-rows-shifted",
    "catalogue BZ-159: logprob rows of accepted tokens selected from wrong positions",
    "a tree of two nodes",
)
@in_place_of("score")
def rows_shifted(seams: Seams, flat: Tensor, retrieve_index: Tensor) -> Tensor:
    """The logits of accepted tokens are selected from the wrong rows."""
    return seams.score(flat, (retrieve_index - 1).clamp(min=0))


@scored_fault("softmax-twice", "catalogue BZ-165: softmax applied twice across upstream versions", "any step")
@in_place_of("score")
def softmax_on_the_way(seams: Seams, flat: Tensor, retrieve_index: Tensor) -> Tensor:
    """Softmax is applied where logits are promised, so the consumer applies it a second time."""
    return torch.softmax(seams.score(flat, retrieve_index), -1)
