"""The oracle's formulas by torch: every family within 1e-12 of NumPy, and an operation without a form is named."""

from collections.abc import Iterator
from functools import partial
from pathlib import Path
from typing import Any

import numpy as np
import pytest
import torch
from safetensors.torch import load_file, save_file

from specverify.reference.architecture import Architecture, Seeded
from specverify.reference.case import Case
from specverify.reference.files.fields import UnreadableCheckpoint
from specverify.reference.files.stored import StoredTensor
from specverify.reference.oracle.amplification import amplification
from specverify.reference.oracle.checkpoint import identify
from specverify.reference.oracle.choices import KINDS
from specverify.reference.oracle.decoder import Oracle
from specverify.reference.oracle.evaluator import Evaluator, latent_kv, recurrent_state
from specverify.reference.oracle.family import FAMILIES
from specverify.reference.oracle.formulas.column_scores import ColumnScores
from specverify.reference.oracle.formulas.routers import Router
from specverify.reference.oracle.model import PathByPath
from specverify.reference.oracle.parameters import COPIED_BYTES, WeightsByLayer, load, parameters_by_layer
from specverify.reference.oracle.scored_choices import Scorer, scored_choices
from specverify.reference.oracle.shared_prefix import SharedPrefix
from specverify.reference.trace import Array
from specverify.reference.tree import Tree
from specverify.references import device_array
from specverify.references.device_array import DeviceArray, NoTorchForm, on_host
from specverify.references.device_weights import CopiedWeights, device_parameters, narrow_weights
from specverify.references.torch_oracle import TorchEvaluator, TorchOracle
from tests.checkpoints import MODEL_TYPES, save_checkpoint
from tests.drawn_families import draw_architecture, listed_architectures
from tests.meta.oracle.test_rare_families import case_for
from tests.meta.oracle.test_reference_memory import saved_llama
from tests.tiers import first, gated

CLOSE = 1e-12
"""The most by which a number may differ, over the largest one of its array."""

CONFIGURATIONS = 10
WITHOUT_EXPERTS = [name for name in FAMILIES if FAMILIES[name].formulas.experts is None]
CPU = torch.device("cpu")
CONTEXTS = ((), (3, 1, 4, 1, 0, 2, 4))
TREE = Tree((0, 0, 0, 1, 2, 1, 5), (1, 2, 3, 4, 0, 1, 2))
CHAIN = Tree((0, 0, 1, 2), (2, 0, 1, 3))


def configuration(family: str, number: int) -> Architecture:
    """The architectures that cases draw come first, then random ones."""
    of_cases = [arch for arch in listed_architectures(family) if arch.vocab_size >= 5][:3]
    return [*of_cases, *(draw_architecture(family, seed) for seed in range(CONFIGURATIONS))][number]


def worst(torch_array: Array, numpy_array: Array) -> float:
    assert type(torch_array) is np.ndarray
    assert torch_array.shape == numpy_array.shape
    return (
        float(np.abs(torch_array - numpy_array).max() / max(1e-300, np.abs(numpy_array).max()))
        if torch_array.size
        else 0.0
    )


def scores_of(scorer: Scorer | None) -> Iterator[tuple[str, Array]]:
    """The scores of a layer by which rows choose; of columns, those that a row sees."""
    if isinstance(scorer, Router):
        yield from (("scores", scorer.scores), ("weights", scorer.weights))
    if isinstance(scorer, ColumnScores):
        yield from (("scores", scorer.scores[np.isfinite(scorer.scores)]), ("products", scorer.products))


def answers(evaluator: Evaluator) -> Iterator[tuple[str, Array]]:
    """Every kind of answer of an evaluator, as named arrays."""
    for context in CONTEXTS:
        for tree in (TREE, CHAIN):
            nodes, inputs = evaluator.nodes(context, tree), evaluator.inputs(context, tree)
            yield "logits", nodes.logits
            yield "attended", nodes.attended
            for side in (inputs.queries, inputs.keys, inputs.values):
                yield from (("inputs", layer) for layer in side)
            yield "node states", evaluator.node_states(context, tree)
            for kind in KINDS:
                scored = scored_choices(kind, evaluator, context, tree)
                for scorer in () if scored is None else scored.scorers:
                    yield from scores_of(scorer)
    tokens = CONTEXTS[1]
    yield "states", evaluator.states(tokens)
    for kv in (evaluator.kv(tokens), latent_kv(evaluator, tokens)):
        yield from () if kv is None else (("keys", kv.keys), ("values", kv.values))
    state = recurrent_state(evaluator, tokens)
    yield from () if state is None else (("state", array) for array in (*state.windows, *state.memories))


