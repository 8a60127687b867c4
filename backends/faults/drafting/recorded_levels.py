"""Faults of recorded draft forwards: inputs that a replay does not read anew."""

from copy import copy
from dataclasses import replace
from weakref import WeakKeyDictionary

from torch import Tensor

from specverify.backends.base import Unsupported
from specverify.backends.engine.model.causal_lm import CausalLm
from specverify.backends.engine.model.graphs import Graphs, Recording
from specverify.backends.engine.seams import Seams
from specverify.backends.faults.fault import drafted_fault

RECORDED_BACKEND = "cpu-recorded"


def without(seams: Seams, *forgotten: str) -> Seams:
    """`seams` whose draft models replay with those inputs of the recording whose names begin with one of `forgotten`.

    The new `draft_network` raises Unsupported on a backend that records no forward.
    """
    changed_models = WeakKeyDictionary[CausalLm, CausalLm]()

    class Forgetful(Graphs):
        def refill(self, recording: Recording, fresh: dict[str, Tensor]) -> None:
            kept_inputs = {name: tensor for name, tensor in recording.inputs.items() if not name.startswith(forgotten)}
            super().refill(replace(recording, inputs=kept_inputs), fresh)

    def draft_network(model: CausalLm) -> CausalLm:
        if model.graphs is None:
            if model.recurrent:  # recorded by no backend
                return model
            raise Unsupported("a fault of recorded drafts: this backend records none")
        if model not in changed_models:
            model_copy = copy(seams.draft_network(model))
            model_copy.graphs = Forgetful(model.graphs.recorder)
            model_copy.fallbacks = model.fallbacks.copy()  # else a server would count each fallback for both models
            changed_models[model] = model_copy
        return changed_models[model]

    return replace(seams, draft_network=draft_network)


@drafted_fault(
    "recorded-draft-positions-not-refilled",
    "family of sgl-project/sglang #10892: positions of a draft's CUDA graph keep the values of an earlier replay",
    "a draft model with a level of inner nodes, in two steps over a static buffer",
    on=RECORDED_BACKEND,
)
def stale_positions(seams: Seams) -> Seams:
    """A replayed level of a draft's tree rotates by the positions of the step that was recorded."""
    return without(seams, "position_ids")


@drafted_fault(
    "recorded-draft-table-not-refilled",
    "family of lightseekorg/tokenspeed #955: a draft graph reads a table with the pages of an earlier replay",
    "a draft model with a level of inner nodes, in two steps over pages of which the later one has others",
    on=RECORDED_BACKEND,
)
def stale_table(seams: Seams) -> Seams:
    """A replayed level of a draft's tree gathers its columns through the block table of the step that was recorded."""
    return without(seams, "table", "slots")
