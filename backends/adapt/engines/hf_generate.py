"""transformers' `generate`, which verifies a chain of tokens in one forward.

The candidates come from an assistant model, from the text itself (prompt lookup), from an assistant with a tokenizer of
its own (universal assisted decoding), or from the target's own first layers (early exit).
"""

import copy
from collections.abc import Sequence
from functools import lru_cache
from typing import Any

import torch
from torch import Tensor
from transformers.generation.candidate_generator import AssistantVocabTranslatorCache

from backends.adapt import blackbox, words_tokenizer
from backends.adapt.models import OPEN_MODELS
from reference.family import FAMILIES

LOOKED_UP = 3
"""Most tokens that prompt lookup proposes in a round."""

LEAST_WINDOW = 2
"""The narrowest window: transformers 5.23 is wrong with a sliding window of one token (`tests/strangers/found`)."""

EXITS = tuple(family for family in FAMILIES if family != "llama4")
"""Families with early exit: transformers 5.23 does not find the layers of Llama 4 (`tests/strangers/found`)."""


def assisted(
    prompt_ids: list[int], max_new_tokens: int, model: Any, draft_model: Any, temperature: float = 0.0, top_k: int = 0,
    top_p: float = 1.0, min_p: float = 0.0, stops: Sequence[int] = (),
) -> Tensor:  # fmt: skip
    """Assisted generation with a draft of the same vocabulary."""
    how = {} if draft_model is None else {"assistant_model": draft_model}
    return _generated(model, prompt_ids, max_new_tokens, _processing(temperature, top_k, top_p, min_p), stops, how)


def lookup(
    prompt_ids: list[int], max_new_tokens: int, model: Any, temperature: float = 0.0, top_k: int = 0,
    top_p: float = 1.0, min_p: float = 0.0, stops: Sequence[int] = (),
) -> Tensor:  # fmt: skip
    """Assisted generation whose candidates follow an earlier occurrence of the last tokens."""
    how = {"prompt_lookup_num_tokens": LOOKED_UP}
    return _generated(model, prompt_ids, max_new_tokens, _processing(temperature, top_k, top_p, min_p), stops, how)


def early_exit(
    prompt_ids: list[int], max_new_tokens: int, model: Any, temperature: float = 0.0, top_k: int = 0,
    top_p: float = 1.0, min_p: float = 0.0, stops: Sequence[int] = (),
) -> Tensor:  # fmt: skip
    """Assisted generation whose candidates come from the first layer of the target."""
    how = {"assistant_early_exit": 1}
    return _generated(model, prompt_ids, max_new_tokens, _processing(temperature, top_k, top_p, min_p), stops, how)


def universal(
    prompt_ids: list[int], max_new_tokens: int, model: Any, draft_model: Any, temperature: float = 0.0, top_k: int = 0,
    top_p: float = 1.0, min_p: float = 0.0, stops: Sequence[int] = (),
) -> Tensor:  # fmt: skip
    """Assisted generation with a draft whose tokenizer numbers the same texts in another order."""
    how = {} if draft_model is None else _stranger(draft_model, bool(temperature))
    return _generated(model, prompt_ids, max_new_tokens, _processing(temperature, top_k, top_p, min_p), stops, how)


@lru_cache(maxsize=OPEN_MODELS)
def _stranger(draft: Any, sampled: bool) -> dict[str, Any]:
    """The arguments of `generate` for a draft with a tokenizer of its own.

    The draft has V + 1 tokens, since transformers refuses two tokenizers for vocabularies of one size. Token t of the
    target is token V - t of the draft, whose embedding and head have their rows in that order, so that the draft
    proposes the same texts as before; its token 0 is a text that the target does not have. transformers prunes the head
    of a sampled assistant in place, which is why greedy and sampled calls have a copy each.
    """
    backwards = copy.deepcopy(draft)
    for layer in (backwards.get_input_embeddings(), backwards.get_output_embeddings()):
        rows = layer.weight.data.flip(0)
        layer.weight = torch.nn.Parameter(torch.cat([torch.zeros_like(rows[:1]), rows]), requires_grad=False)
    backwards.get_input_embeddings().num_embeddings += 1
    backwards.get_output_embeddings().out_features += 1
    backwards.config.vocab_size += 1
    backwards.vocab_size = backwards.model.vocab_size = backwards.config.vocab_size
    texts = [str(token) for token in range(draft.config.vocab_size)]
    told, drafted = words_tokenizer(texts), words_tokenizer(["unheard", *texts[::-1]])
    if sampled:
        # `generate` prunes the head at its first call, which draws random numbers; here they are not the request's.
        with torch.random.fork_rng(devices=[]):
            AssistantVocabTranslatorCache.get_translator(told, drafted, len(texts), backwards, True)
    return {"assistant_model": backwards, "tokenizer": told, "assistant_tokenizer": drafted}


def _processing(temperature: float, top_k: int, top_p: float, min_p: float) -> dict[str, Any]:
    """The arguments of `generate` for greedy decoding at temperature 0, or for sampling."""
    if not temperature:
        return {"do_sample": False}
    return {"do_sample": True, "temperature": temperature, "top_k": top_k, "top_p": top_p, "min_p": min_p or None}


def _generated(
    model: Any, prompt_ids: list[int], room: int, processing: dict[str, Any], stops: Sequence[int], how: dict[str, Any]
) -> Tensor:
    """The tokens that `model` generates after the prompt, int64 [at most `room`]."""
    prompt = torch.tensor([prompt_ids])
    out = model.generate(
        prompt,
        attention_mask=torch.ones_like(prompt),  # without a mask, transformers takes each token 0 for padding
        max_new_tokens=room,
        eos_token_id=list(stops) or None,
        pad_token_id=0,
        **processing,
        **how,
    )
    tokens: Tensor = out[0, len(prompt_ids) :]
    return tokens


open_assisted = blackbox(assisted, name="hf-generate", least_window=LEAST_WINDOW)
open_lookup = blackbox(lookup, name="hf-generate-lookup", least_window=LEAST_WINDOW)
open_early_exit = blackbox(early_exit, name="hf-generate-early-exit", families=EXITS, least_window=LEAST_WINDOW)
open_universal = blackbox(universal, name="hf-generate-universal", least_window=0)
