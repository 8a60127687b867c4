"""Faults of a target over several ranks.

They lie in draws, arg-max and decisions that part, and in products that are no sums.
"""

from dataclasses import replace

import torch
from torch import Tensor

from specverify.backends.engine.collectives import Group, RankSeams, own_part
from specverify.backends.engine.sampling import coins
from specverify.backends.engine.seams import Seams
from specverify.backends.faults.fault import (
    accepted_fault,
    attended_fault,
    committed_fault,
    drafted_fault,
    in_place_of,
    scored_fault,
)

NOISE = 2.0**-3
"""Size, relative to the largest logit of a row, of the rounding by which one rank's logits differ."""


def _with_ranks(seams: Seams, ranks: RankSeams) -> Seams:
    return replace(seams, sampling=replace(seams.sampling, ranks=ranks))


class Alone(RankSeams):
    """Each rank follows its own decision; the collective is entered, and its answer thrown away."""

    def agree(self, group: Group, decision: Tensor, greedy: bool) -> Tensor:
        """See `RankSeams.agree`."""
        group.broadcast(decision)
        return decision


@accepted_fault(
    "rank-shard-sized-draws",
    "family of sgl-project/sglang #35798: ranks with equal seeds draw numbers for their own part of the vocabulary",
    "a request that samples on several ranks, and a part of the vocabulary that is not the whole of its law",
)
@in_place_of("sampling.ranks.draw")
def shard_sized_draws(ranks: RankSeams, group: Group, coin: Tensor, weights: Tensor) -> tuple[Tensor, Tensor, Tensor]:
    """Each rank draws in its own part by the same random number, which then also chooses among the ranks.

    The ranks agree, and the law is wrong: the number that chooses a rank's part says where in it the draw falls.
    """
    part, first = own_part(group, weights, 0.0)
    mass = part.sum(-1, keepdim=True)
    chosen_id, *ends = coins.inverse(coin, torch.where(mass > 0, part, torch.ones_like(part)))
    masses, names = torch.cat(group.all_gather(mass), -1), torch.stack(group.all_gather(first + chosen_id), -1)
    rank, *bounds = coins.inverse(coin, masses)
    own_low, own_high = (torch.stack(group.all_gather(end), -1).gather(-1, rank[:, None])[:, 0] for end in ends)
    # The coin decides twice: the draw stays the same where both decisions do.
    low, high = torch.maximum(bounds[0], own_low), torch.minimum(bounds[1], own_high)
    return names.gather(-1, rank[:, None])[:, 0], low, high


@accepted_fault(
    "rank-draws-by-own-seed",
    "vllm-project/vllm #17498: ranks accept by coins of their own",
    "a request that samples on several ranks, and a decision that other coins would not make",
)
def own_seed(seams: Seams) -> Seams:
    """Every rank has coins of its own and follows its own decision."""

    class OwnSeed(Alone):
        def own_coins(self, group: Group, uniforms: Tensor) -> Tensor:
            return (uniforms + 0.37 * group.rank) % 1.0

    return _with_ranks(seams, OwnSeed())


@accepted_fault(
    "rank-draws-once-more",
    "family of vllm-project/vllm #17498: one rank has drawn a random number that the others have not",
    "a request that samples on several ranks, and a decision that the next coin would not make",
)
def extra_draw(seams: Seams) -> Seams:
    """The last rank has drawn once more than the others, so that each of its decisions reads the next coin."""

    class ExtraDraw(Alone):
        def own_coins(self, group: Group, uniforms: Tensor) -> Tensor:
            return uniforms.roll(-1, -1) if group.rank == group.size - 1 else uniforms

    return _with_ranks(seams, ExtraDraw())


@accepted_fault(
    "rank-takes-its-own-argmax",
    "NVIDIA/TensorRT-LLM #16440: the arg-max of a rank's own part of the vocabulary is taken for that of all",
    "a greedy request on several ranks, and a best token that rank 0 does not hold",
)
@in_place_of("sampling.ranks.argmax")
def own_argmax(ranks: RankSeams, group: Group, scores: Tensor) -> Tensor:
    """The best token of a rank's own part of the vocabulary is taken for the best of all."""
    ranks.argmax(group, scores)
    part, first = own_part(group, scores, -torch.inf)
    return first + part.argmax(-1)


