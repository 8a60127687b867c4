"""The seams of ranks: a sharded target, and sampling in step.

Each is a replaceable function. In every function `group` is the rank's door to the others, and all ranks call the
function together.
"""

from collections.abc import Callable
from dataclasses import dataclass

import torch
from torch import Tensor

from specverify.backends.engine.collectives.group import Group
from specverify.reference.parallel import rank_part


def partial(group: Group, rows: Tensor, weight: Tensor, bias: Tensor | None, name: str) -> Tensor:
    """The product of a projection whose input is sharded: o_proj and down_proj.

    Rank 0 alone adds the bias, since the sum over ranks would hold it as often as there are ranks. 16-bit parts are
    summed in float32.

    Args:
        group: The rank.
        rows: [B, T, inputs of this rank].
        weight: [outputs, inputs of this rank].
        bias: [outputs], or None.
        name: The name of the projection in the model; `last` stands for the number of the last layer.
    """
    product = torch.nn.functional.linear(rows, weight, bias if group.rank == 0 else None)
    wide_product = product if product.dtype == torch.float64 else product.float()
    return group.all_reduce(wide_product).to(product.dtype)


def embed_tokens(group: Group, tokens: Tensor, weight: Tensor, first: int) -> Tensor:
    """The embeddings [B, T, hidden] of `tokens`; of the ids from `first` on this rank holds `weight`."""
    is_local = (tokens >= first) & (tokens < first + len(weight))
    rows = torch.nn.functional.pad(weight, (0, 0, 0, 1))  # a row of zeros for all ids of other ranks
    local_rows = rows[torch.where(is_local, tokens - first, len(weight))]
    return group.all_reduce(local_rows)


def gather_logits(group: Group, logits: Tensor, vocab: int) -> Tensor:
    """The logits [B, T, vocab] of which this rank computed a part [B, T, its ids]; parts are padded to one width."""
    width = rank_part(vocab, 0, group.size)[1]
    parts = group.all_gather(torch.nn.functional.pad(logits, (0, width - logits.shape[-1])))
    return torch.cat(parts, -1)[..., :vocab]


def own_part(group: Group, tensor: Tensor, filler: float) -> tuple[Tensor, int]:
    """This rank's part of the last dimension of `tensor`, padded to the width of all, and its first index."""
    first, end = rank_part(tensor.shape[-1], group.rank, group.size)
    width = rank_part(tensor.shape[-1], 0, group.size)[1]
    return torch.nn.functional.pad(tensor[..., first:end], (0, width - (end - first)), value=filler), first


def argmax(group: Group, scores: Tensor) -> Tensor:
    """The id with the largest score in each row [..., vocabulary]; of equal scores the lowest id.

    Each rank names the best of its own part; the pairs of score and id are gathered. torch.max promises nothing on
    ties, so the lowest id is asked for twice: within a part and across them.
    """
    local_scores, first = own_part(group, scores, -torch.inf)
    value = local_scores.max(-1).values
    ids = first + (local_scores == value[..., None]).long().argmax(-1)
    values, names = torch.stack(group.all_gather(value)), torch.stack(group.all_gather(ids))
    return torch.where(values == values.max(0).values, names, scores.shape[-1]).min(0).values


def softmax(group: Group, logits: Tensor) -> Tensor:
    """The softmax of each row [..., vocabulary]: the largest logit, then the sum, each over all ranks."""
    local_logits, _ = own_part(group, logits, -torch.inf)
    top = group.all_reduce(local_logits.max(-1, keepdim=True).values, "max")
    powers = (local_logits - top).exp()
    shares = powers / group.all_reduce(powers.sum(-1, keepdim=True))
    return torch.cat(group.all_gather(shares), -1)[..., : logits.shape[-1]]


def draw(group: Group, coin: Tensor, weights: Tensor) -> tuple[Tensor, Tensor, Tensor]:
    """The token that each coin draws from `weights` [B, V] by inverse CDF over all parts; see `coins.inverse`.

    The coin is one of the whole vocabulary: each rank compares it with the edges of its own ids, which begin at the
    mass of the ranks before it, and the counts of edges below the coin are summed.
    """
    local_weights, _ = own_part(group, weights, 0.0)
    running = local_weights.cumsum(-1)
    # One after the other, so that the mass before a rank is, to the bit, the last running sum of the rank before it.
    mass_before = [torch.zeros_like(running[:, :1])]
    for mass in group.all_gather(running[:, -1:]):
        mass_before.append(mass_before[-1] + mass)
    total = mass_before[-1]
    below = mass_before[group.rank]
    # Edge 0 at ids of weight 0 becomes the edge before them in the running maximum: an empty interval.
    edges = torch.where(local_weights > 0, (below + running) / total, below / total).cummax(-1).values
    last = group.all_reduce(edges.max(-1, keepdim=True).values, "max")
    # The interval of the last id with any weight ends at 1, so that every coin draws a token.
    edges = torch.where(edges >= last, torch.ones_like(edges), edges)
    is_below = edges <= coin[:, None]
    token = group.all_reduce(is_below.sum(-1))
    low = group.all_reduce(torch.where(is_below, edges, 0.0).max(-1).values, "max")
    high = group.all_reduce(torch.where(is_below, 1.0, edges).min(-1).values, "min")
    return token, low, high


def own_coins(group: Group, uniforms: Tensor) -> Tensor:
    """The coins of this rank [B, coins]: those of the tape, the same on every rank."""
    return uniforms


def agree(group: Group, decision: Tensor, greedy: bool) -> Tensor:
    """The decision of rank 0, int64 [B, n]: accepted rows, then -1, and the token after them in the last column."""
    return group.broadcast(decision)


def lengths(group: Group, local_lengths: Tensor) -> Tensor:
    """The numbers of emitted tokens of all requests, int64 [requests], from those of this rank; 0 for all others."""
    return group.all_reduce(local_lengths)


@dataclass(frozen=True)
class RankSeams:
    """The functions of ranks; the defaults are the fault-free engine.

    Attributes:
        partial: The product of a projection whose input is sharded.
        embed_tokens: The embedding by parts of the vocabulary.
        gather_logits: From each rank's logits to those of the whole vocabulary.
        argmax: The arg-max over parts of the vocabulary.
        softmax: The softmax over parts of the vocabulary.
        draw: From a coin and weights over the vocabulary to a token.
        own_coins: From the coins of the tape to those of this rank.
        agree: From each rank's decision to the one that all follow.
        lengths: From the emitted lengths of this rank's requests to those of all requests, where they are spread.
    """

    partial: Callable[[Group, Tensor, Tensor, Tensor | None, str], Tensor] = partial
    embed_tokens: Callable[[Group, Tensor, Tensor, int], Tensor] = embed_tokens
    gather_logits: Callable[[Group, Tensor, int], Tensor] = gather_logits
    argmax: Callable[[Group, Tensor], Tensor] = argmax
    softmax: Callable[[Group, Tensor], Tensor] = softmax
    draw: Callable[[Group, Tensor, Tensor], tuple[Tensor, Tensor, Tensor]] = draw
    own_coins: Callable[[Group, Tensor], Tensor] = own_coins
    agree: Callable[[Group, Tensor, bool], Tensor] = agree
    lengths: Callable[[Group, Tensor], Tensor] = lengths


RANK_SEAMS = RankSeams()
"""The fault-free functions of ranks."""
