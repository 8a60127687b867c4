"""Faults of guided decoding.

They lie in the masks of a tree, in the position of the matcher, and in the place where the mask enters the law.
"""

from dataclasses import dataclass, replace

import torch
from torch import Tensor

from specverify.backends.engine.guided.guide import Guide, Masks, open_guide
from specverify.backends.engine.request import Request
from specverify.backends.engine.sampling.processing import History, truncate
from specverify.backends.engine.sampling.seams import SamplingSeams
from specverify.backends.engine.seams import Seams
from specverify.backends.faults.fault import (
    accepted_fault,
    committed_fault,
    drafted_fault,
    in_place_of,
    scored_fault,
)
from specverify.reference.sampling import Sampling, Stops
from specverify.reference.tree import Shape


@committed_fault(
    "matcher-advanced-twice",
    "sgl-project/sglang #29110: the grammar is given a token a second time",
    "a grammar that goes on with the last token of a block once more",
)
@in_place_of("request")
class ReadingTwice(Request):
    """The matcher reads the last token of a block twice: once when it is verified, and once when it is sent."""

    def read_grammar(self, emitted: list[int], finish: str | None) -> tuple[list[int], str | None]:
        tokens, why = super().read_grammar(emitted, finish)
        if self.guide is not None and why is None and bool(self.guide.row()[tokens[-1]]):
            self.guide.accept_token(tokens[-1])
        return tokens, why


@scored_fault(
    "grammar-mask-of-parent",
    "family of vllm-project/vllm #49738: rows of the grammar's bitmask are shifted against the drafted tokens",
    "a grammar, and a drafted token behind which other tokens are legal than before it",
)
@in_place_of("sampling.masks")
def mask_of_parent(sampling: SamplingSeams, guide: Guide, shape: Shape, token: list[int]) -> Masks:
    """Each node below the root has the grammar's mask of its parent: the rows of the bitmask are one token behind."""
    right_masks = sampling.masks(guide, shape, token)
    return replace(right_masks, legal=right_masks.legal[list(shape.parent)])


@scored_fault(
    "grammar-mask-of-flat-chain",
    "catalogue BZ-080: grammar bitmask computed for a flat chain, applied to a tree",
    "a grammar, and a tree with siblings whose tokens are legal",
)
@in_place_of("sampling.masks")
def flat_chain(sampling: SamplingSeams, guide: Guide, shape: Shape, token: list[int]) -> Masks:
    """The grammar's masks are computed as if the rows of the tree were one chain."""
    chain = Shape((0, *range(len(shape) - 1)))
    return sampling.masks(guide, chain, token)


@dataclass
class Staying(Guide):
    """A guide that stays where it is when it is to take a token back, and counts how often."""

    branches_left: int = 0

    def take_back(self) -> None:
        """See `Guide.take_back`."""
        self.branches_left += 1


@scored_fault(
    "matcher-kept-behind-rejected-branch",
    "family of catalogue BZ-080: the matcher of a tree is not taken back when the walk leaves a branch",
    "a grammar, and two legal siblings",
)
@in_place_of("sampling.masks")
def not_taken_back(sampling: SamplingSeams, guide: Guide, shape: Shape, token: list[int]) -> Masks:
    """The matcher stays behind a branch that the walk over the tree has left.

    The mask of a later sibling is that of a text with both siblings. The matcher is put right after the walk.
    """
    staying = Staying(guide.matcher, guide.ends, guide.size, guide.read, guide.is_over, guide.is_lost)
    right_masks = sampling.masks(staying, shape, token)
    for _ in range(staying.branches_left):
        guide.take_back()
    return right_masks


@scored_fault(
    "end-of-text-legal-everywhere",
    "vllm-project/vllm #37506: the end of text is let through where the grammar cannot end",
    "a grammar, an end token, and a node where the text is not complete",
)
@in_place_of("sampling.masks")
def ends_anywhere(sampling: SamplingSeams, guide: Guide, shape: Shape, token: list[int]) -> Masks:
    """The grammar's mask allows the end of text at every node, whether the text is complete or not."""
    right_masks = sampling.masks(guide, shape, token)
    legal = right_masks.legal.clone()
    legal[:, list(guide.ends)] = True
    return replace(right_masks, legal=legal)


