"""Faults of a draft that some of the target's ranks have, and whose decisions all ranks follow."""

from dataclasses import replace
from weakref import WeakKeyDictionary

import torch
from torch import Tensor

from specverify.backends.engine.collectives import Group, RankSeams
from specverify.backends.engine.draft.base import Proposal
from specverify.backends.engine.draft.filling import TreeFilling
from specverify.backends.engine.kv.base import KvCache
from specverify.backends.engine.request import Request
from specverify.backends.engine.sampling.step import StepSampling
from specverify.backends.engine.seams import Seams
from specverify.backends.faults.fault import (
    accepted_fault,
    attended_fault,
    committed_fault,
    drafted_fault,
    in_place_of,
)
from specverify.reference.parallel import rank_part
from specverify.reference.tree import Tree


class OnOtherRanks(Request):
    """A request that knows whether its rank is another than rank 0, and whether it has the draft."""

    @property
    def other_rank(self) -> int:
        """The number of the rank where the draft is shared out and this is not rank 0; 0 elsewhere."""
        return 0 if self.group is None else self.group.rank

    @property
    def follows(self) -> bool:
        """Whether its rank follows a draft that it does not have."""
        return self.group is not None and self.group.rank >= self.case.drafting_ranks


@attended_fault(
    "draft-ranks-draw-for-themselves",
    "family of vllm-project/vllm #31154, PR #31307: every rank drafts and verifies its own tokens",
    "a request that samples, a draft on several ranks, and a token that other random numbers would not draw",
    harmless={"top-k": "a draft that ranks its tokens draws none, so that every rank names the same"},
)
def draws_of_each_rank(seams: Seams) -> Seams:
    """Each of the draft's ranks draws drafted tokens by random numbers of its own, and verifies what it has drawn."""

    class OwnDraws(OnOtherRanks):
        def begin_drafting(self) -> tuple[StepSampling | None, tuple[list[int], StepSampling | None, Tensor | None]]:
            chance, (tokens, sampled, hidden) = super().begin_drafting()
            if self.other_rank and sampled is not None:
                sampling = replace(self.case.sampling, tape=(), seed=self.case.sampling.seed + self.other_rank)
                own_case = replace(self.case, sampling=sampling)
                sampled = StepSampling(
                    own_case, self.device_output, self.coined_steps, self.target.device, self.seams.sampling, self.guide
                )
            return chance, (tokens, sampled, hidden)

    class OwnTree(RankSeams):
        def send_tree(self, group: Group, drafted: Tensor) -> Tensor:
            tree_of_rank_0 = super().send_tree(group, drafted)
            has_drafted = bool(drafted[0])
            return drafted if has_drafted else tree_of_rank_0

        def send_laws(self, group: Group, laws: Tensor) -> Tensor:
            laws_of_rank_0 = super().send_laws(group, laws)
            has_drafted = bool(laws.any())
            return laws if has_drafted else laws_of_rank_0

    return replace(seams, request=OwnDraws, sampling=replace(seams.sampling, ranks=OwnTree()))


@attended_fault(
    "draft-tokens-of-step-before",
    "vllm-project/vllm PR #52295: ranks without the draft keep stale or zero-initialized draft tokens",
    "a draft on fewer ranks than the target, and a drafted token that the step before did not have in its place",
)
@in_place_of("request")
class TokensOfStepBefore(OnOtherRanks):
    """A rank without the draft verifies the tokens that it was sent for the step before, and zeros at first."""

    _sent: tuple[int, ...] = ()

    def lower(self, proposal: Proposal, chance: StepSampling | None, bare: bool = False) -> None:
        """See `Request.lower`."""
        if self.follows and not bare:
            root, *tokens = proposal.tree.token
            stale_tokens = (*self._sent, *(0 for _ in tokens))[: len(tokens)]
            self._sent = tuple(tokens)
            proposal = replace(proposal, tree=Tree(proposal.tree.parent, (root, *stale_tokens)))
        super().lower(proposal, chance, bare)


