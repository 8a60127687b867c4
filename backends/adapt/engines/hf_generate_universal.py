"""transformers' universal assisted generation: assistants of other tokenizers.

The draft of a case has the target's vocabulary. Here the same words stand in its tokenizer in reverse order, behind a
word that the target does not know, and so do the rows of its embedding and head: its ids are others, its laws nearly
the same. Candidates travel as text. Decoding is greedy: where it samples, transformers 5.23 draws from another law than
the target's (`tests/strangers/found/transformers_universal_law.py`).
"""

from collections.abc import Sequence
from copy import deepcopy
from functools import lru_cache
from typing import Any

import torch

from specverify.backends.adapt import Generated, blackbox
from specverify.backends.adapt.engines.hf_generate import generate, processing
from specverify.backends.adapt.models import OPEN_MODELS, words_tokenizer
from specverify.reference.family import FAMILIES as EVERY

FAMILIES = tuple(family for family in EVERY if family not in ("llama4", "gemma2") and not EVERY[family].rare)
"""Families whose layers need no window: transformers 5.23 broke off in a drawn case whose assistant had one."""


def universal(
    prompt_ids: list[int], max_new_tokens: int, model: Any, draft_model: Any, stops: Sequence[int] = ()
) -> Generated:
    """Assisted generation with a draft whose tokenizer numbers the words otherwise."""
    options = {}
    if draft_model is not None:
        size = model.config.vocab_size
        options = {
            "assistant_model": _renumber_tokens(draft_model),
            "tokenizer": _tokenizer(size, False),
            "assistant_tokenizer": _tokenizer(size, True),
        }
    return generate(model, prompt_ids, max_new_tokens, processing(0.0, 0, 1.0, 0.0), stops, options)


@lru_cache(maxsize=OPEN_MODELS)
def _tokenizer(size: int, of_draft: bool) -> Any:
    texts = [str(token) for token in range(size)]
    return words_tokenizer(["unknown", *texts[::-1]] if of_draft else texts)


@lru_cache(maxsize=OPEN_MODELS)
def _renumber_tokens(draft: Any) -> Any:
    """A copy of the draft whose token n is the draft's token n from the end; token 0 is the word beyond its own."""
    renumbered_draft = deepcopy(draft)
    size = draft.config.vocab_size
    with torch.random.fork_rng(devices=[]):
        renumbered_draft.resize_token_embeddings(size + 1, mean_resizing=False)
    for new, old in (
        (renumbered_draft.get_input_embeddings(), draft.get_input_embeddings()),
        (renumbered_draft.get_output_embeddings(), draft.get_output_embeddings()),
    ):
        with torch.no_grad():
            new.weight.copy_(torch.cat([old.weight.mean(0, keepdim=True), old.weight.flip(0)]))
    return renumbered_draft.requires_grad_(False)


open_universal = blackbox(universal, name="hf-generate-universal", families=FAMILIES, least_window=0)
