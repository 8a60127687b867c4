"""A draft that the first ranks have, each with a part of it, and whose decisions all ranks follow.

The draft's ranks draft among themselves. Rank 0 then sends the tree, the laws from which its nodes were drawn, and the
length of the draft's cache, so that all ranks verify one tree and keep one block table.
"""

from collections.abc import Callable, Iterator
from contextlib import contextmanager
from dataclasses import replace
from typing import Any

import torch
from torch import Tensor

from specverify.backends.engine.collectives import Group, RankSeams
from specverify.backends.engine.draft.base import OwnRows, Proposal
from specverify.backends.engine.draft.followed import FollowedDraft
from specverify.backends.engine.law_device import law_device
from specverify.backends.engine.model.absent import AbsentModel
from specverify.backends.engine.model.causal_lm import CausalLm
from specverify.backends.engine.model.hidden import HiddenTap
from specverify.backends.engine.ranks.head_part import part_of_head
from specverify.backends.engine.ranks.shards import ShardedLm
from specverify.backends.engine.request import Request
from specverify.backends.engine.sampling.step import StepSampling
from specverify.backends.engine.step_seams import DraftModel, DraftPart
from specverify.reference.case import Case
from specverify.reference.parallel import rank_part
from specverify.reference.tree import Tree

WORDS = 4
"""The numbers of a tree's message before its nodes: their number, whether it has laws, and `_columns`."""


def parts_of_drafts(group: Group, ranks: RankSeams, draft_ranks: int) -> Callable[[DraftModel], DraftPart]:
    """The part that rank `group.rank` has of a draft's model, which the first `draft_ranks` ranks share."""
    draft_group = group.part(draft_ranks)
    parts: dict[DraftModel, DraftPart] = {}

    def part(model: DraftModel) -> DraftPart:
        if model not in parts:
            if group.rank >= draft_ranks:
                parts[model] = AbsentModel(model)
            elif draft_ranks == 1:
                parts[model] = model
            elif isinstance(model, CausalLm):
                parts[model] = ShardedLm(model, draft_group, ranks)
            else:
                parts[model] = part_of_head(model, draft_group, ranks)
        return parts[model]

    return part


def request_on_ranks(base: type[Request], own_group: Group, ranks: RankSeams) -> type[Request]:
    """The class of requests on rank `own_group.rank` that follow the tree of rank 0."""

    class RankRequest(base):  # type: ignore[misc, valid-type]  # the class that a composition or a fault has chosen
        group = own_group

        def ask_draft(
            self, tokens: list[int], chance: StepSampling | None = None, hidden: Tensor | None = None
        ) -> Proposal:
            proposal: Proposal | None = None
            if own_group.rank < self.case.drafting_ranks:
                proposal = super().ask_draft(tokens, chance, hidden)
            return follow_tree(own_group, ranks, self, proposal)

        def settle_draft(self, rows: list[int]) -> None:
            super().settle_draft(rows)
            columns = ranks.send_columns(own_group, _columns(self).to(self.target.device))
            if isinstance(self.draft, FollowedDraft):
                self.draft.take_columns(*columns.tolist())

    return RankRequest


def follow_tree(group: Group, ranks: RankSeams, request: Request, proposal: Proposal | None) -> Proposal:
    """The proposal of rank 0; of a rank that drafts, `proposal` with the tree and the laws of rank 0."""
    case, device = request.case, request.target.device
    message = ranks.send_tree(group, _tree_message(case.most_nodes, request, proposal).to(device)).tolist()
    count, has_laws, *columns = message[:WORDS]
    if isinstance(request.draft, FollowedDraft):
        request.draft.take_columns(*columns)
    parents, tokens = (message[begin : begin + count] for begin in (WORDS, WORDS + case.most_nodes))
    laws = None if proposal is None else proposal.proposal
    if has_laws:
        laws = ranks.send_laws(group, _padded_laws(case, laws, device))[:count].to(law_device(device))
    if group.rank == 0 and proposal is not None:
        return proposal
    return replace(proposal or Proposal(Tree((0,), (0,))), tree=Tree(tuple(parents), tuple(tokens)), proposal=laws)


def _tree_message(most_nodes: int, request: Request, proposal: Proposal | None) -> Tensor:
    """Tree and columns as int64 [WORDS + 2 * most_nodes]; of a rank without a draft, the shape alone."""
    message = torch.zeros(WORDS + 2 * most_nodes, dtype=torch.int64)
    if proposal is not None:
        tree = proposal.tree
        message[:WORDS] = torch.tensor([len(tree), int(proposal.proposal is not None), *_columns(request).tolist()])
        message[WORDS : WORDS + len(tree)] = torch.tensor(tree.parent)
        message[WORDS + most_nodes : WORDS + most_nodes + len(tree)] = torch.tensor(tree.token)
    return message


def _padded_laws(case: Case, laws: Tensor | None, device: torch.device) -> Tensor:
    """The laws [most nodes, vocabulary] on `device`, zeros behind those of the tree."""
    dtype = torch.float64 if case.dtype == "float64" else torch.float32
    padded = torch.zeros(case.most_nodes, case.model.vocab_size, dtype=dtype, device=device)
    if laws is not None:
        padded[: len(laws)] = laws.to(device, dtype)
    return padded


def _columns(request: Request) -> Tensor:
    """The number of the draft's columns and the first that holds a state of the head's own, or -1; int64 [2]."""
    cache = request.draft.cache
    own_rows = request.draft.own_rows if isinstance(request.draft, OwnRows) else []
    return torch.tensor([0 if cache is None else cache.length, own_rows[0] if own_rows else -1])


def tap_on_ranks(base: type[HiddenTap], group: Group, ranks: RankSeams) -> type[HiddenTap]:
    """The class of taps on rank `group.rank`, whose forwards leave it the hidden states of its part of the rows.

    A draft reads those of all rows, so that the ranks gather them.
    """

    class RankTap(base):  # type: ignore[misc, valid-type]  # the class that a composition or a fault has chosen
        @contextmanager
        def on(self, body: Any) -> Iterator[None]:
            with super().on(body):
                yield
            for reads, states in self.states.items():
                rows = states.flatten(0, 1)
                first, end = rank_part(len(rows), group.rank, group.size)
                missing = rank_part(len(rows), 0, group.size)[1] - (end - first)
                part = torch.nn.functional.pad(rows[first:end], (0, 0, 0, missing))
                self.states[reads] = ranks.gather_states(group, part, len(rows)).view_as(states)

    return RankTap
