"""flashspec's engine: a draft model, or prompt lookup where a request has none.

flashspec verifies chains and chooses between its drafters by a bandit, which has one arm here. `top_p` is declared by
none of its adapters: the lossless variants of flashspec 0.3.1 ignore it (`tests/strangers/found`).
"""

from collections.abc import Sequence
from typing import Any

import torch
from flashspec import BanditConfig, FlashSpecConfig, SamplingConfig, SpeculativeEngine
from flashspec.engine.hf_drafter import HuggingFaceDrafter
from flashspec.engine.ngram import NgramDrafter
from flashspec.engine.verifier import TargetModel
from torch import Tensor

from specverify.backends.adapt import Generated, blackbox

GAMMA = 3
"""Drafted tokens of a step."""


def generate_fixed(
    prompt_ids: list[int], max_new_tokens: int, model: Any, draft_model: Any, temperature: float = 0.0, seed: int = 0,
    stops: Sequence[int] = (),
) -> Generated:  # fmt: skip
    """Generate with one arm: the draft model, or prompt lookup without one."""
    return _generate("bandit", prompt_ids, max_new_tokens, model, draft_model, temperature, seed, stops)


def generate_composite(
    prompt_ids: list[int], max_new_tokens: int, model: Any, draft_model: Any, temperature: float = 0.0, seed: int = 0,
    stops: Sequence[int] = (),
) -> Generated:  # fmt: skip
    """Generate with flashspec's own choice: prompt lookup where the text has a match, else the draft model."""
    strategy = "bandit" if draft_model is None else "composite-g6-f2"
    return _generate(strategy, prompt_ids, max_new_tokens, model, draft_model, temperature, seed, stops)


def _generate(
    strategy: str, prompt_ids: list[int], room: int, model: Any, draft_model: Any, temperature: float, seed: int,
    stops: Sequence[int],
) -> Generated:  # fmt: skip
    """The new tokens, int64 [at most `room`], and the counts of the engine's own steps."""
    cpu = torch.device("cpu")
    drafter = (
        NgramDrafter()
        if draft_model is None
        else HuggingFaceDrafter("draft", cpu, temperature=temperature, model=draft_model)
    )
    config = FlashSpecConfig(
        device="cpu",
        dtype="float32",
        drafter_strategy=strategy,
        compile=False,
        bandit=BanditConfig(n_arms=1),
        sampling=SamplingConfig(
            gamma=GAMMA, temperature=temperature, seed=seed, variant="rejection" if temperature else "greedy"
        ),
    )
    engine = SpeculativeEngine(config, [drafter], TargetModel("target", cpu, torch.float32, model=model))
    result = engine.generate(torch.tensor([prompt_ids]), room, tuple(stops))
    tokens: Tensor = result.output_ids[0]
    steps = result.arm_steps
    # The engine fills a row behind its end with -1.
    return Generated(
        tokens[tokens >= 0],
        proposed=sum(step.proposed for step in steps),
        accepted=sum(step.accepted for step in steps),
    )


FAMILIES = ("llama", "pangu", "qwen2", "qwen3", "mistral", "gemma2")
"""Families whose models may have no window or chunk: flashspec 0.3.1 crops their caches without recording their past,
which transformers 5 refuses (`tests/strangers/found`)."""

open_fixed = blackbox(generate_fixed, name="flashspec", families=FAMILIES, least_window=0)
open_composite = blackbox(generate_composite, name="flashspec-composite", families=FAMILIES, least_window=0)
