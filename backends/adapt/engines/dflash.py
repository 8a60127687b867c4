"""dflash: blocks drafted by block diffusion from the target's hidden states.

A trained DFlash draft fits one target. The draft here has random weights and the sizes of the target that a case draws,
so that greedy blocks are seldom accepted, and sampled blocks are as far as the two laws overlap.
"""

from collections.abc import Sequence
from functools import lru_cache
from typing import Any

import torch
from dflash.model import DFlashDraftModel, dflash_generate
from transformers import Qwen3Config

from specverify.backends.adapt import Generated, blackbox
from specverify.backends.adapt.engines.hf_generate import TRIED_FAMILIES
from specverify.backends.adapt.generated import generated_with_counts, rows_of_forwards
from specverify.backends.adapt.models import OPEN_MODELS

BLOCK = 4
"""Tokens of a block: the pending root and three drafts."""


def generate_with_dflash(
    prompt_ids: list[int], max_new_tokens: int, model: Any, temperature: float = 0.0, top_k: int = 0,
    top_p: float = 1.0, stops: Sequence[int] = (),
) -> Generated:  # fmt: skip
    """Generate with a random DFlash draft for the target."""
    with rows_of_forwards(model) as rows:
        out = dflash_generate(
            _draft_for(model), model, torch.tensor([prompt_ids]), max_new_tokens, list(stops) or None, temperature,
            top_p, top_k,
        )  # fmt: skip
    return generated_with_counts(out[0, len(prompt_ids) :], rows, len(prompt_ids))


@lru_cache(maxsize=OPEN_MODELS)
def _draft_for(model: Any) -> DFlashDraftModel:
    """A draft of one layer that reads the target's last layer."""
    target = model.config
    config = Qwen3Config(
        vocab_size=target.vocab_size,
        hidden_size=target.hidden_size,
        intermediate_size=2 * target.hidden_size,
        num_hidden_layers=1,
        num_attention_heads=2,
        num_key_value_heads=1,
        head_dim=8,
        num_target_layers=target.num_hidden_layers,
        max_position_embeddings=target.max_position_embeddings,
        dflash_config={
            "block_size": BLOCK,
            "mask_token_id": target.vocab_size - 1,
            "target_layer_ids": [target.num_hidden_layers - 1],
        },
    )
    # The draft's weights come from a generator of their own, so that a call leaves the global one as it was seeded.
    with torch.random.fork_rng(devices=[]):
        torch.manual_seed(0)
        draft = DFlashDraftModel(config).eval().requires_grad_(False)
    return draft


open_generated = blackbox(generate_with_dflash, name="dflash", families=TRIED_FAMILIES)
