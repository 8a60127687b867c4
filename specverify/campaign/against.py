"""The reference of a run, with which the backend is compared.

It is the NumPy oracle, the same by torch on a device (`--reference torch:cuda`), another backend (`--against NAME`), or
the oracle's rules over plain transformers (`--against transformers`), for models that the NumPy oracle does not know.
"""

from collections import OrderedDict
from collections.abc import Iterator
from contextlib import ExitStack, contextmanager, nullcontext
from copy import copy
from dataclasses import replace
from importlib import import_module
from typing import TYPE_CHECKING, Any

import numpy as np

from specverify.backends.base import Unavailable, Unsupported
from specverify.backends.devices import why_no_device
from specverify.isolation import door
from specverify.isolation.backend_spec import BackendSpec
from specverify.plan import TRANSFORMERS
from specverify.properties.verdict.invariant import NoReference, Oracle
from specverify.properties.verdict.peer import Peer
from specverify.properties.verdict.subject import NoTrace, Refusal, Subject
from specverify.reference.architecture import Architecture, Model, Rope, Seeded
from specverify.reference.case import Case
from specverify.reference.family.recurrent import RecurrentState
from specverify.reference.oracle.amplification import PERTURBATIONS, PERTURBED, Change, RowMovements, movement
from specverify.reference.oracle.checkpoint import UnreadableCheckpoint
from specverify.reference.oracle.decoder import Oracle as NumpyOracle
from specverify.reference.oracle.evaluator import Evaluator
from specverify.reference.oracle.formulas import rotary
from specverify.reference.oracle.model import Inputs, Nodes, by_node, stack_layers, with_index_keys
from specverify.reference.oracle.parameters import Parameters
from specverify.reference.sampling import Stops
from specverify.reference.trace import Array, Kv, Stage, Trace
from specverify.reference.tree import Tree
from specverify.setup.selection import Unknown, check_declared

if TYPE_CHECKING:
    from specverify.backends.transformers_reference import PlainTransformers, Sequence
    from specverify.references.torch_oracle import TorchOracle

REMEMBERED = 2**28
"""Most bytes of runs of sequences that one evaluator keeps."""


def open_reference(
    against: str | None,
    stack: ExitStack,
    checkpoint: Model | None = None,
    dtype: str = "float32",
    layout: str | None = None,
) -> Oracle:
    """The reference for `--against`: None means the NumPy oracle itself.

    A backend that shows every stage and runs scripted drafts answers as an oracle does. Any other one is a `Peer`,
    which is compared by its tokens.

    Args:
        against: `transformers`, a backend's name, `pkg.module:factory`, or None.
        stack: The stack that closes the reference backend, which is opened in a process of its own.
        checkpoint: The model of every case, if the run has one. The reference runs it once, so that a model that the
            reference cannot run is refused before any case.
        dtype: Working dtype of those cases.
        layout: The KV layout of every case, which a backend must declare; None for any.

    Raises:
        Unsupported: The reference cannot run `checkpoint`.
        Unknown: A backend does not declare `layout`, or reveals no tokens.
        UnknownBackend, Unavailable, WrongFlag: as `specverify.backends.registry.open_backend`.
    """
    if against is None:
        return NumpyOracle()
    if against == TRANSFORMERS:
        oracle = TransformersOracle()
        if checkpoint is not None:
            oracle.model(checkpoint, dtype).kv((0, 0))
        return oracle
    backend = stack.enter_context(door.open_backend(BackendSpec(against, threads=1 if checkpoint is None else 0)))
    if backend.declaration.reveals < frozenset(Stage) or "scripted" not in backend.declaration.drafts:
        if Stage.EMITTED not in backend.declaration.reveals:
            raise Unknown(
                f"--against {against}: it reveals no emitted tokens, so that there is nothing to compare with"
            )
        return Peer(backend.subject(), backend.declaration)
    if layout is not None:
        check_declared(layout, against, backend.declaration.layouts)
    # The reference runs drawn cases in float64 if it can, and a checkpoint in the dtype of the case.
    exact = "float64" in backend.declaration.dtypes and checkpoint is None
    subject = backend.subject()
    if checkpoint is not None:
        _refuse_declined(subject, Case(checkpoint, (0, 0), stops=Stops(1), dtype=dtype))

    return ByBackend(against, subject, exact)


