"""Faults of recorded acceptance: tensors that a replay does not read anew."""

from collections import OrderedDict
from dataclasses import replace

from specverify.backends.base import Unsupported
from specverify.backends.engine.sampling.batched import TENSORS, PaddedBatch
from specverify.backends.engine.sampling.recorded import RecordedBatch, RecordedVerify
from specverify.backends.engine.seams import Seams
from specverify.backends.faults.fault import accepted_fault

RECORDED_BACKEND = "cpu-recorded"


def with_recorder(seams: Seams, wrong: type[RecordedVerify]) -> Seams:
    """`seams` whose acceptance is recorded by `wrong`, which has no recording yet.

    Raises:
        Unsupported: if the engine records no acceptance.
    """
    right = seams.sampling.batched
    if not isinstance(right, RecordedVerify):
        raise Unsupported("a fault of recorded acceptance: this backend records none")
    verify = wrong(recorder=right.recorder, recordings=OrderedDict())
    return replace(seams, sampling=replace(seams.sampling, batched=verify))


def without(seams: Seams, *forgotten: str) -> Seams:
    """`seams` whose replays of acceptance read the tensors `forgotten` as they were recorded."""

    class Forgetful(RecordedVerify):
        def refill(self, recording: RecordedBatch, batch: PaddedBatch) -> None:
            for recorded_tensor, name in zip(recording.inputs, TENSORS, strict=True):
                if name not in forgotten:
                    recorded_tensor.copy_(getattr(batch, name))

    return with_recorder(seams, Forgetful)


@accepted_fault(
    "recorded-coins-not-refilled",
    "NVIDIA/Megatron-LM #5697: a generator's offset is frozen in a CUDA graph, and every replay draws the same numbers",
    "a second step of a sampling request whose tree has the size of an earlier one",
    on=RECORDED_BACKEND,
)
def stale_coins(seams: Seams) -> Seams:
    """A replayed acceptance reads the coins of the step that was recorded."""
    return without(seams, "uniforms")


@accepted_fault(
    "recorded-laws-not-refilled",
    "family of NVIDIA/TensorRT-LLM #18207: static inputs of a CUDA graph keep stale values in a replay",
    "a second step of a sampling request whose tree has the size of an earlier one",
    on=RECORDED_BACKEND,
)
def stale_laws(seams: Seams) -> Seams:
    """A replayed acceptance compares drafted tokens with the target's laws of the step that was recorded."""
    return without(seams, "law", "bonus")