def widest(torch_evaluator: Evaluator, numpy_evaluator: Evaluator) -> float:
    return max(
        worst(torch_array, numpy_array)
        for (_, torch_array), (_, numpy_array) in zip(answers(torch_evaluator), answers(numpy_evaluator), strict=True)
    )


@pytest.mark.parametrize(
    ("family", "number"),
    gated(
        [(family, number) for number in range(CONFIGURATIONS) for family in FAMILIES],
        lambda index: index < len(FAMILIES) and index % 3 == 0,
    ),
)
def test_every_family_within_rounding_of_numpy(family: str, number: int) -> None:
    parameters = load(Seeded(configuration(family, number), number), "float64")
    assert widest(TorchEvaluator(parameters, CPU), SharedPrefix(parameters)) < CLOSE


@pytest.mark.parametrize("family", gated(FAMILIES, lambda index: index % 8 == 0))
def test_path_by_path_computes_there_too(family: str) -> None:
    parameters = load(Seeded(configuration(family, 0), 1), "float64")
    path_by_path = PathByPath(device_parameters(parameters, CopiedWeights(parameters, CPU)))
    nodes, numpys = path_by_path.nodes(CONTEXTS[1], TREE), PathByPath(parameters).nodes(CONTEXTS[1], TREE)
    assert worst(on_host(nodes.logits), numpys.logits) < CLOSE


@pytest.mark.parametrize("family", gated(WITHOUT_EXPERTS, lambda index: index % 5 == 0))
def test_no_number_leaves_the_device(family: str) -> None:
    # Tensors of torch's device `meta` have no numbers: a copy to the host raises, and so does an array beside them.
    evaluator = TorchEvaluator(load(Seeded(configuration(family, 4), 1), "float64"), torch.device("meta"))
    for context in CONTEXTS:
        run = evaluator._run(context, TREE)
        assert run.nodes.logits.tensor.device.type == "meta"  # type: ignore[attr-defined]
    with pytest.raises(NotImplementedError, match="meta"):
        evaluator.nodes(CONTEXTS[1], TREE)


@pytest.mark.parametrize("family", gated(FAMILIES, lambda index: index % 8 == 1))
def test_a_run_has_the_same_trace(family: str) -> None:
    case = case_for(configuration(family, 3))
    trace, numpys = TorchOracle("cpu")(case), Oracle()(case)
    assert trace.output == numpys.output
    for step, numpy_step in zip(trace.steps, numpys.steps, strict=True):
        assert step.scored is not None
        assert numpy_step.scored is not None
        assert worst(step.scored.logits, numpy_step.scored.logits) < CLOSE


@pytest.mark.parametrize("family", first(["mixtral", "llama", "falcon_h1"], 1))
def test_rows_amplify_roundings_as_by_numpy(family: str) -> None:
    case = case_for(configuration(family, 3))
    movement = TorchOracle("cpu").amplification(case, CONTEXTS[1], TREE)
    numpys = Oracle().amplification(case, CONTEXTS[1], TREE)
    assert movement is not None
    assert numpys is not None
    np.testing.assert_allclose(movement.logits, numpys.logits, rtol=1e-4)
    torch_steps = [neighbour(case).steps[0].scored for neighbour in TorchOracle("cpu").neighbours()]
    numpy_steps = [neighbour(case).steps[0].scored for neighbour in Oracle().neighbours()]
    for torch_step, numpy_step in zip(torch_steps, numpy_steps, strict=True):
        assert torch_step is not None
        assert numpy_step is not None
        assert worst(torch_step.logits, numpy_step.logits) < CLOSE


