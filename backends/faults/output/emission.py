"""Faults of emission: stops inside a block, budgets, padding, log-probabilities."""

from dataclasses import replace

import torch
from torch import Tensor

from specverify.backends.engine.seams import Seams
from specverify.backends.engine.stops import Limits, OutputTail
from specverify.backends.faults.fault import emitted_fault, in_place_of

ClippedBlock = tuple[list[int], str | None]


@emitted_fault(
    "stop-inside-block-ignored",
    "catalogue BZ-128: EOS inside the draft block does not stop output",
    "an end token before the last token of a block",
)
@in_place_of("clip")
def stop_seen_at_the_end(seams: Seams, block: list[int], written: OutputTail, ends: Limits) -> ClippedBlock:
    """An end of text inside an accepted block does not stop the output."""
    kept_tokens, why = seams.clip(block, written, replace(ends, eos=frozenset(), stop=frozenset()))
    if kept_tokens[-1] in ends.eos:
        return kept_tokens, "eos"
    return (kept_tokens, "stop") if kept_tokens[-1] in ends.stop else (kept_tokens, why)


@emitted_fault(
    "block-past-max-new-tokens",
    "catalogue BZ-107: candidates exceed max_new_tokens",
    "an accepted block longer than what is left of the budget",
)
@in_place_of("clip")
def budget_checked_per_block(seams: Seams, block: list[int], written: OutputTail, ends: Limits) -> ClippedBlock:
    """An accepted block runs past max_new_tokens."""
    kept_tokens, why = seams.clip(block, written, replace(ends, most=written.tokens + len(block) + 1))
    return kept_tokens, why or ("length" if written.tokens + len(kept_tokens) >= ends.most else None)


@emitted_fault(
    "rejected-slots-emitted-as-zero",
    "catalogue BZ-027: rejected placeholder slots emitted as token 0",
    "a step that accepts nothing",
)
@in_place_of("clip")
def placeholder_zeros(seams: Seams, block: list[int], written: OutputTail, ends: Limits) -> ClippedBlock:
    """Placeholder slots of rejected drafts are emitted as token 0.

    A block of the bonus alone is returned with its padding, one placeholder of id 0.
    """
    kept_tokens, why = seams.clip(block, written, ends)
    # An output that ends returns no further slots.
    return ([*kept_tokens, 0], why) if len(block) == 1 and why is None else (kept_tokens, why)


@emitted_fault(
    "speculated-tokens-reported-certain", "catalogue BZ-124: every token reports logprob 0 when speculating", "a tree"
)
@in_place_of("logprobs")
def certain_everywhere(seams: Seams, logits: Tensor) -> Tensor:
    """Every token that was speculated is reported with log-probability 0."""
    logprobs_of_rows = seams.logprobs(logits)
    return torch.zeros_like(logprobs_of_rows) if len(logits) > 1 else logprobs_of_rows


@emitted_fault(
    "log-probabilities-in-one-buffer",
    "catalogue BZ-168: returned probs of one speculative batch overwrite one another",
    "a block of two tokens, or a node after the one that emits",
)
@in_place_of("logprobs")
def one_buffer(seams: Seams, logits: Tensor) -> Tensor:
    """Log-probabilities of one block are views of one buffer: all come out as those of its last row."""
    logprobs_of_rows = seams.logprobs(logits)
    return logprobs_of_rows[-1:].expand_as(logprobs_of_rows)
