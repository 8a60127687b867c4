"""Group: one rank's door to the collectives that it shares with the others, and the seams of ranks.

A group keeps the sequence of its collectives, so that the sequences of all ranks can be compared. `RankSeams` says how
a target is sharded, and how sampling stays in step.
"""

from abc import ABC, abstractmethod
from collections.abc import Callable

import torch
from torch import Tensor

from specverify.reference.parallel import PART, rank_part

REDUCTIONS: dict[str, Callable[[Tensor, Tensor], Tensor]] = {
    "sum": torch.add,
    "max": torch.maximum,
    "min": torch.minimum,
}
"""The reductions of `Group.all_reduce`."""


class OutOfStep(RuntimeError):
    """Ranks entered different collectives, or one ended while another waited; the message names them."""


class Group(ABC):
    """The collectives of rank `rank` of `size`.

    Attributes:
        calls: The collectives so far in order, each as its name and the shape of this rank's tensor. Those of the
            draft's ranks stand among them, and begin with PART.
        whole: The group of all ranks; this one where it is no part of another.
    """

    def __init__(self, rank: int, size: int, whole: "Group | None" = None) -> None:
        self.rank = rank
        self.size = size
        self.whole = whole or self
        self.calls: list[str] = [] if whole is None else whole.calls

    @abstractmethod
    def part(self, size: int) -> "Group":
        """The group of the first `size` ranks; all ranks ask for it together, and the others may not use it."""

    def all_reduce(self, tensor: Tensor, operation: str = "sum") -> Tensor:
        """The sum, largest or smallest of the ranks' tensors, element by element; the same bits on every rank."""
        return self._reduce(self._log_call(f"all_reduce {operation}", tensor), tensor, operation)

    def all_gather(self, tensor: Tensor) -> list[Tensor]:
        """The tensors of all ranks, which have one shape, in the order of ranks; they are not to be written to."""
        return self._gather(self._log_call("all_gather", tensor), tensor)

    def broadcast(self, tensor: Tensor) -> Tensor:
        """The tensor of rank 0; those of other ranks give the shape alone."""
        return self._broadcast(self._log_call("broadcast", tensor), tensor)

    def _log_call(self, name: str, tensor: Tensor) -> str:
        prefix = "" if self.whole is self else PART
        self.calls.append(f"{prefix}{name} {list(tensor.shape)}")
        return self.calls[-1]

    @abstractmethod
    def _reduce(self, call: str, tensor: Tensor, operation: str) -> Tensor: ...

    @abstractmethod
    def _gather(self, call: str, tensor: Tensor) -> list[Tensor]: ...

    @abstractmethod
    def _broadcast(self, call: str, tensor: Tensor) -> Tensor: ...


def out_of_step_message(calls: list[str]) -> str | None:
    """Which rank entered another collective than rank 0, in one line; None if all entered the same."""
    for rank, call in enumerate(calls):
        if call != calls[0]:
            return f"rank {rank} is out of step: it enters {call}, and rank 0 enters {calls[0]}"
    return None


def own_part(group: Group, tensor: Tensor, filler: float) -> tuple[Tensor, int]:
    """This rank's part of the last dimension of `tensor`, padded to the width of all, and its first index."""
    first, end = rank_part(tensor.shape[-1], group.rank, group.size)
    width = rank_part(tensor.shape[-1], 0, group.size)[1]
    return torch.nn.functional.pad(tensor[..., first:end], (0, width - (end - first)), value=filler), first


