"""The part of the engine that samples: of each request its drafted tokens, and the one behind them."""

from dataclasses import dataclass
from types import SimpleNamespace
from typing import Any

import numpy as np
import torch

from vllm.faults import has_fault
from vllm.running import Running


@dataclass
class SpecDecodeMetadata:
    draft_token_ids: torch.Tensor
    num_draft_tokens: list[int]


@dataclass
class SamplerOutput:
    sampled_token_ids: torch.Tensor


class GPUModelRunner:
    def __init__(self, network: Any) -> None:
        self.model_config = SimpleNamespace()
        self.input_batch = SimpleNamespace(req_ids=[])
        self.discard_request_mask = SimpleNamespace(np=np.zeros(0, dtype=bool))
        self.requests: list[Running] = []
        self._network = network
        self.drafter: Any = None

    def get_model(self) -> Any:
        return self._network

    def begin(self, requests: list[Running]) -> None:
        self.requests = requests
        self.input_batch.req_ids = [request.name for request in requests]
        self.discard_request_mask.np = np.zeros(len(requests), dtype=bool)

    def _get_spec_decode_draft_probs(self, spec_decode_metadata: SpecDecodeMetadata) -> torch.Tensor | None:
        return None

    def _sample(self, logits: torch.Tensor, spec_decode_metadata: SpecDecodeMetadata | None) -> SamplerOutput:
        """The tokens of each request [requests, most drafted tokens + 1], -1 behind them."""
        assert spec_decode_metadata is not None
        drafted = spec_decode_metadata.draft_token_ids.tolist()
        chosen: list[list[int]] = []
        for request, count in zip(self.requests, spec_decode_metadata.num_draft_tokens, strict=True):
            chosen.append(verified(request, drafted[:count], logits[: count + 1]))
            drafted, logits = drafted[count:], logits[count + 1 :]
        width = 1 + max(spec_decode_metadata.num_draft_tokens)
        return SamplerOutput(torch.tensor([row + [-1] * (width - len(row)) for row in chosen]))


def verified(request: Running, drafted: list[int], logits: torch.Tensor) -> list[int]:
    """The accepted tokens of a chain and the one behind them; `logits` has a row more than the chain has tokens."""
    rows = request.rows
    chosen: list[int] = []
    for token, row in zip(drafted, logits, strict=False):
        law = rows.law(row, True)
        coin = float(torch.rand((), generator=rows.generator, dtype=torch.float64))
        if coin * (not has_fault("coins-of-zero")) < float(law[token]):
            chosen.append(token)
            continue
        if has_fault("rejection-kept") and len(chosen) < len(drafted) - 1:
            chosen.append(token)
            continue
        if not has_fault("residual-is-target"):
            law[token] = 0.0
        return [*chosen, rows.draw(law / law.sum())]
    behind = logits[len(drafted) - has_fault("bonus-of-another-row") * bool(drafted)]
    return [*chosen, rows.draw(rows.law(behind, False))]
