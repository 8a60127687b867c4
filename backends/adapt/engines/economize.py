"""economize with drafters of its own: a draft model, or prompt lookup.

Both draft chains. economize verifies them with its greedy verifier, or with rejection sampling where the request
samples; a request without a draft is decoded without speculation. `economize_tree.py` shows its trees step by step.
"""

from collections.abc import Sequence
from functools import lru_cache
from typing import Any

import economize
import torch
from economize import DecodeConfig, GreedySelector, TopPSampler
from economize.techniques.draft_model import DraftModelConfig
from economize.techniques.lookup import LookupConfig

from specverify.backends.adapt import Generated, blackbox
from specverify.backends.adapt.models import OPEN_MODELS

CYCLE = 4
"""Tokens of a cycle: three drafts at most, and one token of the target."""

FAMILIES = ("llama", "pangu", "qwen2", "qwen3", "mistral", "gemma2")
"""The families that economize has an adapter of its own for; it runs a Pangu model as a Llama with biases."""


def decode_with_draft(
    prompt_ids: list[int], max_new_tokens: int, model: Any, draft_checkpoint: str | None, temperature: float = 0.0,
    top_p: float = 1.0, seed: int = 0, stops: Sequence[int] = (),
) -> Generated:  # fmt: skip
    """Decode with economize's draft-model technique."""
    ready = _plain(model) if draft_checkpoint is None else _with_draft(model, draft_checkpoint)
    return _decode(ready, prompt_ids, max_new_tokens, temperature, top_p, seed, stops, draft_checkpoint is not None)


def decode_with_lookup(
    prompt_ids: list[int], max_new_tokens: int, model: Any, temperature: float = 0.0, top_p: float = 1.0,
    seed: int = 0, stops: Sequence[int] = (),
) -> Generated:  # fmt: skip
    """Decode with economize's prompt lookup."""
    return _decode(_with_lookup(model), prompt_ids, max_new_tokens, temperature, top_p, seed, stops, True)


@lru_cache(maxsize=OPEN_MODELS)
def _plain(model: Any) -> Any:
    return economize.apply(model)


@lru_cache(maxsize=OPEN_MODELS)
def _with_lookup(model: Any) -> Any:
    return economize.apply(model, LookupConfig(max_ngram=2))


@lru_cache(maxsize=OPEN_MODELS)
def _with_draft(model: Any, checkpoint: str) -> Any:
    # Gemma 2 has a soft cap, which only eager attention computes.
    return economize.apply(model, DraftModelConfig(model=checkpoint, attn_implementation="eager"))


def _decode(
    ready: Any, prompt_ids: list[int], room: int, temperature: float, top_p: float, seed: int, stops: Sequence[int],
    speculates: bool,
) -> Generated:  # fmt: skip
    """At most `room` new tokens, and the counts of the cycles that economize verified."""
    verifier = "rejection" if temperature else "greedy"
    config = DecodeConfig(cycle_length=CYCLE if speculates else 1, verifier=verifier)
    selector = TopPSampler(temperature, top_p, seed) if temperature else GreedySelector()
    result = ready.decode(torch.tensor(prompt_ids), room, decoding=config, selector=selector, stop=set(stops) or None)
    cycles = result.acceptance  # a pair (drafted, accepted) for each cycle
    return Generated(
        result.tokens, proposed=sum(count for count, _ in cycles), accepted=sum(count for _, count in cycles)
    )


open_drafted = blackbox(decode_with_draft, name="economize", families=FAMILIES)
open_looked_up = blackbox(decode_with_lookup, name="economize-lookup", families=FAMILIES)
