"""Quantised drafts: the rule twice, a library's numbers, judged cases of models and heads, and refusals."""

import importlib
import warnings
from dataclasses import replace
from typing import Any

import numpy as np
import pytest
import torch

from specverify.backends.engine.model.quantised import dequantise, quantise
from specverify.backends.registry import open_backend
from specverify.properties.shrinking.cases import nearer
from specverify.properties.verdict.judge import judge
from specverify.reference.case import Case
from specverify.reference.case_json import case_from_json, case_to_json
from specverify.reference.draft import LanguageModel
from specverify.reference.malformed import Malformed
from specverify.reference.oracle.parameters import load, load_head, nearest_e4m3, quantised_weights
from specverify.reference.quantisation import QUANTISED
from specverify.reference.sampling import Stops
from specverify.reference.tree import RankTree
from specverify.setup.subjects import open_planted, subject_of
from tests.meta.words.test_head_drafts import DRAFTS, HEADS, ORACLE
from tests.models import LLAMA

TREE = RankTree((0, 0, 0, 1), (0, 1, 0, 0))
WEIGHTS = np.random.default_rng(3).normal(size=(40, 90)).astype(np.float32)
"""Rows of five groups and a part of one."""
WEIGHTS[5] = 0.0


def case_of(kind: str, dtype: str = "float32") -> Case:
    draft = LanguageModel(replace(LLAMA, quantised=kind), TREE)
    return Case(LLAMA, (3, 1, 4, 1, 5), draft, stops=Stops(6), dtype=dtype)


@pytest.mark.parametrize("kind", QUANTISED)
def test_engine_and_oracle_round_to_the_same_numbers(kind: str) -> None:
    numbers, scale, zero = quantise(torch.tensor(WEIGHTS), kind)
    assert numbers.element_size() == zero.element_size() == 1
    rounded = dequantise(numbers, scale, zero).numpy()[:, : WEIGHTS.shape[1]]
    np.testing.assert_array_equal(rounded, quantised_weights(WEIGHTS.astype(np.float64), kind))
    # No weight is further from its number than half a step: the largest step lies at the largest number. Where numbers
    # have a zero point, which is rounded as well, the outermost may be cut off by another half.
    step = {"fp8": 32.0, "int4-zero-points": 2.0}.get(kind, 1.0)
    step_of_weight = scale.expand(numbers.shape).flatten(1)[:, : WEIGHTS.shape[1]].numpy()
    assert (np.abs(rounded - WEIGHTS) <= step * step_of_weight / 2 * 1.0001).all()
    assert not np.array_equal(rounded, WEIGHTS)
    assert not rounded[5].any()


def test_every_8_bit_float_and_the_ties_between_them_are_rounded_as_torch_rounds_them() -> None:
    every = torch.arange(127, dtype=torch.uint8).view(torch.float8_e4m3fn).float()
    halves = (every[1:] + every[:-1]) / 2
    values = torch.cat([every, halves, -halves, torch.rand(2000) * 448])
    expected = values.to(torch.float8_e4m3fn).double().numpy()
    np.testing.assert_array_equal(nearest_e4m3(values.double().numpy()), expected)


def test_the_numbers_are_those_of_torchao() -> None:
    with warnings.catch_warnings():
        warnings.simplefilter("ignore")  # torchao 0.18 warns of its own source when it is imported
        quantization = pytest.importorskip("torchao.quantization", reason="the extra `quantised` is not installed")
        primitives = importlib.import_module("torchao.quantization.quant_primitives")
        linear = torch.nn.Linear(90, 40, bias=False)
        linear.weight = torch.nn.Parameter(torch.tensor(WEIGHTS))
        quantization.quantize_(linear, quantization.Float8WeightOnlyConfig())
    numbers, scale = (part.flatten(1) for part in quantise(torch.tensor(WEIGHTS), "fp8")[:2])
    used = scale[:, 0] != 1  # a row of zeros has another scale there
    weight: Any = linear.weight
    assert torch.equal(weight.qdata[used].float(), numbers[used].float())
    assert torch.equal(weight.scale[used], scale[used])
    # Its own configuration for int8 divides by 127.5 and uses -128; the rule here is its mapping without that number.
    numbers, scale = (part.flatten(1) for part in quantise(torch.tensor(WEIGHTS[used.numpy()]), "int8")[:2])
    mapping, block = primitives.MappingType.SYMMETRIC_NO_CLIPPING_ERR, (1, 90)
    arguments = torch.tensor(WEIGHTS[used.numpy()]), mapping, block, torch.int8, -127, 127
    torchao_scale, zero = primitives.choose_qparams_affine(*arguments)
    rounded = primitives.quantize_affine(arguments[0], block, torchao_scale, zero, torch.int8, -127, 127)
    torch.testing.assert_close(torchao_scale.flatten(), scale.flatten(), rtol=1e-6, atol=0)
    # It multiplies by 1 / scale, so that a quotient near a tie may go to the other side.
    assert (rounded != numbers).float().mean() < 1e-3