def device_of(reference: str) -> str:
    """The device that `--reference` names.

    Raises:
        Unavailable: This machine has no such device.
    """
    device = reference.removeprefix("torch:")
    absent = why_no_device(device)
    if absent is not None:
        raise Unavailable(f"--reference {reference}: {absent}; --reference torch:cpu computes the same numbers here")
    return device


def free_device_bytes(reference: str) -> int:
    """The free memory of the accelerator that `--reference` names.

    Raises:
        Unavailable: This machine has no such device.
    """
    device = device_of(reference)
    import torch

    if device == "npu":
        import_module("torch_npu")  # registers the device with torch
    free, _ = torch.get_device_module(device).mem_get_info()
    return int(free)


def open_on_device(reference: str, on_checkpoint: bool) -> "TorchOracle":
    """The oracle by torch on the device that `--reference` names.

    Raises:
        Unavailable: This machine has no such device.
    """
    device = device_of(reference)
    import torch  # brings seconds, which other references need not pay

    from specverify.references.torch_oracle import TorchOracle

    if not on_checkpoint:  # threads make operations on small models slower
        torch.set_num_threads(1)
    return TorchOracle(device)


class ByBackend:
    """A backend as the reference; what rounds in a model is asked of the NumPy oracle, where it knows the model."""

    def __init__(self, name: str, subject: Subject, exact: bool) -> None:
        self._name = name
        self._subject = subject
        self._exact = exact
        self._oracle = NumpyOracle()

    def __call__(self, case: Case) -> Trace:
        """The backend's trace of `case`, in float64 if it can.

        Raises:
            NoReference: The backend has none.
        """
        try:
            return self._subject(replace(case, dtype="float64") if self._exact else case)
        except NoTrace as absent:
            declines = "declines" if isinstance(absent.outcome, Refusal) else "breaks on"
            raise NoReference(f"the reference {self._name} {declines} it: {absent.outcome.why}") from absent

    def amplification(self, case: Case, context: tuple[int, ...], tree: Tree) -> RowMovements | None:
        """How far rows move when all weights change a little, by the NumPy oracle; None where it reads no such model.

        Raises:
            Malformed: as the oracle.
        """
        try:
            return self._oracle.amplification(case, context, tree)
        except UnreadableCheckpoint:
            return None


def _refuse_declined(reference: Subject, case: Case) -> None:
    """Run `case` on `reference`.

    Raises:
        Unsupported: The reference declines the case.
    """
    try:
        reference(case)
    except NoTrace as absent:
        if isinstance(absent.outcome, Refusal):
            raise Unsupported(absent.outcome.why) from absent


class TransformersOracle(NumpyOracle):
    """The oracle with plain transformers in place of its own model; rules, commits and stops stay the oracle's."""

    def amplification(self, case: Case, context: tuple[int, ...], tree: Tree) -> RowMovements:
        """How far rows move when all weights of transformers' own model change a little, in float64.

        By a change of PERTURBED in every dtype: rows keep no choices here, which a larger change would make jump.

        Raises:
            Malformed: as `ByTransformers.nodes`.
        """
        evaluators = (neighbour.model(case.model, case.dtype) for neighbour in self.neighbours())
        base = self.model(case.model, case.dtype).nodes(context, tree)
        return movement(base, (evaluator.nodes(context, tree) for evaluator in evaluators))

    def neighbours(self, size: float = PERTURBED) -> tuple[NumpyOracle, ...]:
        """Oracles on the same networks with their weights changed by `size`, each in a way of its own."""
        if size not in self._neighbours:
            self._neighbours[size] = tuple(_Neighbour(self, Change(seed, size)) for seed in range(PERTURBATIONS))
        return self._neighbours[size]

    def model(self, model: Model, dtype: str) -> Evaluator:
        """The evaluator of `model`, with weights rounded to `dtype` and held in float64.

        Up to eight evaluators are kept for built-in models, and two for checkpoints.

        Raises:
            Unsupported: Plain transformers cannot run the model.
        """
        key = (model, dtype)
        if key not in self._evaluators:
            self._evaluators[key] = ByTransformers(model, dtype)
            # The least recently used evaluator goes first.
            while len(self._evaluators) > (8 if isinstance(model, Seeded) else 2):
                self._evaluators.popitem(last=False)
        self._evaluators.move_to_end(key)
        return self._evaluators[key]


