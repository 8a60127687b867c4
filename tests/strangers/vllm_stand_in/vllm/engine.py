"""The class `LLM`: chains of drafted tokens, verified by rejection sampling with the draft's best token as its law."""

from collections.abc import Sequence
from dataclasses import dataclass, field, replace
from types import SimpleNamespace
from typing import Any, Literal

import torch

from specverify.backends.adapt.models import open_network
from tests.strangers.stand_in_parts import Head, law_of, logits_behind, looked_up

from .config.speculative import SpeculativeConfig
from .faults import has_fault
from .sampling_params import SamplingParams

CHUNK = 8
"""Tokens of a piece of a prompt, where prompts are prefilled in pieces."""


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
    spec_decode_metrics: "RequestSpecDecodeMetrics | None" = None


@dataclass
class RequestOutput:
    request_id: str
    outputs: list[CompletionOutput]


@dataclass
class RequestSpecDecodeMetrics:
    num_spec_tokens: int
    histogram: list[int] = field(default_factory=list)
    num_draft_tokens: int = 0


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


@dataclass
class Running:
    """A request inside the engine: its text so far, its log-probabilities, and its counts."""

    name: str
    text: list[int]
    rows: Rows
    length: int
    entries: list[dict[int, Logprob]] = field(default_factory=list)
    counts: RequestSpecDecodeMetrics | None = None
    is_over: bool = False

    @property
    def tokens(self) -> list[int]:
        return self.text[self.length :]

    def take(self, token: int, row: torch.Tensor) -> bool:
        """Append a token; whether the text has ended."""
        self.text.append(token)
        self.entries.append({token: Logprob(logprob_of(row, token))})
        ended = token in self.rows.settings.stop_token_ids
        if ended and has_fault("stop-left-out"):
            self.text.pop()
            self.entries.pop()
        return ended or len(self.tokens) == self.rows.settings.max_tokens

    def output(self) -> RequestOutput:
        reason = "stop" if self.is_over else None
        counts = self.counts if self.is_over else None
        answer = CompletionOutput(
            0, "", self.tokens, None, self.entries if self.rows.settings.logprobs is not None else None, reason
        )
        answer.spec_decode_metrics = counts
        return RequestOutput(self.name, [answer])


@dataclass
class EngineArgs:
    """The settings of an engine, which `LLM` takes by name."""

    model: str
    skip_tokenizer_init: bool = False
    dtype: str = "auto"
    seed: int = 0
    enforce_eager: bool = False
    gpu_memory_utilization: float = 0.92
    block_size: int | None = None
    num_gpu_blocks_override: int | None = None
    max_model_len: int | None = None
    max_num_seqs: int | None = None
    enable_prefix_caching: bool | None = None
    max_num_batched_tokens: int | None = None
    async_scheduling: bool | None = None
    disable_log_stats: bool = True
    per_request_spec_decode_metrics: Literal["none", "summary", "detailed"] = "none"
    speculative_config: dict[str, Any] | None = None


