"""Acceptance for many requests as a recorded call, replayed as a CUDA graph is.

A recording reads and writes fixed addresses. So a batch is padded to a few sizes, its tensors are copied into those of
the recording, and the results are copied out before the next replay overwrites them. On a machine without a device the
recorder is emulated (`specverify.backends.engine.model.recording.operators`).
"""

from collections import OrderedDict
from collections.abc import Callable, Hashable
from dataclasses import dataclass, field, replace
from typing import Any

import torch
from torch import Tensor
from torch.nn.functional import pad

from specverify.backends.engine.model.graphs import Recorder
from specverify.backends.engine.sampling.batched import (
    TENSORS,
    Answers,
    BatchedVerify,
    PaddedBatch,
    Program,
    acceptance_program,
    pad_questions,
    power_of_two,
    tensors_of,
)
from specverify.backends.engine.sampling.question import Question

KEEP = 32
"""The largest number of recordings kept; the least recently replayed one is dropped first."""

ROWS = ("token", "parent", "children", "depth", "present", "law", "bonus", "proposal")
"""The tensors of a batch that have a dimension of rows, behind that of requests."""


def pad_to_sizes(questions: list[Question]) -> PaddedBatch:
    """The questions as one batch whose numbers of requests, rows and coins are powers of two.

    The first question is asked again in place of absent requests; nobody reads the answers. Absent rows are no nodes.
    """
    absent = power_of_two(max(2, len(questions))) - len(questions)
    batch = pad_questions([*questions, *questions[:1] * absent])
    rows = power_of_two(batch.token.shape[1]) - batch.token.shape[1]
    longer: dict[str, Any] = {name: _lengthen(getattr(batch, name), rows) for name in ROWS}
    coins = power_of_two(batch.uniforms.shape[1]) - batch.uniforms.shape[1]
    return replace(batch, **longer, uniforms=_lengthen(batch.uniforms, coins))


def _lengthen(tensor: Tensor, rows: int) -> Tensor:
    """[B, N, ...] with `rows` zeros behind its second dimension."""
    return pad(tensor, (0, 0) * (tensor.dim() - 2) + (0, rows))


@dataclass(frozen=True)
class RecordedBatch:
    """A recorded acceptance; `inputs` are refilled in place, then `replay` computes `answers` again."""

    inputs: list[Tensor]
    answers: Answers
    replay: Callable[[], None]


@dataclass(frozen=True)
class RecordedVerify(BatchedVerify):
    """Acceptance of a batch by recorded calls; a planted fault replaces `kind` or `refill`.

    Attributes:
        pad_questions: See `BatchedVerify`; here to few sizes.
        recorder: What records a call.
        recordings: The recordings, the least recently replayed one first.
        refusals: Why a call could not be recorded, by its kind; from then on it runs as it is, a fallback.
    """

    pad_questions: Callable[[list[Question]], PaddedBatch] = pad_to_sizes
    recorder: Recorder = field(kw_only=True)
    recordings: OrderedDict[Hashable, RecordedBatch] = field(default_factory=OrderedDict, compare=False)
    refusals: dict[Hashable, str] = field(default_factory=dict, compare=False)

    @torch.no_grad()
    def ask(self, key: Program, batch: PaddedBatch) -> Answers:
        """Replay the program of `key` on `batch`, and record it first if the program or a size is new."""
        kind = self.kind(key, batch)
        if kind not in self.recordings and kind not in self.refusals:
            try:
                self.recordings[kind] = self._record(key, batch)
            except RuntimeError as error:
                self.refusals[kind] = f"not captured: acceptance: {' '.join(str(error).split())[:160]}"
            while len(self.recordings) > KEEP:
                self.recordings.popitem(last=False)
        if kind in self.refusals:
            self.fallbacks[self.refusals[kind]] += 1
            return acceptance_program(*key)(batch.height, *tensors_of(batch))
        self.recordings.move_to_end(kind)
        recording = self.recordings[kind]
        self.refill(recording, batch)
        recording.replay()
        path, token, places, active = recording.answers
        return path.clone(), token.clone(), places.clone(), active.clone()

    def kind(self, key: Program, batch: PaddedBatch) -> Hashable:
        """The key of a recording: the program and all that a replay cannot change, its loops over levels among them."""
        return key, batch.height, tuple((tensor.shape, tensor.dtype, tensor.device) for tensor in tensors_of(batch))

    def refill(self, recording: RecordedBatch, batch: PaddedBatch) -> None:
        """Copy every tensor of `batch` into those that a replay reads."""
        for buffer, name in zip(recording.inputs, TENSORS, strict=True):
            buffer.copy_(getattr(batch, name))

    def _record(self, key: Program, batch: PaddedBatch) -> RecordedBatch:
        program = acceptance_program(*key)
        inputs = [tensor.clone() for tensor in tensors_of(batch)]
        results, replay = self.recorder.record(lambda: list(program(batch.height, *inputs)))
        path, token, places, active = results
        return RecordedBatch(inputs, (path, token, places, active), replay)
