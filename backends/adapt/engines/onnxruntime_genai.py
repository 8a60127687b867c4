"""ONNX Runtime GenAI, on a graph of its own model builder.

Drafts are a model of the same vocabulary, which genai_config.json names beside the target, or n-grams of the text.
"""

import json
import os
from collections.abc import Sequence
from functools import lru_cache
from typing import Any

import onnxruntime_genai as genai

from specverify.backends.adapt import Generated, blackbox, exported, save_onnx
from specverify.reference.abilities import Chains

OPEN_MODELS = 32
"""Models that stay open."""

MOST_DRAFTED, NGRAM_SIZE = 3, 2
"""Most tokens that are drafted in a round, and tokens that an n-gram must match."""


@lru_cache(maxsize=OPEN_MODELS)
def model(checkpoint: str, draft: str | None, stops: tuple[int, ...]) -> Any:
    """An open model, with a draft's checkpoint or None; the tokens of `stops` end a text."""
    folder = exported(save_onnx, checkpoint)
    settings = json.loads((folder / "genai_config.json").read_text())["model"]
    overrides: dict[str, Any] = {"eos_token_id": [*stops, *settings["eos_token_id"]]}
    if draft is not None:
        draft_folder = exported(save_onnx, draft)
        decoder = json.loads((draft_folder / "genai_config.json").read_text())["model"]["decoder"]
        # The draft's file is named as seen from the target's folder.
        overrides["draft"] = decoder | {"filename": os.path.relpath(draft_folder / decoder["filename"], folder)}
    config = genai.Config(str(folder))
    config.overlay(json.dumps({"model": overrides}))
    return genai.Model(config)


def generate(
    open_model: Any, prompt_ids: list[int], room: int, search: dict[str, Any], speculation: dict[str, int],
    stops: Sequence[int],
) -> Generated:  # fmt: skip
    """The tokens after the prompt, at most `room`, and the engine's own counts of its speculation."""
    parameters = genai.GeneratorParams(open_model)
    parameters.set_search_options(max_length=len(prompt_ids) + room, **search)
    if speculation:
        parameters.set_speculative_options(**speculation)
    generator = genai.Generator(open_model, parameters)
    generator.append_tokens(prompt_ids)
    tokens: list[int] = []
    # The engine's own sequence leaves out the token that ends a text; its next tokens hold it.
    while not generator.is_done() and not (tokens and tokens[-1] in stops):
        generator.generate_next_token()
        tokens += [int(token) for token in generator.get_next_tokens()]
    counts = generator.get_speculative_stats()
    return Generated(tokens, proposed=counts["draft_tokens_evaluated"], accepted=counts["draft_tokens_accepted"])


def search(temperature: float, top_k: int, seed: int) -> dict[str, Any]:
    """The search options of greedy decoding at temperature 0, or of sampling.

    top_p is not declared: version 0.18.0 draws tokens outside the nucleus of its own logits, 110 of 400 at a top_p of
    0.5 and temperature 0.1 in a vocabulary of 101 tokens (none of 400 in one of 19).
    """
    if not temperature:
        return {"do_sample": False}
    return {
        "do_sample": True,
        "temperature": temperature,
        "top_k": top_k,
        "top_p": 1.0,
        "random_seed": seed % 2**31,
    }


def with_draft(
    prompt_ids: list[int], max_new_tokens: int, checkpoint: str, draft_checkpoint: str | None, temperature: float,
    top_k: int, seed: int, stops: Sequence[int],
) -> Generated:  # fmt: skip
    """Speculation with a draft model."""
    speculation = {} if draft_checkpoint is None else {"max_draft_tokens": MOST_DRAFTED}
    open_model = model(checkpoint, draft_checkpoint, tuple(stops))
    options = search(temperature, top_k, seed)
    return generate(open_model, prompt_ids, max_new_tokens, options, speculation, stops)


def with_ngrams(
    prompt_ids: list[int], max_new_tokens: int, checkpoint: str, temperature: float, top_k: int, seed: int,
    stops: Sequence[int],
) -> Generated:  # fmt: skip
    """Speculation with n-grams of the text."""
    speculation = {"max_draft_tokens": MOST_DRAFTED, "ngram_size": NGRAM_SIZE}
    options = search(temperature, top_k, seed)
    return generate(model(checkpoint, None, tuple(stops)), prompt_ids, max_new_tokens, options, speculation, stops)


ABILITIES: dict[str, Any] = {
    "families": ("llama", "pangu", "mistral", "qwen2", "qwen3"),
    "ropes": ("default",),
    "least_window": 0,
    "head_multiple": 16,
}
"""Models that the builder writes unchanged; the engine's attention takes heads of 16, 32, ... alone."""

open_draft = blackbox(with_draft, name="onnxruntime-genai", chains=Chains(MOST_DRAFTED, "law"), **ABILITIES)
open_ngram = blackbox(with_ngrams, name="onnxruntime-genai-ngram", **ABILITIES)