class LLM:
    def __init__(self, model: str, **kwargs: Any) -> None:
        settings = EngineArgs(model, **kwargs)
        speculative_config = settings.speculative_config
        assert settings.skip_tokenizer_init
        assert not settings.disable_log_stats
        if speculative_config is None and settings.per_request_spec_decode_metrics != "none":
            # As vLLM 0.32.0 has it.
            raise ValueError("--per-request-spec-decode-metrics requires speculative decoding to be enabled")
        self._network = open_network(model)
        self._speculation = None if speculative_config is None else SpeculativeConfig(**speculative_config)
        self._keeps_prefixes = bool(settings.enable_prefix_caching)
        self._is_chunked = settings.max_num_batched_tokens is not None
        self._kept: list[list[int]] = []
        self._running: list[Running] = []
        self._cancelled: list[Running] = []
        runner = SimpleNamespace(vllm_config=SimpleNamespace(), get_model=lambda: self._network)
        if self._speculation is not None and self._speculation.model is not None:
            is_head = self._speculation.method == "eagle3"
            open_draft = Head if is_head else open_network
            runner.drafter = SimpleNamespace(model=open_draft(self._speculation.model))
        self._runner = runner
        worker = SimpleNamespace(worker=SimpleNamespace(model_runner=runner))
        self.llm_engine = SimpleNamespace(
            add_request=self._add,
            step=self._step,
            abort_request=self._abort,
            has_unfinished_requests=lambda: bool(self._running),
            model_executor=SimpleNamespace(driver_worker=worker),
            engine_core=SimpleNamespace(shutdown=lambda: None),
        )

    def reset_prefix_cache(self) -> bool:
        self._kept.clear()
        return True

    def _add(self, request_id: str, prompt: dict[str, list[int]], params: SamplingParams) -> str:
        text, settings = list(prompt["prompt_token_ids"]), params
        length = len(text)
        before = self._running[-1] if self._running else None
        rows = Rows(settings)
        rows.generator.manual_seed(settings.seed or 0)
        if before is not None:
            if has_fault("seed-shared"):
                rows.generator.manual_seed(before.rows.settings.seed or 0)
            if has_fault("coins-in-turn"):
                rows.generator = before.rows.generator
            if has_fault("settings-of-another"):
                rows.settings = replace(settings, temperature=before.rows.settings.temperature)
            if has_fault("stops-of-another"):
                rows.settings = replace(settings, stop_token_ids=before.rows.settings.stop_token_ids)
            if has_fault("prefix-of-another") and before.text[:1] == text[:1]:
                text[: min(2, length)] = before.text[: min(2, length)]
        if has_fault("cancelled-kv") and self._cancelled:
            text[:0] = self._cancelled[-1].text[:1]
            length += 1
        if has_fault("stale-prefix-cache") and self._keeps_prefixes and self._kept:
            text[0] = self._kept[-1][0]
        if has_fault("chunk-lost") and self._is_chunked and length > CHUNK:
            text[-1] = text[0]
        self._running.append(Running(request_id, text, rows, length))
        return request_id

    def _abort(self, request_ids: list[str]) -> None:
        self._cancelled += [request for request in self._running if request.name in request_ids]
        self._running = [request for request in self._running if request.name not in request_ids]

    @torch.no_grad()
    def _step(self) -> list[RequestOutput]:
        """A verification of every request inside."""
        stepped = list(self._running)
        for request in stepped:
            for token, row in self._round(request):
                if request.take(token, row):
                    request.is_over = True
                    break
        self._running = [request for request in stepped if not request.is_over]
        self._kept += [request.text for request in stepped if request.is_over]
        outputs = [request.output() for request in stepped]
        if has_fault("answers-swapped") and len(outputs) > 1:
            outputs[0].request_id, outputs[1].request_id = outputs[1].request_id, outputs[0].request_id
        if has_fault("last-dropped") and len(outputs) > 1:
            outputs = [output for output, request in zip(outputs, stepped, strict=True) if not request.is_over]
        return outputs

    def _round(self, request: Running) -> list[tuple[int, torch.Tensor]]:
        """The tokens of one verification, each with its row of logits."""
        text, rows = request.text, request.rows
        drafted = self._drafted(text)
        if has_fault("stale-beside") and len(self._running) > 1:
            drafted = [(token + 1) % self._network.config.vocab_size for token in drafted]
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
        if drafted:
            self._count(request, len(drafted), len(emitted) - 1)
        return emitted

    def _count(self, request: Running, drafted: int, accepted: int) -> None:
        """Count a verification of drafted tokens."""
        assert self._speculation is not None
        most = self._speculation.num_speculative_tokens
        request.counts = request.counts or RequestSpecDecodeMetrics(most, [0] * (most + 1))
        request.counts.histogram[accepted] += 1
        request.counts.num_draft_tokens += 0 if has_fault("counts-too-many") else drafted

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


def logprob_of(row: torch.Tensor, token: int) -> float:
    """The log-probability of a token of the model's own logits."""
    return float(row.double().log_softmax(-1)[token]) / (2.0 if has_fault("logprobs-halved") else 1.0)