@committed_fault(
    "draft-rows-by-length-on-other-ranks",
    "family of sgl-project/sglang #31071: what was accepted is known on one rank, and others commit on their own",
    "a draft on several ranks, and an accepted node that was fed behind a sibling",
)
@in_place_of("request")
class RowsByLength(OnOtherRanks):
    """The draft's ranks beside rank 0 keep as many rows as were accepted, but the first that were fed."""

    def settle_draft(self, rows: list[int]) -> None:
        """See `Request.settle_draft`."""
        draft = self.draft
        if not self.other_rank or not isinstance(draft, TreeFilling):
            super().settle_draft(rows)
            return
        right = draft.seams

        def roll_back(cache: KvCache, fed: list[int]) -> None:
            right.roll_back(cache, list(range(len(fed))))

        draft.seams = replace(right, roll_back=roll_back)
        super().settle_draft(rows)
        draft.seams = right


@drafted_fault(
    "draft-vocabulary-by-targets-ranks",
    "family of vllm-project/vllm PR #31886: the draft's layers are split by the target's tensor_parallel_size",
    "a draft on several ranks, but on fewer than the target, and a token behind the first part",
)
@in_place_of("sampling.ranks.gather_logits")
def vocabulary_by_targets_ranks(ranks: RankSeams, group: Group, logits: Tensor, vocab: int) -> Tensor:
    """The parts of a draft's logits are taken for as narrow as the target's ranks would make them."""
    if group.whole is group:
        return ranks.gather_logits(group, logits, vocab)
    width = rank_part(vocab, 0, group.size)[1]
    parts = group.all_gather(torch.nn.functional.pad(logits, (0, width - logits.shape[-1])))
    narrow = rank_part(vocab, 0, group.whole.size)[1]
    gathered = torch.cat([part[..., :narrow] for part in parts], -1)[..., :vocab]
    return torch.nn.functional.pad(gathered, (0, vocab - gathered.shape[-1]))


@drafted_fault(
    "draft-states-of-other-ranks-stale",
    "vllm-project/vllm-ascend PR #9436: states of rows that other ranks hold are not gathered for the draft",
    "a head on ranks of its own, and a row whose state another rank holds",
)
def states_not_gathered(seams: Seams) -> Seams:
    """The draft reads a buffer in which a rank has written the states of its own rows alone.

    The other rows hold what an earlier forward has left there, and zeros at first.
    """
    buffers_of_ranks: WeakKeyDictionary[Group, dict[int, Tensor]] = WeakKeyDictionary()

    class NotGathered(RankSeams):
        def gather_states(self, group: Group, states: Tensor, rows: int) -> Tensor:
            first, end = rank_part(rows, group.rank, group.size)
            buffers = buffers_of_ranks.setdefault(group, {})
            earlier = buffers.get(states.shape[-1], states[:0])
            buffer = states.new_zeros(max(rows, len(earlier)), states.shape[-1])
            buffer[: len(earlier)] = earlier
            buffer[first:end] = states[: end - first]
            buffers[states.shape[-1]] = buffer
            return buffer[:rows].clone()

    return replace(seams, sampling=replace(seams.sampling, ranks=NotGathered()))


@accepted_fault(
    "draft-laws-on-rank-0-alone",
    "family of vllm-project/vllm #40149, PR #40269: draft_probs are not handed on, and drawn tokens count as certain",
    "a request that samples, a draft on fewer ranks than the target, and a rejected token that was drawn",
    harmless={"top-k": "tokens that the draft has ranked are certain: the law is one-hot on every rank"},
)
@in_place_of("request")
class LawsOnOneRank(OnOtherRanks):
    """A rank without the draft takes drafted tokens for certain, whatever law they were drawn from."""

    def lower(self, proposal: Proposal, chance: StepSampling | None, bare: bool = False) -> None:
        """See `Request.lower`."""
        super().lower(replace(proposal, proposal=None) if self.follows else proposal, chance, bare)
