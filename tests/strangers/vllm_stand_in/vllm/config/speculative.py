"""The methods of speculation, as vLLM names them."""

from dataclasses import dataclass
from typing import Literal

MTPModelTypes = Literal["mimo_mtp", "mtp"]
DFlashModelTypes = Literal["dflash"]
EagleModelTypes = Literal["eagle", "eagle3", MTPModelTypes, DFlashModelTypes]
SpeculativeMethod = Literal["ngram", "medusa", "draft_model", "suffix", EagleModelTypes]


@dataclass
class SpeculativeConfig:
    method: SpeculativeMethod
    num_speculative_tokens: int
    model: str | None = None
    prompt_lookup_max: int | None = None
    prompt_lookup_min: int | None = None
    draft_sample_method: Literal["greedy", "probabilistic"] = "greedy"
    num_speculative_tokens_per_batch_size: list[tuple[int, int, int]] | None = None