class _Neighbour(NumpyOracle):
    """The oracle `oracle` with one `change` of the weights of all its models."""

    def __init__(self, oracle: TransformersOracle, change: Change) -> None:
        super().__init__()
        self._unchanged_oracle = oracle
        self._weight_change = change

    def model(self, model: Model, dtype: str) -> Evaluator:
        """The evaluator of the changed `model`; the latest one is kept, on the network of the unchanged one."""
        key = (model, dtype)
        if key not in self._evaluators:
            unchanged = self._unchanged_oracle.model(model, dtype)
            assert isinstance(unchanged, ByTransformers)
            self._evaluators.clear()
            self._evaluators[key] = unchanged.with_changed_weights(self._weight_change)
        return self._evaluators[key]


class ByTransformers:
    """An evaluator that runs a model by plain transformers, path by path, from scratch and without a KV cache.

    The numbers of a node are read from the run of a whole path through it. The model is causal (the reference checks
    the masks of every run), so that later tokens cannot change an earlier row.

    Attributes:
        parameters: The architecture. For a model that the oracle does not know, only sizes, windows, chunks and the
            span of the rotary tables are true. The state dict is empty.
    """

    def __init__(self, model: Model, dtype: str) -> None:
        from specverify.backends.transformers_reference import PlainTransformers  # brings torch

        self._plain = PlainTransformers(model, dtype)
        self.parameters = Parameters(_architecture(model, self._plain), {})
        self._runs: OrderedDict[tuple[int, ...], Sequence] = OrderedDict()
        self._kept_bytes = 0
        self._change: Change | None = None

    def with_changed_weights(self, change: Change) -> "ByTransformers":
        """The evaluator of the same network with the `change` of each weight."""
        evaluator = copy(self)
        evaluator._runs = OrderedDict()
        evaluator._kept_bytes = 0
        evaluator._change = change
        return evaluator

    @contextmanager
    def _weights(self) -> "Iterator[PlainTransformers]":
        """The network, inside the `with` with the weights of this evaluator."""
        change = self._change
        with nullcontext() if change is None else self._plain.perturbed(change.seed, change.size):
            yield self._plain

    def nodes(self, context: tuple[int, ...], tree: Tree) -> Nodes:
        """Logits and attention of every node of `tree`, hanging from the tokens of `context` (possibly none).

        Raises:
            Malformed: The model's rotary frequencies change between the context and the deepest node.
        """
        rows = self._rows(context, tree)
        attended = by_node([[layer[:, row] for layer in run.attended] for run, row in rows])
        heads, width = max(map(len, attended)), max(layer.shape[-1] for layer in attended)
        return Nodes(np.stack([run.logits[row] for run, row in rows]), stack_layers(attended, heads, width))

    def inputs(self, context: tuple[int, ...], tree: Tree) -> Inputs:
        """The inputs of attention at every node of `tree`, taken from the node's row in a run of its path."""
        rows = self._rows(context, tree)

        def columns(kind: str) -> list[Array]:
            layers = []
            for layer, of_root in enumerate(getattr(rows[0][0], kind)):
                of_nodes = (getattr(run, kind)[layer][:, row : row + 1] for run, row in rows)
                layers.append(np.concatenate([of_root[:, : len(context)], *of_nodes], axis=1))
            return layers

        queries = by_node([[layer[:, row] for layer in run.queries] for run, row in rows])
        return Inputs(queries, columns("keys"), columns("values"), self._plain.scale)

    def states(self, tokens: tuple[int, ...]) -> Array:
        """See `Evaluator`."""
        # transformers takes no empty sequence: run one token, and keep none of its rows.
        with self._weights() as plain:
            states: Array = plain.states(tokens or (0,))[:, : len(tokens)]
        return states

    def node_states(self, context: tuple[int, ...], tree: Tree) -> Array:
        """See `Evaluator`."""
        paths = [(*context, *tree.tokens_to(node)) for node in range(len(tree))]
        with self._weights() as plain:
            return np.stack([plain.states(path)[:, -1] for path in paths], 1)

    def kv(self, tokens: tuple[int, ...]) -> Kv:
        """Keys and values of the sequence `tokens`, as attention gets them."""
        run = self._run(tokens or (0,))

        def made(kind: str) -> Array:
            layers: list[Array] = list(getattr(run, kind))
            if kind == "keys" and any(rows.shape[-1] for rows in run.index_keys):
                layers = with_index_keys(layers, run.index_keys)
            heads, width = max(map(len, layers)), max(layer.shape[-1] for layer in layers)
            # A layer that reads an earlier one's has none of its own.
            columns = [
                layer[:0, : len(tokens)] if number in run.sharing else layer[:, : len(tokens)]
                for number, layer in enumerate(layers)
            ]
            return stack_layers(columns, heads, width)

        return Kv(made("keys"), made("values"))

    def recurrent(self, tokens: tuple[int, ...]) -> RecurrentState | None:
        """See `Recurring`."""
        with self._weights() as plain:
            return plain.recurrent(tokens)

    def _rows(self, context: tuple[int, ...], tree: Tree) -> "list[tuple[Sequence, int]]":
        """For each node, the run of a path through it, and the node's row in that run."""
        arch = self.parameters.architecture
        rotary.check_span(arch.rope, arch.max_positions, len(context), len(context) + tree.height + 1)
        run_rows: dict[int, tuple[Sequence, int]] = {}
        for leaf in range(len(tree)):
            if tree.children[leaf]:
                continue
            run = self._run((*context, *tree.tokens_to(leaf)))
            for depth, node in enumerate(tree.path(leaf)):
                # Paths share their first nodes; by causality any run through a node gives its numbers.
                run_rows.setdefault(node, (run, len(context) + depth))
        return [run_rows[node] for node in range(len(tree))]

    def _run(self, tokens: tuple[int, ...]) -> "Sequence":
        if tokens not in self._runs:
            with self._weights() as plain:
                self._runs[tokens] = plain.run(tokens)
            self._kept_bytes += _run_bytes(self._runs[tokens])
            # The run just made is kept even if it alone is larger than the limit.
            while self._kept_bytes > REMEMBERED and len(self._runs) > 1:
                self._kept_bytes -= _run_bytes(self._runs.popitem(last=False)[1])
        self._runs.move_to_end(tokens)
        return self._runs[tokens]


