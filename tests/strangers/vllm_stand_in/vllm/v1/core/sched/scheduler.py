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


class BlockPool:
    """The pages that no caller of its own has taken; requests take none here."""

    def __init__(self, blocks: int) -> None:
        self.free = blocks

    def get_num_free_blocks(self) -> int:
        return self.free

    def get_new_blocks(self, num_blocks: int) -> list[int]:
        assert 0 <= num_blocks <= self.free
        self.free -= num_blocks
        return list(range(num_blocks))

    def free_blocks(self, ordered_blocks: list[int]) -> None:
        self.free += len(ordered_blocks)


class Scheduler:
    def __init__(self, model_config: Any, max_model_len: int, blocks: int) -> None:
        self.kv_cache_manager = SimpleNamespace(block_pool=BlockPool(blocks))
        self.kv_cache_config = SimpleNamespace(kv_cache_groups=[None])
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
