"""The class `LLM`: chains of drafted tokens, verified by rejection sampling with the draft's best token as its law."""

from collections.abc import Iterable
from dataclasses import dataclass, field, replace
from types import SimpleNamespace
from typing import Any, Literal

import torch

from specverify.backends.adapt.models import open_network
from tests.strangers.stand_in_heads import HEADS, Head
from tests.strangers.stand_in_parts import logits_behind, looked_up

from .config.speculative import SpeculativeConfig
from .faults import has_fault
from .plugins import load_general_plugins
from .running import RequestOutput, RequestSpecDecodeMetrics, Rows, Running
from .sampling_params import SamplingParams
from .structured_output import advance, guide_of, legal_prefix, mask_rows
from .v1.core.sched.scheduler import ModelRunnerOutput, Scheduler, SchedulerOutput
from .v1.worker.gpu_model_runner import GPUModelRunner, SpecDecodeMetadata

CHUNK = 8
"""Tokens of a piece of a prompt, where prompts are prefilled in pieces."""


@dataclass
class EngineArgs:
    """The settings of an engine, which `LLM` takes by name."""

    model: str
    skip_tokenizer_init: bool = False
    structured_outputs_config: dict[str, Any] = field(default_factory=dict)
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
    logprobs_mode: Literal["raw_logits", "raw_logprobs", "processed_logits", "processed_logprobs"] = "raw_logprobs"
    disable_log_stats: bool = True
    per_request_spec_decode_metrics: Literal["none", "summary", "detailed"] = "none"
    speculative_config: dict[str, Any] | None = None


def loadable_network(checkpoint: str) -> Any:
    """The model of a checkpoint, with vLLM's method that loads other weights."""
    network = open_network(checkpoint)

    def load_weights(weights: Iterable[tuple[str, torch.Tensor]]) -> None:
        assert network.is_reloading
        if not has_fault("reloads-nothing"):
            network.load_state_dict(dict(weights), strict=False)

    network.load_weights = load_weights
    return network


