"""Faults of stop conditions inside an accepted block.

Stop strings, limits and min_tokens hold for one token at a time, but not for a block of several tokens.
"""

from dataclasses import replace

import torch
from torch import Tensor

from specverify.backends.engine.sampling.processing import History
from specverify.backends.engine.sampling.seams import SamplingSeams
from specverify.backends.engine.seams import Seams
from specverify.backends.engine.stops import Limits, OutputTail
from specverify.backends.faults.fault import accepted_fault, emitted_fault, in_place_of
from specverify.reference.sampling import Sampling, Stops

ClippedBlock = tuple[list[int], str | None]


@emitted_fault(
    "stop-string-cuts-text-only",
    "catalogue BZ-160: stop string completed in the middle of an accepted block leaves later token ids",
    "a stop string completed before the last token of a block",
)
@in_place_of("clip")
def text_cut_only(seams: Seams, block: list[int], written: OutputTail, ends: Limits) -> ClippedBlock:
    """A stop string completed in the middle of a block cuts the text and leaves later ids and log-probabilities."""
    kept_tokens, why = seams.clip(block, written, ends)
    # A stop token is not text, so its cut stays.
    return (block, why) if why == "stop" and kept_tokens[-1] not in ends.stop else (kept_tokens, why)


@emitted_fault(
    "stop-string-outside-window",
    "sgl-project/sglang PR #23802: stop-string check misses early matches during speculative decoding",
    "a stop string completed early in a block that is long for it",
)
@in_place_of("clip")
def narrow_window(seams: Seams, block: list[int], written: OutputTail, ends: Limits) -> ClippedBlock:
    """Stop strings are looked for in a fixed window of last tokens, which a long block pushes them out of.

    After a block, stop strings are searched in the last n + 1 tokens, n being the characters of the longest string.

    The end, if one is found, is put in its right place.
    """
    kept_tokens, why = seams.clip(block, written, ends)
    # `reach` is n - 1: a match further back than the window is missed.
    if why == "stop" and kept_tokens[-1] not in ends.stop and len(block) - len(kept_tokens) > ends.reach + 1:
        return seams.clip(block, written, replace(ends, strings=()))
    return kept_tokens, why


@emitted_fault(
    "stop-string-tail-forgotten",
    "catalogue BZ-160, its property: a stop string that spans tokens, here of two blocks",
    "a stop string over two blocks",
)
@in_place_of("clip")
def tail_forgotten(seams: Seams, block: list[int], written: OutputTail, ends: Limits) -> ClippedBlock:
    """Each block is looked through for stop strings by itself, so one that began in the block before is missed."""
    return seams.clip(block, replace(written, tail=""), ends)


@emitted_fault(
    "budget-masks-stops",
    "sgl-project/sglang issue #31599: max_new_tokens cap masks an in-budget stop and leaks post-stop tokens",
    "a stop inside a block that runs past the budget",
)
@in_place_of("clip")
def budget_first(seams: Seams, block: list[int], written: OutputTail, ends: Limits) -> ClippedBlock:
    """The budget is looked at before the stops: a block that runs past it leaks tokens after a stop, as `length`."""
    if written.tokens + len(block) >= ends.most:
        ends = replace(ends, eos=frozenset(), stop=frozenset(), strings=())
    return seams.clip(block, written, ends)


@emitted_fault(
    "context-clip-by-what-is-left",
    "catalogue BZ-169: wrong arithmetic when clipping n-gram drafts at the context limit",
    "a block longer than what is left, other than by as much again",
)
@in_place_of("clip")
def room_taken_away(seams: Seams, block: list[int], written: OutputTail, ends: Limits) -> ClippedBlock:
    """At the context limit, as many tokens as still fit are taken off a block instead of those that do not."""
    room = ends.most - written.tokens
    if len(block) <= room:
        return seams.clip(block, written, ends)
    kept_tokens, why = seams.clip(block[:-room], written, replace(ends, most=written.tokens + len(block)))
    return kept_tokens, why or ("length" if len(kept_tokens) >= room else None)


@emitted_fault(
    "stop-string-before-min-tokens",
    "vllm-project/vllm issue #21987, PR #22014: stop sequences end the output although min_tokens is not reached",
    "a stop string completed among the first min_tokens tokens",
)
@in_place_of("clip")
def strings_unminded(seams: Seams, block: list[int], written: OutputTail, ends: Limits) -> ClippedBlock:
    """A stop string ends the output before min_tokens."""
    kept_tokens, why = seams.clip(block, written, ends)
    # End tokens are left to the right `clip`, so that only stop strings ignore the minimum.
    early, reason = seams.clip(block, written, replace(ends, least=0, eos=frozenset(), stop=frozenset()))
    return (early, reason) if reason == "stop" and len(early) < len(kept_tokens) else (kept_tokens, why)


@accepted_fault(
    "min-tokens-one-row-too-many",
    "catalogue BZ-017: min_tokens masks EOS on one extra draft row",
    "min_tokens, and an end token that is the target's choice right after them",
)
@in_place_of("sampling.scores")
def one_row_more(seams: SamplingSeams, logits: Tensor, sampling: Sampling, stops: Stops, past: History) -> Tensor:
    """Ends are banned at one row of the block more than min_tokens asks for."""
    return seams.scores(logits, sampling, stops, replace(past, emitted=past.emitted - 1))


@accepted_fault(
    "min-tokens-for-first-row-only",
    "vllm-project/vllm PR #32642: min_tokens with speculative decoding, which verified rows unmasked",
    "min_tokens, and an end token that is the target's choice below the root",
)
@in_place_of("sampling.scores")
def drafted_rows_unbanned(
    seams: SamplingSeams, logits: Tensor, sampling: Sampling, stops: Stops, past: History
) -> Tensor:
    """Ends are banned at the first row of a block alone: deeper rows may accept or choose one before min_tokens."""
    banned_scores = seams.scores(logits, sampling, stops, past)
    free_scores = seams.scores(logits, replace(sampling, min_tokens=0), stops, past)
    return torch.cat([banned_scores[:, :1], free_scores[:, 1:]], 1)
