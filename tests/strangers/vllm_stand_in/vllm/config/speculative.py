"""The methods of speculation, as vLLM names them."""

from dataclasses import dataclass
from typing import Literal

EagleModelTypes = Literal["eagle", "eagle3"]
SpeculativeMethod = Literal["ngram", "draft_model", "suffix", EagleModelTypes]


@dataclass
class SpeculativeConfig:
    method: SpeculativeMethod
    num_speculative_tokens: int
    model: str | None = None
    prompt_lookup_max: int | None = None
    prompt_lookup_min: int | None = None
    draft_sample_method: Literal["greedy", "probabilistic"] = "greedy"