class RankSeams:
    """The work of a rank on its part, and the decisions of all ranks; a planted fault is a subclass.

    Sampling is split by the vocabulary (`ranks/by_requests.py` has another split). In every method `group` is the
    rank's door to the others, and all ranks call the method together.
    """

    def partial(self, group: Group, rows: Tensor, weight: Tensor, bias: Tensor | None, name: str) -> Tensor:
        """The product of a projection whose input is sharded: o_proj and down_proj.

        Rank 0 alone adds the bias, since the sum over ranks would hold it as often as there are ranks. 16-bit parts are
        summed in float32. `rows` is [B, T, inputs of this rank], `weight` [outputs, inputs of this rank]. `name` is the
        projection's in the model; `last` stands for the number of the last layer.
        """
        product = torch.nn.functional.linear(rows, weight, bias if group.rank == 0 else None)
        wide_product = product if product.dtype == torch.float64 else product.float()
        return group.all_reduce(wide_product).to(product.dtype)

    def embed_tokens(self, group: Group, tokens: Tensor, weight: Tensor, first: int) -> Tensor:
        """The embeddings [B, T, hidden] of `tokens`; of the ids from `first` on this rank holds `weight`."""
        is_local = (tokens >= first) & (tokens < first + len(weight))
        rows = torch.nn.functional.pad(weight, (0, 0, 0, 1))  # a row of zeros for all ids of other ranks
        local_rows = rows[torch.where(is_local, tokens - first, len(weight))]
        return group.all_reduce(local_rows)

    def gather_logits(self, group: Group, logits: Tensor, vocab: int) -> Tensor:
        """The logits [B, T, vocab] of which this rank computed a part [B, T, its ids], padded to one width."""
        width = rank_part(vocab, 0, group.size)[1]
        parts = group.all_gather(torch.nn.functional.pad(logits, (0, width - logits.shape[-1])))
        return torch.cat(parts, -1)[..., :vocab]

    def argmax(self, group: Group, scores: Tensor) -> Tensor:
        """The id with the largest score in each row [..., vocabulary]; of equal scores the lowest id.

        Each rank names the best of its own part; the pairs of score and id are gathered. torch.max promises nothing on
        ties, so the lowest id is asked for twice: within a part and across them.
        """
        local_scores, first = own_part(group, scores, -torch.inf)
        value = local_scores.max(-1).values
        ids = first + (local_scores == value[..., None]).long().argmax(-1)
        values, names = torch.stack(group.all_gather(value)), torch.stack(group.all_gather(ids))
        return torch.where(values == values.max(0).values, names, scores.shape[-1]).min(0).values

    def softmax(self, group: Group, logits: Tensor) -> Tensor:
        """The softmax of each row [..., vocabulary]: the largest logit, then the sum, each over all ranks."""
        local_logits, _ = own_part(group, logits, -torch.inf)
        top = group.all_reduce(local_logits.max(-1, keepdim=True).values, "max")
        powers = (local_logits - top).exp()
        shares = powers / group.all_reduce(powers.sum(-1, keepdim=True))
        return torch.cat(group.all_gather(shares), -1)[..., : logits.shape[-1]]

    def draw(self, group: Group, coin: Tensor, weights: Tensor) -> tuple[Tensor, Tensor, Tensor]:
        """The token that each coin draws from `weights` [B, V] by inverse CDF over all parts; see `coins.inverse`.

        The coin is one of the whole vocabulary: each rank compares it with the edges of its own ids, which begin at the
        mass of the ranks before it, and the counts of edges below the coin are summed.
        """
        local_weights, _ = own_part(group, weights, 0.0)
        running = local_weights.cumsum(-1)
        # One by one, so that the mass before a rank is, to the bit, the last running sum of the rank before it.
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

    def own_coins(self, group: Group, uniforms: Tensor) -> Tensor:
        """The coins of this rank [B, coins]: those of the tape, the same on every rank."""
        return uniforms

    def agree(self, group: Group, decision: Tensor, greedy: bool) -> Tensor:
        """The decision of rank 0, int64 [B, n]: accepted rows, then -1, and the token after them in the last column."""
        return group.broadcast(decision)

    def gather_states(self, group: Group, states: Tensor, rows: int) -> Tensor:
        """The hidden states [rows, width] of all rows of a forward, of which this rank has a part [its rows, width].

        The parts are padded to one length, as ranks hold the residual stream in sequence parallelism.
        """
        return torch.cat(group.all_gather(states))[:rows]

    def send_tree(self, group: Group, drafted: Tensor) -> Tensor:
        """The tree that rank 0 has drafted, int64 [3, 1 + most nodes]; see `ranks.draft_ranks.TreeMessage`."""
        return group.broadcast(drafted)

    def send_laws(self, group: Group, laws: Tensor) -> Tensor:
        """The laws from which rank 0 says that the nodes of its tree were drawn, [most nodes, vocabulary]."""
        return group.broadcast(laws)

    def send_columns(self, group: Group, columns: Tensor) -> Tensor:
        """The columns of the draft that a step has left rank 0, and the first that is a head's own or -1, int64 [2]."""
        return group.broadcast(columns)

    def lengths(self, group: Group, local_lengths: Tensor) -> Tensor:
        """The numbers of emitted tokens of all requests, int64 [requests], from those of this rank; 0 for others."""
        return group.all_reduce(local_lengths)


RANK_SEAMS = RankSeams()
"""The fault-free decisions of ranks; one object, so that seams without a fault are equal."""


def take_device(device: str, rank: int) -> str:
    """Make the device number `rank` of its type the current one, and return its name; the CPU is of all ranks.

    nccl and hccl refuse two ranks on one device.
    """
    if device == "cpu":
        return device
    torch.get_device_module(device).set_device(rank)
    return f"{device}:{rank}"
