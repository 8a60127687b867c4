"""TorchOracle: the oracle with its own formulas, computed by torch in float64 on a device.

Contexts, trees, families and formulas are the NumPy oracle's own code (`SharedPrefix`, `specverify.reference.oracle`).
Its answers are NumPy arrays.
"""

from functools import partial
from importlib import import_module

import torch

from specverify.reference.architecture import Checkpoint, Model
from specverify.reference.family.recurrent import RecurrentState
from specverify.reference.oracle.model import Inputs, Nodes
from specverify.reference.oracle.parameters import Parameters, load, parameters_by_layer
from specverify.reference.oracle.shared_prefix import SharedPrefix
from specverify.reference.trace import Array, Kv
from specverify.reference.tree import Tree
from specverify.references.certificate import RecordingOracle
from specverify.references.device_array import on_host
from specverify.references.device_weights import CopiedWeights, device_parameters, narrow_weights


class TorchEvaluator(SharedPrefix):
    """An evaluator that computes on a device, and answers in NumPy arrays."""

    def __init__(self, parameters: Parameters, device: torch.device) -> None:
        if isinstance(parameters.state, dict):
            parameters = device_parameters(parameters, CopiedWeights(parameters, device))
        super().__init__(parameters)

    def nodes(self, context: tuple[int, ...], tree: Tree) -> Nodes:
        """See `SharedPrefix`."""
        nodes = super().nodes(context, tree)
        return Nodes(on_host(nodes.logits), on_host(nodes.attended))

    def inputs(self, context: tuple[int, ...], tree: Tree) -> Inputs:
        """See `SharedPrefix`."""
        inputs = super().inputs(context, tree)
        queries, keys, values = (
            [on_host(layer) for layer in side] for side in (inputs.queries, inputs.keys, inputs.values)
        )
        return Inputs(queries, keys, values, inputs.scale)

    def node_states(self, context: tuple[int, ...], tree: Tree) -> Array:
        """See `Evaluator`."""
        return on_host(super().node_states(context, tree))

    def states(self, tokens: tuple[int, ...]) -> Array:
        """See `Evaluator`."""
        return on_host(super().states(tokens))

    def kv(self, tokens: tuple[int, ...]) -> Kv:
        """Rotated keys and values of the sequence `tokens`, read-only."""
        keys, values = (on_host(view) for view in self._kv_views(tokens))
        keys.flags.writeable = values.flags.writeable = False
        return Kv(keys, values)

    def recurrent(self, tokens: tuple[int, ...]) -> RecurrentState | None:
        """See `RecurrentEvaluator`."""
        state = super().recurrent(tokens)
        if state is None:
            return None
        return RecurrentState(tuple(map(on_host, state.windows)), tuple(map(on_host, state.memories)))


class TorchOracle(RecordingOracle):
    """The oracle on a device.

    Args:
        device: The device, `cpu`, `cuda` or `npu`.
        keep: Number of traces that are remembered.
    """

    def __init__(self, device: str, keep: int = 64) -> None:
        if device == "npu":
            import_module("torch_npu")  # registers the device with torch

        self.device = torch.device(device)
        super().__init__(partial(TorchEvaluator, device=self.device), keep)

    def _load(self, model: Model, dtype: str) -> Parameters:
        """The parameters of `model` on the device; those of a checkpoint are read one weight after the other."""
        if not isinstance(model, Checkpoint):
            parameters = load(model, dtype)
            return device_parameters(parameters, CopiedWeights(parameters, self.device))
        parameters = parameters_by_layer(model, dtype)
        return device_parameters(parameters, narrow_weights(parameters.state, self.device))