@accepted_fault(
    "rank-greedy-not-broadcast",
    "sgl-project/sglang #31071: the greedy branch broadcasts on ROCm alone; a near tie gives ranks other lengths",
    "a greedy request on several ranks, and two logits so near that the ranks' rounding decides",
)
def greedy_not_broadcast(seams: Seams) -> Seams:
    """Greedy decisions are not broadcast, and the last rank's logits are rounded otherwise than the others'."""

    class NotBroadcast(Alone):
        def gather_logits(self, group: Group, logits: Tensor, vocab: int) -> Tensor:
            logits_of_all = super().gather_logits(group, logits, vocab)
            if group.rank < group.size - 1:
                return logits_of_all
            grid = NOISE * logits_of_all.abs().max(-1, keepdim=True).values
            return (logits_of_all / grid).round() * grid

        def argmax(self, group: Group, scores: Tensor) -> Tensor:
            super().argmax(group, scores)
            return scores.argmax(-1)

        def agree(self, group: Group, decision: Tensor, greedy: bool) -> Tensor:
            if greedy:
                return super().agree(group, decision, greedy)
            return RankSeams.agree(self, group, decision, greedy)

    return _with_ranks(seams, NotBroadcast())


@scored_fault(
    "rank-sum-forgotten-on-trees",
    "family of catalogue BZ-013: a path for blocks of several rows leaves out the all-reduce of one projection",
    "a model on several ranks, and a tree of at least two rows",
)
@in_place_of("sampling.ranks.partial")
def forgotten_sum(
    ranks: RankSeams, group: Group, rows: Tensor, weight: Tensor, bias: Tensor | None, name: str
) -> Tensor:
    """The sum over ranks is left out for the last down projection where a forward has several rows."""
    rows_of_all = ranks.partial(group, rows, weight, bias, name)
    if rows.shape[1] == 1 or name != "layers.last.down_proj":
        return rows_of_all
    return torch.nn.functional.linear(rows, weight, bias)


@scored_fault(
    "rank-bias-added-by-all",
    "family of catalogue BZ-152: what one rank is to do once is done on every rank",
    "a model on several ranks whose output projections have biases",
)
@in_place_of("sampling.ranks.partial")
def bias_everywhere(
    ranks: RankSeams, group: Group, rows: Tensor, weight: Tensor, bias: Tensor | None, name: str
) -> Tensor:
    """Every rank adds the bias of the last layer's projections before the sum, which then holds it once for each."""
    if not name.startswith("layers.last."):
        return ranks.partial(group, rows, weight, bias, name)
    return group.all_reduce(torch.nn.functional.linear(rows, weight, bias))


@attended_fault(
    "rank-embeds-ids-of-others",
    "family of catalogue BZ-152: an id outside of a rank's part of the vocabulary is not masked",
    "a model on several ranks, and a token that rank 0 does not hold",
)
@in_place_of("sampling.ranks.embed_tokens")
def unmasked_embedding(ranks: RankSeams, group: Group, tokens: Tensor, weight: Tensor, first: int) -> Tensor:
    """A rank without a token's embedding adds that of its last id instead of nothing."""
    rows = weight if len(weight) else weight.new_zeros(1, weight.shape[-1])
    return group.all_reduce(rows[(tokens - first).clamp(0, len(rows) - 1)])


@drafted_fault(
    "rank-idle-skips-step",
    "family of sgl-project/sglang #31071: a rank without a batch does not enter a collective, and the others wait",
    "requests spread over ranks, and a step in which a rank has none of them",
)
@in_place_of("sampling.ranks.lengths")
def idle_skips(ranks: RankSeams, group: Group, own_lengths: Tensor) -> Tensor:
    """A rank that has no request in a step does not take part when the ranks tell each other their lengths."""
    return ranks.lengths(group, own_lengths) if bool(own_lengths.any()) else own_lengths


@committed_fault(
    "rank-lengths-of-another",
    "family of sgl-project/sglang #31071: the accepted length that one rank decided is followed by another",
    "requests spread over ranks that step together, and one that emits fewer tokens than another",
)
@in_place_of("sampling.ranks.lengths")
def lengths_of_another(ranks: RankSeams, group: Group, own_lengths: Tensor) -> Tensor:
    """A rank keeps as many rows of its requests as the shortest request of the step has emitted on any rank."""
    all_lengths = ranks.lengths(group, own_lengths)
    return torch.where(
        all_lengths > 0, all_lengths[all_lengths > 0].min() if bool(all_lengths.any()) else 0, all_lengths
    )
