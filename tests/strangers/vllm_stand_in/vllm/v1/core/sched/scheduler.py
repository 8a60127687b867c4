"""The part of the engine that knows requests: it adds what was sampled to their texts, and ends them."""

from dataclasses import dataclass, field
from types import SimpleNamespace
from typing import Any

import numpy as np

from vllm.running import Running


@dataclass
class SchedulerOutput:
    num_scheduled_tokens: dict[str, int]
    scheduled_spec_decode_tokens: dict[str, list[int]]
    finished_req_ids: set[str]


@dataclass
class ModelRunnerOutput:
    """The chosen tokens of each request, and the rows of logits that chose them."""

    sampled_token_ids: dict[str, list[int]]
    rows: dict[str, Any]


@dataclass
class EngineCoreOutput:
    request_id: str
    new_token_ids: list[int]
    new_logprobs: Any = None
    finish_reason: str | None = None
    stop_reason: int | None = None


@dataclass
class EngineCoreOutputs:
    outputs: list[EngineCoreOutput] = field(default_factory=list)


class Scheduler:
    def __init__(self, model_config: Any, max_model_len: int) -> None:
        self.vllm_config = SimpleNamespace(model_config=model_config)
        self.max_model_len = max_model_len
        self.requests: dict[str, Running] = {}

    def update_from_output(
        self, scheduler_output: SchedulerOutput, model_runner_output: ModelRunnerOutput
    ) -> dict[int, EngineCoreOutputs]:
        outputs = EngineCoreOutputs()
        for name in scheduler_output.num_scheduled_tokens:
            request = self.requests[name]
            before, entries = len(request.text), len(request.entries)
            tokens = model_runner_output.sampled_token_ids[name]
            for token, row in zip(tokens, model_runner_output.rows[name], strict=False):
                if request.take(token, row):
                    request.is_over = True
                    break
            reason = None if not request.is_over else "stop" if request.stop_reason is not None else "length"
            logprobs = [[next(iter(entry.values())).logprob] for entry in request.entries[entries:]]
            reported = None if request.rows.settings.logprobs is None else SimpleNamespace(logprobs=np.array(logprobs))
            outputs.outputs.append(EngineCoreOutput(name, request.text[before:], reported, reason, request.stop_reason))
            if request.is_over:
                del self.requests[name]
        return {0: outputs}
