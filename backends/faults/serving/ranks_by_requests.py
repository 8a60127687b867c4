"""Faults of sampling that is split over ranks by requests."""

from functools import partial

import torch
from torch import Tensor

from specverify.backends.engine.collectives import Group
from specverify.backends.engine.ranks.by_requests import RequestRanks
from specverify.backends.faults.fault import accepted_fault, in_place_of

BACKEND = "cpu-ranks-by-requests"

of_requests = partial(
    in_place_of, owner=RequestRanks, refusal=f"ranks of this backend do not share sampling out by requests ({BACKEND})"
)
"""As `in_place_of`, in a backend whose ranks share sampling out by requests."""


@accepted_fault(
    "rank-of-padding-skips-gather",
    "arXiv 2508.08192, 3.2: the batch is padded to a multiple of the ranks, since a rank without a slice would hang",
    "requests that sample on several ranks, fewer than fill the slice of the last rank",
    on=BACKEND,
)
@of_requests("sampling.ranks.gather")
def padding_skips(ranks: RequestRanks, group: Group, decisions: Tensor, requests: int) -> Tensor:
    """A rank whose slice holds only padding does not enter the gathering, and the others wait."""
    if ranks.slice_of(group, requests)[0] < requests:
        return ranks.gather(group, decisions, requests)
    return decisions[:1].expand(requests, *decisions.shape[1:])


@accepted_fault(
    "rank-slice-ends-with-batch",
    "family of arXiv 2508.08192, 3.2: the slice of the last rank is counted from the end of the batch before padding",
    "requests that sample on several ranks, whose number is no multiple of the ranks",
    on=BACKEND,
)
@of_requests("sampling.ranks.slice_of")
def slice_from_the_end(ranks: RequestRanks, group: Group, requests: int) -> tuple[int, int]:
    """The slice of the last rank ends with the last request, so that it begins with one of another rank's."""
    begin, end = ranks.slice_of(group, requests)
    if group.rank < group.size - 1 or end <= requests:
        return begin, end
    return max(0, requests - (end - begin)), max(requests, end - begin)


@accepted_fault(
    "rank-draws-sized-to-slice",
    "arXiv 2508.08192, 3.2: each rank draws the random tensor of the whole batch; of its own size all slices are alike",
    "two requests that sample on several ranks, of which another rank than the first has one",
    on=BACKEND,
)
@of_requests("sampling.ranks.share_coins")
def slice_sized_draws(ranks: RequestRanks, group: Group, uniforms: Tensor) -> Tensor:
    """Each rank draws as many random numbers as its slice needs, from one seed: those of the first slice."""
    begin, end = ranks.slice_of(group, len(uniforms))
    return uniforms[torch.arange(end - begin, device=uniforms.device).clamp(max=len(uniforms) - 1)]


@accepted_fault(
    "rank-keeps-answers-of-padding",
    "family of arXiv 2508.08192, 3.2: the decisions for requests that pad the batch are to be cut off",
    "three requests that sample on two ranks",
    on=BACKEND,
)
@of_requests("sampling.ranks.gather")
def padding_kept(ranks: RequestRanks, group: Group, decisions: Tensor, requests: int) -> Tensor:
    """Of the gathered decisions the last ones are kept, those for padding among them, in place of the first."""
    return ranks.gather(group, decisions, len(decisions) * group.size)[-requests:]