@scored_fault(
    "grammar-after-truncation",
    "family of vllm-project/vllm #44297: the mask enters after the other processors have cut the row",
    "a sampling request with a grammar and top-k, top-p or min-p",
)
def mask_last(seams: Seams) -> Seams:
    """The grammar's mask is applied to the law that top-k, top-p and min-p have cut, and not to the logits."""
    sampling = seams.sampling

    def law(logits: Tensor, settings: Sampling, stops: Stops, past: History | None) -> Tensor:
        if past is None or past.legal is None:
            return sampling.target_law(logits, settings, stops, past)
        full_law = sampling.target_law(logits, settings, stops, replace(past, legal=None))
        legal_law = full_law * past.legal
        total = legal_law.sum(-1, keepdim=True)
        # Where truncation has left no legal token, the right law stands in: the fault would have none.
        right = sampling.target_law(logits, settings, stops, past)
        return torch.where(total > 0, legal_law / total, right)

    return replace(seams, sampling=replace(sampling, target_law=law, bonus_law=law))


@accepted_fault(
    "residual-without-grammar",
    "family of vllm-project/vllm PR #36138: the mask holds for one of the laws that a step draws from",
    "a sampling request with a grammar, a drafted token that is rejected, and a token that is not legal",
)
def raw_residual(seams: Seams) -> Seams:
    """After a rejection the next token is drawn from the residual of the law without the grammar."""
    sampling = seams.sampling
    raw: list[Tensor] = []

    def target(logits: Tensor, settings: Sampling, stops: Stops, past: History | None) -> Tensor:
        masked = sampling.target_law(logits, settings, stops, past)
        free = None if past is None else replace(past, legal=None)
        raw[:] = [masked if past is None else sampling.target_law(logits, settings, stops, free)]
        return masked

    def last(rows: Tensor, node: Tensor, remaining: Tensor, has_stopped: Tensor, rejected_node: Tensor) -> Tensor:
        right_law = sampling.last_law(rows, node, remaining, has_stopped, rejected_node)
        if not raw:  # a law that was given as a table has no grammar
            return right_law
        each = torch.arange(len(node), device=node.device)
        # What the mask took away from the law comes back in the residual.
        wrong = remaining + (raw.pop()[each, node] - rows[each, node]).clamp(min=0)
        return torch.where(has_stopped[:, None], wrong / wrong.sum(-1, keepdim=True), right_law)

    return replace(seams, sampling=replace(sampling, target_law=target, bonus_law=target, last_law=last))


@accepted_fault(
    "bonus-under-grammar-of-root",
    "sgl-project/sglang #15050: the mask of the token after the path is not that of the last accepted node",
    "a sampling request with a grammar, and an accepted token behind which other tokens are legal",
)
@in_place_of("sampling.bonus_law")
def root_bonus(
    sampling: SamplingSeams, logits: Tensor, settings: Sampling, stops: Stops, past: History | None
) -> Tensor:
    """The token after the accepted path is drawn under the grammar's mask of the first row of the tree."""
    if past is not None and past.legal is not None:
        past = replace(past, legal=past.legal[:, :1].expand_as(past.legal))
    return sampling.target_law(logits, settings, stops, past)


@drafted_fault(
    "draft-claimed-without-grammar",
    "family of catalogue BZ-018: the law that the verifier is told of is not the one that the grammar has masked",
    "a sampling request with a grammar and a drawn draft",
)
@in_place_of("sampling.hand_over")
def raw_claim(sampling: SamplingSeams, drawn_from: Tensor, logits: Tensor, settings: Sampling) -> Tensor:
    """Drafted tokens are drawn under the grammar, but the verifier is told the draft's law without it."""
    if settings.grammar is None:
        return sampling.hand_over(drawn_from, logits, settings)
    return truncate(logits / settings.temperature, settings)


@scored_fault(
    "matcher-reset-by-eviction",
    "sgl-project/sglang #29110: a request that was taken back has a grammar at the beginning of its text",
    "a session in which a request with a grammar is evicted after a step, restored, and goes on",
)
@in_place_of("request")
class Forgetful(Request):
    """A request that was evicted goes on with a matcher at the beginning of its grammar."""

    def prefill(self) -> None:
        super().prefill()
        grammar = self.case.sampling.grammar
        if grammar is not None and self.steps:  # no first prefill: the request was restored
            self.guide = open_guide(grammar, self.case.stops.eos)
