"""A request inside the engine, and what the engine answers of it."""

from collections.abc import Sequence
from dataclasses import dataclass, field

import torch

from specverify.backends.engine.guided.guide import Guide
from tests.strangers.stand_in_parts import law_of

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
    """The law of a request's tokens: its settings, the generator that draws them, and what is told of them."""

    settings: SamplingParams
    generator: torch.Generator = field(default_factory=torch.Generator)
    is_processed: bool = False

    def law(self, logits: torch.Tensor, is_drafted: bool) -> torch.Tensor:
        settings = self.settings
        if is_drafted and has_fault("settings-unread"):
            settings = SamplingParams(temperature=1.0)
        return law_of(logits, settings.temperature, settings.top_k, settings.top_p)

    def logprob(self, logits: torch.Tensor, token: int) -> float:
        """The log-probability of a token of the model's own logits, or of the law."""
        settings = self.settings
        row = logits.double().log_softmax(-1)
        if self.is_processed and settings.temperature and not has_fault("raw-where-processed"):
            row = law_of(logits, settings.temperature, settings.top_k, settings.top_p).log()
        return float(row[token]) / (2.0 if has_fault("logprobs-halved") else 1.0)

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
    guide: Guide | None = None
    is_over: bool = False

    prompt_embeds: None = None
    mm_features: tuple[()] = ()
    lora_request: None = None
    structured_output_request: None = None
    stop_reason: int | None = None

    @property
    def tokens(self) -> list[int]:
        return self.text[self.length :]

    @property
    def request_id(self) -> str:
        return self.name

    @property
    def sampling_params(self) -> SamplingParams:
        return self.rows.settings

    @property
    def prompt_token_ids(self) -> list[int]:
        return self.text[: self.length]

    @property
    def max_tokens(self) -> int | None:
        return self.rows.settings.max_tokens

    def take(self, token: int, row: torch.Tensor) -> bool:
        """Append a token; whether the text has ended."""
        self.text.append(token)
        self.entries.append({token: Logprob(self.rows.logprob(row, token))})
        ended = token in self.rows.settings.stop_token_ids
        self.stop_reason = token if ended else None
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
