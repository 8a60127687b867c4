"""Faults of batches in which only some requests have a draft, or only some sample."""

from dataclasses import dataclass, field, replace

import torch
from torch import Tensor

from specverify.backends.engine.lower_tree import TreeTensors
from specverify.backends.engine.model.causal_lm import Rows
from specverify.backends.engine.request import Request
from specverify.backends.engine.seams import Seams
from specverify.backends.faults.fault import accepted_fault, in_place_of, lowered_fault, scored_fault


def _nodes(request: Request) -> int:
    """The number of nodes of the tree that the request is about to verify, including the root."""
    assert request.block is not None
    return len(request.block.proposal.tree)


@accepted_fault(
    "greedy-rows-divided-by-temperature",
    "vllm-project/vllm PR #27077; catalogue BZ-012: greedy sentinel changed but rejection sampler not updated",
    "a batch of a greedy request and one that samples",
)
def greedy_divided(seams: Seams) -> Seams:
    """Where some requests of a batch sample, the logits of greedy ones are divided by a temperature of 0 too."""

    class DividedRequest(Request):
        mixed = False

        def settle(self, flat: Tensor, heads: list[Tensor]) -> None:
            right = self.seams
            # A batch of greedy requests only is not divided.
            if self.mixed and self.case.sampling.greedy:
                self.seams = replace(right, walk=walk_divided)
            super().settle(flat, heads)
            self.seams = right

    def walk_divided(tensors: TreeTensors, scores: Tensor) -> tuple[list[int], int]:
        return seams.walk(tensors, scores / 0.0)

    def gather(batch: list[Request]) -> list[Rows]:
        is_mixed = any(not request.case.sampling.greedy for request in batch)
        for request in batch:
            assert isinstance(request, DividedRequest)
            request.mixed = is_mixed
        return seams.gather(batch)

    return replace(seams, gather=gather, request=DividedRequest)


@lowered_fault(
    "draft-tokens-by-draft-row",
    "NVIDIA/TensorRT-LLM PR #7803; catalogue BZ-077: draft and target batch indices mixed",
    "a batch in which a request without a draft stands before one with",
)
@in_place_of("gather")
def tokens_by_draft_row(seams: Seams, batch: list[Request]) -> list[Rows]:
    """Draft tokens go to the rows of the batch that their requests have among those with a draft."""
    draft_rows = [_tokens(request)[1 : _nodes(request)].clone() for request in batch if _nodes(request) > 1]
    if len(draft_rows) < len(batch):
        for row, request in enumerate(batch):
            token = _tokens(request)
            token[1:] = 0
            tokens_of_row = draft_rows[row][: len(token) - 1] if row < len(draft_rows) else token[:0]
            token[1 : 1 + len(tokens_of_row)] = tokens_of_row
    return seams.gather(batch)


def _tokens(request: Request) -> Tensor:
    """The token ids of the request's lowered tree, which the fault overwrites in place."""
    assert request.block is not None
    return request.block.tensors.token


@dataclass
class Queue:
    """Rows of logits that wait until a request of the batch takes them."""

    rows: list[Tensor] = field(default_factory=list)


@scored_fault(
    "bare-root-leaves-logits-row",
    "spiritbuun/buun-llama-cpp PR #74; catalogue BZ-123: empty drafts leave orphan logits indices",
    "a batch in which a request without a draft stands before one with",
)
def row_of_bare_root_left(seams: Seams) -> Seams:
    """An empty draft queues an index of logits that nobody takes, so the next request reads one row early."""
    queue = Queue()

    class QueuedRequest(Request):
        def settle(self, flat: Tensor, heads: list[Tensor]) -> None:
            if _nodes(self) == 1:
                queue.rows.append(flat[:1])
            elif queue.rows:
                flat = torch.cat([*queue.rows, flat])[: len(flat)]
                queue.rows = []
            super().settle(flat, heads)

    def gather(batch: list[Request]) -> list[Rows]:
        queue.rows = []
        return seams.gather(batch)

    return replace(seams, gather=gather, request=QueuedRequest)


@accepted_fault(
    "coins-of-absent-nodes-drawn",
    "vllm-project/vllm-ascend issue #13608; catalogue BZ-156: zero-draft requests advance their private RNG",
    "a request that samples, and a step after one without a draft",
)
@in_place_of("request")
class DrawingRequest(Request):
    """A step without a draft moves the request's random stream on as if it had one.

    Each step without a draft counts twice, so later steps read the coins of the step after their own.
    """

    @property
    def coined_steps(self) -> int:
        bare = sum(step.drafted is not None and len(step.drafted.tree) == 1 for step in self.steps)
        return super().coined_steps + bare
