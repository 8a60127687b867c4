"""OpenVINO GenAI on the CPU, with a draft model, greedy and in float32.

Sampled requests with a draft are not asked for: openvino-genai 2026.4.1 breaks off in many of them, in a check of its
own (`tests/strangers/found/openvino_genai_sampled_draft.py`).
"""

from collections.abc import Sequence
from functools import lru_cache
from typing import Any

import numpy as np
import openvino
import openvino_genai as genai

from specverify.backends.adapt import Generated, blackbox, exported, save_openvino
from specverify.backends.adapt.export.openvino_folder import END, PRECISE

OPEN_PIPELINES = 32
"""Pipelines that stay open; one is open in a second or two."""

MOST_DRAFTED = 3
"""Tokens that are drafted in a round."""


@lru_cache(maxsize=OPEN_PIPELINES)
def pipeline(checkpoint: str, draft: str | None) -> Any:
    """An open pipeline, with a draft's checkpoint or None."""
    draft_options = {} if draft is None else {"draft_model": genai.draft_model(_folder(draft), "CPU", **PRECISE)}
    return genai.LLMPipeline(_folder(checkpoint), "CPU", **PRECISE, **draft_options)


def _folder(checkpoint: str) -> str:
    return str(exported(save_openvino, checkpoint))


def settings(max_new_tokens: int, stops: Sequence[int], drafts: bool) -> Any:
    """The configuration of a greedy request."""
    config = genai.GenerationConfig()
    config.max_new_tokens = max_new_tokens
    config.eos_token_id = END
    config.stop_token_ids = {*stops, END}
    if drafts:
        config.num_assistant_tokens = MOST_DRAFTED
    config.do_sample = False
    return config


def answer(open_pipeline: Any, prompt_ids: list[int], config: Any) -> Any:
    """The engine's result for a prompt: tokens of one sequence, and figures of the run."""
    prompt = openvino.Tensor(np.array([prompt_ids], dtype=np.int64))
    mask = openvino.Tensor(np.ones((1, len(prompt_ids)), dtype=np.int64))
    return open_pipeline.generate(genai.TokenizedInputs(prompt, mask), config)


def with_draft(
    prompt_ids: list[int], max_new_tokens: int, checkpoint: str, draft_checkpoint: str | None, stops: Sequence[int]
) -> Generated:
    """Speculation with a draft model."""
    config = settings(max_new_tokens, stops, draft_checkpoint is not None)
    result = answer(pipeline(checkpoint, draft_checkpoint), prompt_ids, config)
    counts = result.extended_perf_metrics  # None without a draft
    if counts is None:
        return Generated(list(result.tokens[0]), proposed=0, accepted=0)
    accepted, rejected = counts.get_num_accepted_tokens(), counts.get_num_rejected_tokens()
    # Its number of drafted tokens leaves out a first round: after a prompt of one token it tells 0 drafted, 3 accepted.
    proposed = max(counts.get_num_draft_tokens(), accepted + rejected)
    return Generated(list(result.tokens[0]), proposed=proposed, accepted=accepted)


open_draft = blackbox(
    with_draft,
    name="openvino-genai",
    families=("llama", "qwen2", "qwen3"),
    ropes=("default",),
    least_window=0,
    head_multiple=8,
)
