"""transformers' `generate`, which verifies a chain of tokens in one forward.

The candidates come from an assistant model, from the text itself (prompt lookup), or from the target's own first layers
(early exit).
"""

from collections.abc import Sequence
from typing import Any

import torch

from specverify.backends.adapt import Generated, blackbox
from specverify.backends.adapt.generated import generated_with_counts, rows_of_forwards
from specverify.reference.family import FAMILIES

LOOKUP_TOKENS = 3
"""Most tokens that prompt lookup proposes in a round."""

LEAST_WINDOW = 2
"""The narrowest window: transformers 5.23 is wrong with a sliding window of one token (`tests/strangers/found`)."""

TRIED_FAMILIES = tuple(name for name, family in FAMILIES.items() if not family.rare)
"""Families whose models ran through `generate` here; of the others nobody has looked at its caches yet."""

EXITS = tuple(family for family in TRIED_FAMILIES if family != "llama4")
"""Families with early exit: transformers 5.23 does not find the layers of Llama 4 (`tests/strangers/found`)."""


def generate_assisted(
    prompt_ids: list[int], max_new_tokens: int, model: Any, draft_model: Any, temperature: float = 0.0, top_k: int = 0,
    top_p: float = 1.0, min_p: float = 0.0, stops: Sequence[int] = (),
) -> Generated:  # fmt: skip
    """Assisted generation with a draft of the same vocabulary."""
    options = {} if draft_model is None else {"assistant_model": draft_model}
    return generate(model, prompt_ids, max_new_tokens, processing(temperature, top_k, top_p, min_p), stops, options)


def lookup(
    prompt_ids: list[int], max_new_tokens: int, model: Any, temperature: float = 0.0, top_k: int = 0,
    top_p: float = 1.0, min_p: float = 0.0, stops: Sequence[int] = (),
) -> Generated:  # fmt: skip
    """Assisted generation whose candidates follow an earlier occurrence of the last tokens."""
    options = {"prompt_lookup_num_tokens": LOOKUP_TOKENS}
    return generate(model, prompt_ids, max_new_tokens, processing(temperature, top_k, top_p, min_p), stops, options)


def early_exit(
    prompt_ids: list[int], max_new_tokens: int, model: Any, temperature: float = 0.0, top_k: int = 0,
    top_p: float = 1.0, min_p: float = 0.0, stops: Sequence[int] = (),
) -> Generated:  # fmt: skip
    """Assisted generation whose candidates come from the first layer of the target."""
    options = {"assistant_early_exit": 1}
    result = generate(model, prompt_ids, max_new_tokens, processing(temperature, top_k, top_p, min_p), stops, options)
    # Where a target has one layer, drafting and verifying forwards are alike, so that none can be counted.
    return result if model.config.num_hidden_layers > 1 else Generated(result.tokens)


def processing(temperature: float, top_k: int, top_p: float, min_p: float) -> dict[str, Any]:
    """The arguments of `generate` for greedy decoding at temperature 0, or for sampling."""
    if not temperature:
        return {"do_sample": False}
    return {"do_sample": True, "temperature": temperature, "top_k": top_k, "top_p": top_p, "min_p": min_p or None}


def generate(
    model: Any,
    prompt_ids: list[int],
    room: int,
    processing: dict[str, Any],
    stops: Sequence[int],
    options: dict[str, Any],
) -> Generated:
    """The tokens that `model` generates after the prompt, int64 [at most `room`], and counts of its forwards."""
    prompt = torch.tensor([prompt_ids])
    with rows_of_forwards(model) as rows:
        out = model.generate(
            prompt,
            attention_mask=torch.ones_like(prompt),  # without a mask, transformers takes each token 0 for padding
            max_new_tokens=room,
            eos_token_id=list(stops) or None,
            pad_token_id=0,
            **processing,
            **options,
        )
    return generated_with_counts(out[0, len(prompt_ids) :], rows, len(prompt_ids))


open_assisted = blackbox(generate_assisted, name="hf-generate", families=TRIED_FAMILIES, least_window=LEAST_WINDOW)
open_lookup = blackbox(lookup, name="hf-generate-lookup", families=TRIED_FAMILIES, least_window=LEAST_WINDOW)
open_early_exit = blackbox(early_exit, name="hf-generate-early-exit", families=EXITS, least_window=LEAST_WINDOW)