@pytest.mark.parametrize("kind", ["int4-groups", "int4-zero-points"])
def test_groups_are_those_of_torchao(kind: str) -> None:
    with warnings.catch_warnings():
        warnings.simplefilter("ignore")
        pytest.importorskip("torchao.quantization", reason="the extra `quantised` is not installed")
        primitives = importlib.import_module("torchao.quantization.quant_primitives")
    weight = torch.tensor(WEIGHTS[:, :80])
    mapping = primitives.MappingType
    symmetric = kind == "int4-groups"
    form, low, high = (mapping.SYMMETRIC_NO_CLIPPING_ERR, -7, 7) if symmetric else (mapping.ASYMMETRIC, 0, 15)
    numbers, scale, zero = quantise(weight, kind)
    filled = scale[..., 0] != 1  # a row of zeros has another scale there
    theirs, their_zero = primitives.choose_qparams_affine(weight, form, (1, 16), torch.int8, low, high)
    rounded = primitives.quantize_affine(weight, (1, 16), theirs, their_zero, torch.int8, low, high)
    torch.testing.assert_close(theirs[filled], scale[..., 0][filled], rtol=1e-6, atol=0)
    # It multiplies by 1 / scale, so that a quotient near a tie may go to the other side.
    assert (rounded.reshape(40, 5, 16)[filled] != numbers[filled]).float().mean() < 1e-3
    assert (their_zero[filled] == zero[..., 0][filled]).all() or symmetric


@pytest.mark.parametrize("kind", QUANTISED)
@pytest.mark.parametrize("dtype", ["float32", "float64", "bfloat16", "float16"])
def test_a_case_is_saved_loaded_judged_and_made_smaller(kind: str, dtype: str) -> None:
    case = case_of(kind, dtype)
    assert case_from_json(case_to_json(case)) == case
    verdict = judge(case, DRAFTS, ORACLE, subject_of(open_backend("cpu-eager")))
    assert verdict.findings == ()
    assert verdict.outcomes["draft.fidelity"] == "checked"
    plain = LanguageModel(LLAMA, TREE)
    assert any(smaller_case.draft == plain for smaller_case in nearer(case))


def head_case(kind: str, name: str, dtype: str) -> Case:
    return Case(LLAMA, (3, 1, 4, 1, 5), replace(HEADS[name], quantised=kind), stops=Stops(6), dtype=dtype)


@pytest.mark.parametrize("kind", QUANTISED)
@pytest.mark.parametrize("name", ["eagle1", "eagle3 of three layers", "medusa", "mtp"])
def test_a_head_of_few_bits_is_saved_loaded_judged_and_made_smaller(kind: str, name: str) -> None:
    case = head_case(kind, name, "float32" if name == "eagle1" else "float64")
    assert case_from_json(case_to_json(case)) == case
    verdict = judge(case, DRAFTS, ORACLE, subject_of(open_backend("cpu-eager")))
    assert verdict.findings == ()
    assert verdict.outcomes["draft.fidelity"] == "checked"
    assert any(smaller_case.draft == HEADS[name] for smaller_case in nearer(case))
    fault = subject_of(open_planted("cpu-eager", "scale-of-next-channel"))
    assert any(finding.invariant == "draft.fidelity" for finding in judge(case, DRAFTS, ORACLE, fault).findings)


@pytest.mark.parametrize("name", HEADS)
def test_matrices_of_a_head_are_quantised_and_nothing_else_is(name: str) -> None:
    plain, few = (
        load_head(head.weights, LLAMA, "float64") for head in (HEADS[name], replace(HEADS[name], quantised="int8"))
    )
    changed = {key for key in plain if not np.array_equal(plain[key], few[key])}
    by_token = {*HEADS[name].by_token(LLAMA.architecture), "lm_head.weight", "t2d"}
    assert changed == {key for key, tensor in plain.items() if tensor.ndim == 2 and key not in by_token}


@pytest.mark.parametrize("name", ["eagle1", "eagle3 of three layers", "medusa", "mtp"])
def test_four_bits_are_for_the_feed_forward_part_alone(name: str) -> None:
    plain, few = (
        load_head(head.weights, LLAMA, "float64") for head in (HEADS[name], replace(HEADS[name], quantised="int4"))
    )
    changed = {key for key in plain if not np.array_equal(plain[key], few[key])}
    parts = ("gate_proj.weight", "up_proj.weight", "down_proj.weight", ".linear.weight")
    assert changed == {key for key in plain if key.endswith(parts)}
    assert changed
    # Fifteen numbers a row, and no more.
    assert all(len(np.unique(row)) <= 15 for key in changed for row in few[key])


def test_the_target_keeps_its_weights() -> None:
    case = case_of("int8")
    assert case.draft.model is not None
    target, draft = (load(model, "float32").state for model in (case.model, case.draft.model))
    changed = {name for name in target if not np.array_equal(target[name], draft[name])}
    assert changed == {name for name in target if name.endswith("_proj.weight")}


def test_what_no_weights_can_be_is_refused() -> None:
    with pytest.raises(Malformed, match="quantised: 'int3' is none of int4, int4-groups, int4-zero-points, int8, fp8"):
        replace(LLAMA, quantised="int3")
    without = replace(open_backend("cpu-eager").declaration, quantised=False)
    assert str(without.outside(case_of("fp8"))).endswith("declares no draft of fp8 weights")
    assert str(without.outside(head_case("fp8", "eagle3", "float32"))).endswith("declares no draft of fp8 weights")
