"""The class `LLM`: chains of drafted tokens, verified by rejection sampling with the draft's best token as its law."""

from collections.abc import Sequence
from dataclasses import dataclass, field
from types import SimpleNamespace
from typing import Any

import torch

from specverify.backends.adapt.models import open_network
from tests.strangers.stand_in_parts import Head, law_of, logits_behind, looked_up

from .config.speculative import SpeculativeConfig
from .faults import has_fault
from .sampling_params import SamplingParams


@dataclass
class Logprob:
    logprob: float
    rank: int | None = None
    decoded_token: str | None = None


@dataclass
class CompletionOutput:
    index: int
    text: str
    token_ids: Sequence[int]
    cumulative_logprob: float | None
    logprobs: list[dict[int, Logprob]] | None
    finish_reason: str | None = None
    stop_reason: int | str | None = None


@dataclass
class RequestOutput:
    request_id: str
    outputs: list[CompletionOutput]


@dataclass
class SpecDecodingStats:
    num_spec_tokens: int
    num_drafts: int = 0
    num_draft_tokens: int = 0
    num_accepted_tokens: int = 0
    num_accepted_tokens_per_pos: list[int] = field(default_factory=list)


@dataclass
class SchedulerStats:
    spec_decoding_stats: SpecDecodingStats | None = None


class StatLoggerManager:
    def __init__(self) -> None:
        self.stat_loggers: list[Any] = []

    def record(self, scheduler_stats: SchedulerStats | None, iteration_stats: Any) -> None:
        for stat_logger in self.stat_loggers:
            stat_logger.record(scheduler_stats, iteration_stats, mm_cache_stats=None, engine_idx=0)


@dataclass
class Rows:
    """The law of a request's tokens: its settings, and the generator that draws them."""

    settings: SamplingParams
    generator: torch.Generator = field(default_factory=torch.Generator)

    def law(self, logits: torch.Tensor, is_drafted: bool) -> torch.Tensor:
        settings = self.settings
        if is_drafted and has_fault("settings-unread"):
            settings = SamplingParams(temperature=1.0)
        return law_of(logits, settings.temperature, settings.top_k, settings.top_p)

    def draw(self, law: torch.Tensor) -> int:
        return int(torch.multinomial(law, 1, generator=self.generator))


class LLM:
    def __init__(
        self,
        model: str,
        *,
        skip_tokenizer_init: bool = False,
        dtype: str = "auto",
        seed: int = 0,
        enforce_eager: bool = False,
        gpu_memory_utilization: float = 0.92,
        block_size: int | None = None,
        num_gpu_blocks_override: int | None = None,
        max_model_len: int | None = None,
        max_num_seqs: int | None = None,
        enable_prefix_caching: bool | None = None,
        disable_log_stats: bool = True,
        speculative_config: dict[str, Any] | None = None,
    ) -> None:
        assert skip_tokenizer_init
        assert not disable_log_stats
        self._network = open_network(model)
        self._speculation = None if speculative_config is None else SpeculativeConfig(**speculative_config)
        runner = SimpleNamespace(vllm_config=SimpleNamespace(), get_model=lambda: self._network)
        if self._speculation is not None and self._speculation.model is not None:
            is_head = self._speculation.method == "eagle3"
            open_draft = Head if is_head else open_network
            runner.drafter = SimpleNamespace(model=open_draft(self._speculation.model))
        self._runner = runner
        worker = SimpleNamespace(worker=SimpleNamespace(model_runner=runner))
        self.llm_engine = SimpleNamespace(
            logger_manager=StatLoggerManager(),
            model_executor=SimpleNamespace(driver_worker=worker),
            engine_core=SimpleNamespace(shutdown=lambda: None),
        )

    @torch.no_grad()
    def generate(
        self, prompts: Sequence[dict[str, list[int]]], sampling_params: SamplingParams, *, use_tqdm: bool = True
    ) -> list[RequestOutput]:
        return [
            RequestOutput(f"{number}", [self._answer(prompt["prompt_token_ids"], sampling_params)])
            for number, prompt in enumerate(prompts)
        ]

    def _answer(self, prompt: list[int], settings: SamplingParams) -> CompletionOutput:
        rows = Rows(settings)
        rows.generator.manual_seed(settings.seed or 0)
        assert settings.max_tokens is not None
        text = list(prompt)
        entries: list[dict[int, Logprob]] = []
        ended = False
        while not ended and len(text) < len(prompt) + settings.max_tokens:
            for token, row in self._round(text, rows):
                text.append(token)
                entries.append({token: Logprob(logprob_of(row, token))})
                ended = token in settings.stop_token_ids
                if ended or len(text) == len(prompt) + settings.max_tokens:
                    break
        if ended and has_fault("stop-left-out"):
            text.pop()
            entries.pop()
        return CompletionOutput(0, "", text[len(prompt) :], None, entries if settings.logprobs is not None else None)

    def _round(self, text: list[int], rows: Rows) -> list[tuple[int, torch.Tensor]]:
        """The tokens of one verification, each with its row of logits."""
        drafted = self._drafted(text)
        logits = logits_behind(self._network, text + drafted)[len(text) - 1 :]
        emitted: list[tuple[int, torch.Tensor]] = []
        for token, row in zip(drafted, logits, strict=False):
            law = rows.law(row, True)
            if float(torch.rand((), generator=rows.generator, dtype=torch.float64)) < float(law[token]):
                emitted.append((token, row))
                continue
            if has_fault("rejection-kept") and len(emitted) < len(drafted) - 1:
                emitted.append((token, row))
                continue
            law[token] = 0.0
            emitted.append((rows.draw(law / law.sum()), row))
            break
        else:
            emitted.append((rows.draw(rows.law(logits[len(drafted)], False)), logits[len(drafted)]))
        accepted = len(emitted) - 1
        self._record(len(drafted), accepted)
        return emitted

    def _drafted(self, text: list[int]) -> list[int]:
        speculation = self._speculation
        if speculation is None:
            return []
        if speculation.method == "ngram":
            return looked_up(text, speculation.num_speculative_tokens)
        if speculation.method == "eagle3":
            head: Head = self._runner.drafter.model
            return head.best_tokens(self._network, text, speculation.num_speculative_tokens)
        tokens: list[int] = []
        for _ in range(speculation.num_speculative_tokens):
            tokens.append(int(logits_behind(self._runner.drafter.model, text + tokens)[-1].argmax()))
        return tokens

    def _record(self, drafted: int, accepted: int) -> None:
        if drafted:
            by_position = [int(place < accepted) for place in range(drafted)]
            total = drafted + 1 if has_fault("counts-too-many") else accepted
            stats = SpecDecodingStats(drafted, 1, drafted, total, by_position)
            self.llm_engine.logger_manager.record(SchedulerStats(stats), None)
        else:
            self.llm_engine.logger_manager.record(SchedulerStats(), None)


def logprob_of(row: torch.Tensor, token: int) -> float:
    """The log-probability of a token of the model's own logits."""
    return float(row.double().log_softmax(-1)[token]) / (2.0 if has_fault("logprobs-halved") else 1.0)