class LLM:
    def __init__(self, model: str, **kwargs: Any) -> None:
        settings = EngineArgs(model, **kwargs)
        load_general_plugins()
        speculative_config = settings.speculative_config
        # Only an engine that has a tokenizer reads grammars.
        assert settings.skip_tokenizer_init or settings.structured_outputs_config["disable_any_whitespace"]
        assert not settings.disable_log_stats
        if speculative_config is None and settings.per_request_spec_decode_metrics != "none":
            # As vLLM 0.32.0 has it.
            raise ValueError("--per-request-spec-decode-metrics requires speculative decoding to be enabled")
        self._checkpoint = model
        self._network = loadable_network(model)
        self._speculation = None if speculative_config is None else SpeculativeConfig(**speculative_config)
        self._keeps_prefixes = bool(settings.enable_prefix_caching)
        self._is_chunked = settings.max_num_batched_tokens is not None
        self._kept: list[list[int]] = []
        self._is_processed = settings.logprobs_mode == "processed_logprobs"
        self._running: list[Running] = []
        self._cancelled: list[Running] = []
        runner = GPUModelRunner(self._network)
        if self._speculation is not None:
            folder = self._speculation.model or (model if self._speculation.method == "mtp" else None)
            if folder is not None:
                open_draft = HEADS.get(self._speculation.method, loadable_network)
                runner.drafter = SimpleNamespace(model=open_draft(folder))
        self._runner = runner
        config = self._network.config
        model_config = SimpleNamespace(get_vocab_size=lambda: config.vocab_size, dtype=torch.float32)
        blocks = (settings.num_gpu_blocks_override or 2) - 1
        self._page = settings.block_size or 1
        self._scheduler = Scheduler(model_config, settings.max_model_len or config.max_position_embeddings, blocks)
        self._cancelled_names: set[str] = set()
        worker = SimpleNamespace(worker=SimpleNamespace(model_runner=runner))
        self.llm_engine = SimpleNamespace(
            add_request=self._add,
            step=self._step,
            abort_request=self._abort,
            has_unfinished_requests=lambda: bool(self._running),
            model_executor=SimpleNamespace(driver_worker=worker),
            engine_core=SimpleNamespace(shutdown=lambda: None, engine_core=SimpleNamespace(scheduler=self._scheduler)),
        )

    def reset_prefix_cache(self) -> bool:
        self._kept.clear()
        return True

    def _add(self, request_id: str, prompt: dict[str, list[int]], params: SamplingParams) -> str:
        text, settings = list(prompt["prompt_token_ids"]), params
        length = len(text)
        guide = guide_of(params, self._checkpoint, self._network.config.vocab_size)
        before = self._running[-1] if self._running else None
        rows = Rows(settings, is_processed=self._is_processed)
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
        running = Running(request_id, text, rows, length, guide=guide)
        self._running.append(running)
        self._scheduler.requests[request_id] = running
        return request_id

    def _abort(self, request_ids: list[str]) -> None:
        self._cancelled += [request for request in self._running if request.name in request_ids]
        self._running = [request for request in self._running if request.name not in request_ids]
        for name in request_ids:
            self._scheduler.requests.pop(name, None)
        self._cancelled_names |= set(request_ids)

    @torch.no_grad()
    def _step(self) -> list[RequestOutput]:
        """A verification of every request inside."""
        stepped = list(self._running)
        if has_fault("stale-without-drafts") and len(stepped) > 1 and not self._most_drafted(len(stepped)):
            stepped[-1].text[1] = stepped[-1].text[0]
        if has_fault("stale-after-preemption") and len(stepped) > 1 and not self._has_pages_for(stepped):
            stepped[-1].text[1] = stepped[-1].text[0]
        most = self._most_drafted(len(stepped))
        drafts = {request.name: self._drafted(request.text)[:most] for request in stepped}
        if has_fault("stale-beside") and len(stepped) > 1:
            vocabulary = self._network.config.vocab_size
            drafts = {name: [(token + 1) % vocabulary for token in draft] for name, draft in drafts.items()}
        for request in stepped:
            if request.guide is not None:
                drafts[request.name] = legal_prefix(request.guide, request.text[-1], drafts[request.name])
        rows = {
            request.name: logits_behind(self._network, request.text + drafts[request.name])[len(request.text) - 1 :]
            for request in stepped
        }
        for request in stepped:
            if request.guide is not None:
                name = request.name
                rows[name] = mask_rows(request.guide, request.text[-1], drafts[name], rows[name])
        self._runner.begin(stepped)
        metadata = SpecDecodeMetadata(
            torch.tensor([token for draft in drafts.values() for token in draft]),
            [len(draft) for draft in drafts.values()],
        )
        sampled = self._runner._sample(torch.cat(list(rows.values())), metadata).sampled_token_ids
        chosen = {
            request.name: [token for token in row if token >= 0]
            for request, row in zip(stepped, sampled.tolist(), strict=True)
        }
        for request in stepped:
            if request.guide is not None:
                advance(request.guide, chosen[request.name])
            if drafts[request.name]:
                self._count(request, len(drafts[request.name]), len(chosen[request.name]) - 1)
        output = SchedulerOutput(dict.fromkeys(drafts, 1), drafts, self._cancelled_names)
        self._cancelled_names = set()
        self._scheduler.update_from_output(output, ModelRunnerOutput(chosen, rows))
        self._running = [request for request in stepped if not request.is_over]
        self._kept += [request.text for request in stepped if request.is_over]
        outputs = [request.output() for request in stepped]
        if has_fault("answers-swapped") and len(outputs) > 1:
            outputs[0].request_id, outputs[1].request_id = outputs[1].request_id, outputs[0].request_id
        if has_fault("last-dropped") and len(outputs) > 1:
            outputs = [output for output, request in zip(outputs, stepped, strict=True) if not request.is_over]
        return outputs

    def _most_drafted(self, requests: int) -> int:
        """The most drafted tokens of a request beside others."""
        speculation = self._speculation
        if speculation is None:
            return 0
        schedule = speculation.num_speculative_tokens_per_batch_size or []
        return next(
            (most for first, last, most in schedule if first <= requests <= last), speculation.num_speculative_tokens
        )

    def _has_pages_for(self, requests: list[Running]) -> bool:
        """Whether the pool has pages for all of the requests: else one of them would be preempted."""
        pages = sum(-(-len(request.text) // self._page) for request in requests)
        free_pages: int = self._scheduler.kv_cache_manager.block_pool.get_num_free_blocks()
        return pages <= free_pages

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
        if speculation.method in ("ngram", "suffix"):
            return looked_up(text, speculation.num_speculative_tokens)
        if speculation.method in HEADS:
            head: Head = self._runner.drafter.model
            return head.best_tokens(self._network, text, speculation.num_speculative_tokens)
        tokens: list[int] = []
        for _ in range(speculation.num_speculative_tokens):
            tokens.append(int(logits_behind(self._runner.drafter.model, text + tokens)[-1].argmax()))
        return tokens
