"""mlx-lm's speculative generation on the CPU, from checkpoints.

MLX has wheels for Linux under its extra `cpu`. mlx-lm drafts a chain with a second model and keeps it as long as the
target's own choice is the same token; a request without a draft is generated without speculation.
"""

import json
from collections.abc import Callable, Iterator, Sequence
from functools import lru_cache
from itertools import islice
from pathlib import Path
from typing import Any

import mlx.core as mx
from mlx_lm.generate import generate_step, speculative_generate_step
from mlx_lm.sample_utils import make_sampler
from mlx_lm.utils import load_model

from specverify.backends.adapt import Generated, blackbox
from specverify.backends.adapt.models import OPEN_MODELS
from specverify.reference.abilities import Chains

DRAFTS = 3
"""Drafted tokens of a round."""


def generate_with_mlx(
    prompt_ids: list[int], max_new_tokens: int, checkpoint: str, draft_checkpoint: str | None,
    temperature: float = 0.0, top_k: int = 0, seed: int = 0, stops: Sequence[int] = (),
) -> Generated:  # fmt: skip
    """Generate with the draft model, or without speculation where there is none."""
    target = _load(checkpoint)
    draft = None if draft_checkpoint is None else _load(draft_checkpoint)
    mx.random.seed(seed)  # after the models are made: MLX draws their first weights from the same generator
    prompt = mx.array(prompt_ids)
    sampler = Sampler(make_sampler(temperature, top_k=top_k))
    tokens = []
    by_position = [0] * DRAFTS
    position = 0
    steps: Iterator[tuple[Any, ...]]
    if draft is None:
        steps = generate_step(prompt, target, max_tokens=max_new_tokens, sampler=sampler)
    else:
        steps = speculative_generate_step(
            prompt, target, draft, num_draft_tokens=DRAFTS, max_tokens=max_new_tokens,
            sampler=sampler,
        )  # fmt: skip
    # mlx-lm leaves the end of the text to whoever reads the tokens.
    for token, _, *draft_flag in islice(steps, max_new_tokens):
        tokens.append(int(token))
        # Each chain ends with a token of the target's own.
        if draft_flag == [True]:
            by_position[position] += 1
            position += 1
        else:
            position = 0
        if tokens[-1] in stops:
            break
    steps.close()  # type: ignore[attr-defined]
    return Generated(tokens, None, sampler.num_drafted, sum(by_position), by_position)


class Sampler:
    """A sampler that counts the drafted tokens which the target scores.

    In speculation the target's rows of a round are sampled in one call: one for each drafted token, and one more. The
    draft's own rows, and those without speculation, are sampled one by one.
    """

    def __init__(self, sample: Callable[[Any], Any]) -> None:
        self._sample = sample
        self.num_drafted = 0

    def __call__(self, logprobs: Any) -> Any:
        """The tokens for rows of log-probabilities [rows, vocabulary]."""
        self.num_drafted += logprobs.shape[0] - 1
        return self._sample(logprobs)


@lru_cache(maxsize=2 * OPEN_MODELS)
def _load(checkpoint: str) -> Any:
    """The model in the directory, in MLX's class for its family.

    mlx-lm 0.32.2 reads a Llama's rotary embedding from the fields that transformers wrote before version 5
    (`tests/strangers/found`), so these are given beside the file.
    """
    rope = json.loads((Path(checkpoint) / "config.json").read_text())["rope_parameters"]
    model, _ = load_model(Path(checkpoint), model_config={"rope_theta": rope["rope_theta"], "rope_scaling": rope})
    return model


open_generated = blackbox(
    generate_with_mlx,
    name="mlx-lm",
    families=("llama", "qwen2", "qwen3"),
    least_window=0,
    chains=Chains(DRAFTS, "law", "match"),
)