def _run_bytes(run: "Sequence") -> int:
    arrays = (run.logits, *run.attended, *run.queries, *run.keys, *run.values, *run.index_keys)
    return sum(int(array.nbytes) for array in arrays)


def _architecture(model: Model, plain: "PlainTransformers") -> Architecture:
    """The architecture of a built-in model, or a stand-in for a checkpoint's.

    Vocabulary, longest sequence, windows, chunks and the span of the rotary tables of the stand-in are true. Its
    family and widths are arbitrary, and nothing reads them.
    """
    if isinstance(model, Seeded):
        return model.architecture
    windows, chunks = (tuple(bounds) for bounds in zip(*plain.reaches, strict=True))
    return Architecture(
        family="llama",
        vocab_size=model.vocab_size,
        hidden_size=1,
        intermediate_size=1,
        heads=1,
        kv_heads=1,
        head_dim=2,
        windows=windows,
        rope=_span(plain.config),
        max_positions=model.max_positions,
        chunks=chunks if any(chunks) else (),
    )


def _span(config: Any) -> Rope:
    """A rotary variant whose tables change at the same sequence lengths as those of `config`.

    Raises:
        Unsupported: Layers have different variants, and the tables of one change with the length of the sequence.
    """
    rope = getattr(config, "rope_parameters", None) or {}
    scalings = [value for value in rope.values() if isinstance(value, dict)] or [rope]
    changing = [scaling for scaling in scalings if scaling.get("rope_type") in ("dynamic", "longrope")]
    if not changing:
        return Rope()
    # `Rope` holds one variant for all layers.
    if len(changing) < len(scalings) or any(scaling != changing[0] for scaling in changing):
        raise Unsupported("layers with different rotary variants, one of which changes with the length: not judged")
    if changing[0]["rope_type"] == "dynamic":
        return Rope(kind="dynamic", factor=float(changing[0]["factor"]))
    original = int(changing[0]["original_max_position_embeddings"])
    return Rope(kind="longrope", original=original, short_factor=(1.0,), long_factor=(1.0,))
