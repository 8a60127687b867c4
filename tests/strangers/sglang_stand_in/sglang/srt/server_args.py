"""Settings of an engine, with the limits that SGLang checks."""

from dataclasses import dataclass


@dataclass
class ServerArgs:
    model_path: str
    skip_tokenizer_init: bool = False
    dtype: str = "auto"
    random_seed: int | None = None
    context_length: int | None = None
    max_running_requests: int | None = None
    max_total_tokens: int | None = None
    mem_fraction_static: float | None = None
    page_size: int | None = None
    attention_backend: str | None = None
    disable_radix_cache: bool = False
    chunked_prefill_size: int | None = None
    disable_overlap_schedule: bool = False
    disable_cuda_graph: bool = False
    enable_deterministic_inference: bool = False
    log_level: str = "info"
    speculative_algorithm: str | None = None
    speculative_draft_model_path: str | None = None
    speculative_num_steps: int | None = None
    speculative_eagle_topk: int | None = None
    speculative_num_draft_tokens: int | None = None

    def __post_init__(self) -> None:
        if self.speculative_algorithm not in (None, "STANDALONE", "EAGLE3", "NGRAM"):
            raise ValueError(f"Unknown speculative algorithm name: {self.speculative_algorithm}")
        if self.speculative_eagle_topk == 1 and self.speculative_num_draft_tokens != self.speculative_num_steps + 1:  # type: ignore[operator]
            raise ValueError("speculative_num_draft_tokens must be speculative_num_steps + 1 for a chain")
