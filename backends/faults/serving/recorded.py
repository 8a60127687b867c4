"""Faults of recorded verify forwards: the recording, its inputs, its writes."""

from copy import copy
from dataclasses import replace
from functools import partial

import torch
from torch import Tensor

from specverify.backends.base import Unsupported
from specverify.backends.engine.columns import Attend
from specverify.backends.engine.model.causal_lm import CausalLm
from specverify.backends.engine.model.graphs import Graphs, Key, Recording
from specverify.backends.engine.model.recording.lanes import RecordedLanes
from specverify.backends.engine.seams import Seams
from specverify.backends.faults.fault import attended_fault, emitted_fault

RECORDED_BACKEND = "cpu-recorded"

recorded_fault = partial(emitted_fault, on=RECORDED_BACKEND)


def with_recorder(seams: Seams, wrong: type[Graphs]) -> Seams:
    """`seams` whose target keeps its recordings in `wrong`, which is empty whenever a server starts.

    The new `network` raises Unsupported on a backend that records no forward.
    """

    def network(model: CausalLm) -> CausalLm:
        model_copy = copy(seams.network(model))
        if model_copy.graphs is not None:
            model_copy.graphs = wrong(model_copy.graphs.recorder)
            model_copy.fallbacks = (
                model_copy.fallbacks.copy()
            )  # else a server would count each fallback for both models
        elif not model_copy.recurrent:  # a model with recurrent states is recorded by no backend
            raise Unsupported("a fault of recorded forwards: this backend records none")
        return model_copy

    return replace(seams, network=network)


def without(seams: Seams, *forgotten: str) -> Seams:
    """`seams` whose replays keep those inputs of the recording whose names begin with one of `forgotten`."""

    class Forgetful(Graphs):
        def refill(self, recording: Recording, fresh: dict[str, Tensor]) -> None:
            kept_inputs = {name: tensor for name, tensor in recording.inputs.items() if not name.startswith(forgotten)}
            super().refill(replace(recording, inputs=kept_inputs), fresh)

    return with_recorder(seams, Forgetful)


@recorded_fault(
    "recorded-positions-not-refilled",
    "family of NVIDIA/TensorRT-LLM #18207: static inputs of a CUDA graph keep stale values in a replay",
    "a second tree of one size in layout static",
)
def stale_positions(seams: Seams) -> Seams:
    """A replayed verify forward rotates by the positions of the step that was recorded: no copy refills them."""
    return without(seams, "position_ids")


@recorded_fault(
    "recorded-mask-not-refilled",
    "family of sgl-project/sglang #19741: the custom mask of a replayed target verify is not the tree's",
    "a second tree of one size in layout static",
)
def stale_mask(seams: Seams) -> Seams:
    """A replayed verify forward attends under the tree mask of the step that was recorded: no copy refills it."""
    return without(seams, "attention_mask")


@recorded_fault(
    "recorded-slots-not-refilled",
    "NVIDIA/TensorRT-LLM #17110: write positions of the captured batch frozen into the copies of the cache",
    "a second tree of one size in layout static",
)
def stale_slots(seams: Seams) -> Seams:
    """A replayed verify forward writes its rows to the cache columns of the step that was recorded."""
    return without(seams, "slots")


@recorded_fault(
    "recorded-table-not-refilled",
    "GeeeekExplorer/nano-vllm #190: the captured block table is not cleared before a replay, and keeps stale pages",
    "a replayed forward in pages of which the request has others than the one recorded",
)
def stale_table(seams: Seams) -> Seams:
    """A replayed verify forward gathers its columns through the block table of the step that was recorded."""
    return without(seams, "table")


@recorded_fault(
    "recorded-length-not-refilled",
    "family of vllm-project/vllm-ascend #10895: a replayed graph attends over the KV length of the captured step",
    "a second tree of one size in layout prefix, within the pages that the recording reads",
)
def stale_length(seams: Seams) -> Seams:
    """A replayed verify forward takes columns behind the end of the step that was recorded for free cells: zeros."""
    return without(seams, "length")


@attended_fault(
    "recording-keyed-without-addresses",
    "beehive-lab/TornadoVM #1006: a graph is replayed after its buffers were re-pointed, on stale addresses",
    "two requests in layout static with trees of one size",
    on=RECORDED_BACKEND,
)
def keyed_without_addresses(seams: Seams) -> Seams:
    """A recording is looked up by shapes alone: the forward of one request runs over the KV cache of another."""

    class KeyedWithoutAddresses(Graphs):
        def key(self, attend: Attend, fresh: dict[str, Tensor], lanes: RecordedLanes) -> Key:
            return replace(super().key(attend, fresh, lanes), addresses=())

    return with_recorder(seams, KeyedWithoutAddresses)


@attended_fault(
    "recording-keyed-without-sizes",
    "family of paiml/aprender #2030: graphs keyed by the batch size alone were replayed for other lengths",
    "two trees of different sizes in layout static",
    on=RECORDED_BACKEND,
)
def keyed_without_sizes(seams: Seams) -> Seams:
    """A recording is looked up by its buffers alone, so that a tree runs by the recording of a tree of another size.

    Rows that the recording lacks are not run, and have the logits of its last row. Rows that the tree lacks are run
    again as they were in the step before, and write to the columns of that step.
    """

    class KeyedWithoutSizes(Graphs):
        rows = 0

        def key(self, attend: Attend, fresh: dict[str, Tensor], lanes: RecordedLanes) -> Key:
            self.rows = fresh["input_ids"].shape[1]
            return replace(super().key(attend, fresh, lanes), shapes=())

        def refill(self, recording: Recording, fresh: dict[str, Tensor]) -> None:
            for name, recorded_input in recording.inputs.items():
                both = tuple(slice(min(sizes)) for sizes in zip(recorded_input.shape, fresh[name].shape, strict=True))
                recorded_input[both] = fresh[name][both]

        def results(self, recording: Recording) -> tuple[Tensor, list[Tensor]]:
            run = torch.arange(self.rows).clamp(max=recording.logits.shape[1] - 1)
            logits, heads = super().results(recording)
            return logits[:, run], [states[:, :, run] for states in heads]

    return with_recorder(seams, KeyedWithoutSizes)
