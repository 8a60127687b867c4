"""Faults of recorded verify forwards: what a replay reads and where it writes."""

from copy import copy
from dataclasses import replace

from torch import Tensor

from backends.base import Unsupported
from backends.engine.model.causal_lm import CausalLm
from backends.engine.model.graphs import Graphs, Recording
from backends.engine.seams import Seams
from backends.faults.fault import fault, faults_in
from reference.trace import Stage

RECORDED = "cpu-recorded"


def recorded_by(seams: Seams, wrong: type[Graphs]) -> Seams:
    """`seams` whose target keeps its recordings in `wrong`, which is empty whenever a server starts.

    The new `network` raises Unsupported on a backend that records no forward.
    """

    def network(model: CausalLm) -> CausalLm:
        made = copy(seams.network(model))
        if made.graphs is not None:
            made.graphs = wrong(made.graphs.recorder)
            made.fallbacks = made.fallbacks.copy()  # else a server would count each fallback for both models
        elif not made.recurrent:  # a model with recurrent states is recorded by no backend
            raise Unsupported("a fault of recorded forwards: this backend records none")
        return made

    return replace(seams, network=network)


def without(seams: Seams, *forgotten: str) -> Seams:
    """`seams` whose replays keep those inputs of the recording whose names begin with one of `forgotten`."""

    class Forgetful(Graphs):
        def refill(self, recording: Recording, fresh: dict[str, Tensor]) -> None:
            held = {name: one for name, one in recording.inputs.items() if not name.startswith(forgotten)}
            super().refill(replace(recording, inputs=held), fresh)

    return recorded_by(seams, Forgetful)


@fault(
    "recorded-positions-not-refilled",
    Stage.EMITTED,
    "family of NVIDIA/TensorRT-LLM #18207: static inputs of a CUDA graph keep stale values in a replay",
    "a second tree of one size in layout static",
    on=RECORDED,
)
def stale_positions(seams: Seams) -> Seams:
    """A replayed verify forward rotates by the positions of the step that was recorded: no copy refills them."""
    return without(seams, "position_ids")


@fault(
    "recorded-mask-not-refilled",
    Stage.EMITTED,
    "family of sgl-project/sglang #19741: the custom mask of a replayed target verify is not the tree's",
    "a second tree of one size in layout static",
    on=RECORDED,
)
def stale_mask(seams: Seams) -> Seams:
    """A replayed verify forward attends under the tree mask of the step that was recorded: no copy refills it."""
    return without(seams, "attention_mask")


@fault(
    "recorded-slots-not-refilled",
    Stage.EMITTED,
    "NVIDIA/TensorRT-LLM #17110: write positions of the captured batch frozen into the copies of the cache",
    "a second tree of one size in layout static",
    on=RECORDED,
)
def stale_slots(seams: Seams) -> Seams:
    """A replayed verify forward writes its rows to the cache columns of the step that was recorded."""
    return without(seams, "slots")


FAULTS = faults_in(globals())