@pytest.mark.parametrize("family", ["llama", "gemma2"])
def test_rows_amplify_as_much_by_weights_that_are_changed_when_read(family: str, tmp_path: Any) -> None:
    checkpoint = identify(save_checkpoint(family, tmp_path))
    whole_weights, by_layer = load(checkpoint, "float32"), parameters_by_layer(checkpoint, "float32")
    on_device = TorchOracle("cpu").model(checkpoint, "float32").parameters
    expected = amplification(SharedPrefix, whole_weights, CONTEXTS[1], TREE)
    assert expected is not None
    for evaluate, parameters in ((SharedPrefix, by_layer), (partial(TorchEvaluator, device=CPU), on_device)):
        moved = amplification(evaluate, parameters, CONTEXTS[1], TREE)
        assert moved is not None
        ratio = float(np.median(moved.logits / expected.logits))
        assert 0.5 < ratio < 2  # each is an rms over four draws of its own


def test_neighbours_of_a_large_checkpoint_have_no_copies_of_its_weights(
    tmp_path: Any, monkeypatch: pytest.MonkeyPatch
) -> None:
    states, moved = [], []
    for place, limit in (("small", COPIED_BYTES), ("large", 0)):
        monkeypatch.setattr("specverify.reference.oracle.parameters.COPIED_BYTES", limit)
        checkpoint = identify(save_checkpoint("llama", tmp_path / place))
        case = Case(checkpoint, (*CONTEXTS[1], TREE.token[0]))
        oracle = Oracle()
        own_rows = oracle.model(checkpoint, "float32").nodes(CONTEXTS[1], TREE).logits
        neighbours = [neighbour.model(checkpoint, "float32") for neighbour in oracle.neighbours()]
        states.append({type(neighbour.parameters.state) for neighbour in neighbours})
        rows = [neighbour.nodes(CONTEXTS[1], TREE).logits for neighbour in neighbours]
        assert len({row.tobytes() for row in (own_rows, *rows)}) == 1 + len(rows)
        assert max(worst(row, own_rows) for row in rows) < 1e-4
        movements = oracle.amplification(case, CONTEXTS[1], TREE)
        assert movements is not None
        moved.append(movements.logits)
    assert states == [{dict}, {WeightsByLayer}]
    assert 0.5 < float(np.median(moved[1] / moved[0])) < 2  # each is an rms over four draws of its own


@pytest.mark.parametrize("family", gated(MODEL_TYPES, lambda index: index % 12 == 0))
@pytest.mark.parametrize("dtype", ["float32", "bfloat16"])
def test_a_checkpoint_is_narrow_in_memory_and_the_same_model(family: str, dtype: str, tmp_path: Any) -> None:
    checkpoint = identify(save_checkpoint(family, tmp_path))
    whole_weights = load(checkpoint, dtype)
    by_layer = parameters_by_layer(checkpoint, dtype)
    assert {*by_layer.state} == {*whole_weights.state}
    for name, weight in whole_weights.state.items():
        np.testing.assert_array_equal(by_layer.state[name], weight)
    oracle = TorchOracle("cpu")
    assert widest(oracle.model(checkpoint, dtype), SharedPrefix(whole_weights)) < CLOSE
    assert widest(SharedPrefix(by_layer), SharedPrefix(whole_weights)) == 0.0


def test_weights_stay_narrow_and_perturbed_ones_are_there_a_layer_at_a_time() -> None:
    weight = np.array([[0.5, -1.25], [3.0, 2.0]])
    state = {f"model.layers.{layer}.mlp.up_proj.weight": weight for layer in range(2)}
    weights = narrow_weights({**state, "lm_head.weight": weight, "wide": np.array([1 + 2.0**-40])}, CPU)
    for name in (*state, "lm_head.weight"):
        narrow = weights[name]
        assert isinstance(narrow, DeviceArray)
        assert narrow.tensor.dtype == torch.bfloat16
    assert weights["wide"].dtype == np.float64
    changed = weights.perturbed(0, 2.0**-24)
    first, again = (changed["model.layers.0.mlp.up_proj.weight"] for _ in range(2))
    assert isinstance(first, DeviceArray)
    assert isinstance(again, DeviceArray)
    assert again.tensor is first.tensor
    assert [*changed._perturbed] == ["model.layers.0.mlp.up_proj.weight"]
    changed["model.layers.1.mlp.up_proj.weight"]
    assert [*changed._perturbed] == ["model.layers.1.mlp.up_proj.weight"]


