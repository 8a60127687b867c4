"""Faults of prompts that are filled chunk by chunk, in forwards in which other requests take steps."""

from dataclasses import replace

import torch
from torch import Tensor

from specverify.backends.engine.model.causal_lm import Rows
from specverify.backends.engine.request import Request
from specverify.backends.faults.fault import attended_fault, drafted_fault, in_place_of, lowered_fault

TRIGGER = "a prompt of two chunks or more that is filled beside trees"


@attended_fault(
    "chunk-sees-itself-alone",
    "weicj/vLLM-2080Ti-Definitive pull request 41: a mixed batch reads a chunk alone, without its cached prefix",
    TRIGGER,
)
@in_place_of("request")
class OwnKeysAlone(Request):
    """The rows of a chunk of a prompt do not see the columns of earlier chunks."""

    def chunk_rows(self) -> Rows:
        rows = super().chunk_rows()
        begin = self.lease.target.length
        own_columns = torch.arange(rows.visible[0].shape[1]) >= begin
        return replace(rows, visible=[visible & own_columns for visible in rows.visible])


@attended_fault(
    "chunk-positions-start-anew",
    "tenstorrent/tt-xla pull request 5817: the offset of a chunk comes from another row of the batch",
    f"{TRIGGER}, and a target that turns keys by their positions",
)
@in_place_of("request")
class StartsAnew(Request):
    """The rows of each chunk of a prompt count their positions from 0."""

    def chunk_rows(self) -> Rows:
        rows = super().chunk_rows()
        return replace(rows, positions=rows.positions - self.lease.target.length)


@lowered_fault(
    "first-chunk-taken-for-prompt",
    "RBLN-SW/vllm-rbln pull request 554: intermediate chunks of a prefill are not told from the last one",
    TRIGGER,
)
@in_place_of("request")
class FirstTakenForAll(Request):
    """Behind the first chunk of a prompt the request takes steps, and the other chunks are never run."""

    def take_chunk(self, logits: Tensor, states: Tensor | None) -> None:
        super().take_chunk(logits, states)
        self.filling = False


@drafted_fault(
    "chunk-loses-its-last-state",
    "vllm-project/vllm pull request 14922: EAGLE needs the last hidden state of chunks that do not end the prompt",
    f"{TRIGGER}, and a draft that reads hidden states",
)
@in_place_of("request")
class LastStateLost(Request):
    """The hidden state of the last row of a chunk that does not end the prompt is lost, and zeros stand for it."""

    def take_chunk(self, logits: Tensor, states: Tensor | None) -> None:
        if states is not None and self.lease.target.length + len(states) < len(self.tokens) - 1:
            states = torch.cat([states[:-1], torch.zeros_like(states[-1:])])
        super().take_chunk(logits, states)