@pytest.mark.parametrize("rows", [1, device_array.CACHED // 24, 1 + device_array.CACHED // 24, 25000])
def test_products_with_a_narrow_matrix_widen_every_block(rows: int) -> None:
    generator = torch.Generator().manual_seed(rows)
    narrow = torch.randn((rows, 24), generator=generator).bfloat16()
    wide = torch.randn((3, 2, 24), generator=generator, dtype=torch.float64)
    for left, right in ((wide, narrow.T), (wide[0, 0], narrow.T), (narrow, wide[0].T), (narrow, wide[0, 0])):
        product, expected = device_array.multiply_matrices(left, right), left.double() @ right.double()
        assert product.shape == expected.shape
        torch.testing.assert_close(product, expected, rtol=0, atol=1e-13)


@pytest.mark.parametrize(("dtype", "mapped"), [("bfloat16", True), ("float32", True), ("float16", False)])
def test_weights_that_are_held_as_stored_are_mapped_from_their_file(
    dtype: str, mapped: bool, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    checkpoint = saved_llama(tmp_path, 1, 8, 24, 40)
    by_numpy = load(checkpoint, dtype).state
    state = parameters_by_layer(checkpoint, dtype).state
    weights = narrow_weights(state, CPU)
    assert set(weights) == set(state) == set(by_numpy)
    for name in weights:
        np.testing.assert_array_equal(on_host(weights[name]), by_numpy[name])
    monkeypatch.delattr(StoredTensor, "values")  # what is mapped is not read
    if mapped:
        narrow_weights(state, CPU)
        return
    with pytest.raises(AttributeError, match="values"):
        narrow_weights(state, CPU)


def test_a_mapped_weight_without_numbers_is_refused(tmp_path: Path) -> None:
    checkpoint = saved_llama(tmp_path, 1, 8, 24, 40)
    tensors = load_file(tmp_path / "model.safetensors")
    tensors["lm_head.weight"][3, 5] = torch.inf
    save_file(tensors, tmp_path / "model.safetensors", metadata={"format": "pt"})
    with pytest.raises(UnreadableCheckpoint, match=r"model\.safetensors: tensor lm_head\.weight holds NaN or infinity"):
        narrow_weights(parameters_by_layer(identify(tmp_path), "bfloat16").state, CPU)
    assert checkpoint.digest != identify(tmp_path).digest


def test_perturbed_weights_come_from_their_seed() -> None:
    weight = np.random.default_rng(0).standard_normal((300, 200)).astype(np.float16).astype(np.float64)
    weights = narrow_weights({"lm_head.weight": weight}, CPU)
    changed, again, other_seed = (on_host(weights.perturbed(seed, 2.0**-24)["lm_head.weight"]) for seed in (1, 1, 2))
    np.testing.assert_array_equal(changed, again)
    assert (changed != other_seed).mean() > 0.9
    relative = (changed / weight - 1) * 2.0**24
    assert abs(float(relative.mean())) < 0.02
    assert abs(float(relative.std()) - 1) < 0.02


@pytest.mark.parametrize(
    ("compute", "name"),
    [
        (lambda x: np.sinh(x), "np.sinh"),
        (lambda x: np.cumsum(x), "np.cumsum"),
        (lambda x: np.add.reduce(x), "np.add.reduce"),
        (lambda x: np.asarray(x), "a copy to the host"),
        (lambda x: np.zeros(3).__setitem__(slice(None), x), "a copy to the host"),
        (lambda x: np.multiply(np.ones(3), x, out=np.zeros(3)), "into a NumPy array"),
    ],
)
def test_an_operation_without_a_form_is_named(compute: Any, name: str) -> None:
    with pytest.raises(NoTorchForm, match=name):
        compute(DeviceArray(torch.ones(3, dtype=torch.float64)))
