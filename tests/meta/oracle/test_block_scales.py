"""Weights in 8-bit floats with a scale for each block: one rule, written twice, and its refusals."""

import json
from collections.abc import Callable
from pathlib import Path
from typing import Any

import numpy as np
import pytest
import torch
from safetensors.torch import load_file, save_file

from specverify.backends.compositions import open_cpu
from specverify.backends.engine.model import stored_state as eight_bits
from specverify.campaign.against import TransformersOracle
from specverify.properties.invariants import ALL
from specverify.properties.verdict.judge import judge
from specverify.reference.files.fields import UnreadableCheckpoint
from specverify.reference.files.stored import numbers_of_e4m3
from specverify.reference.oracle.checkpoint import identify, read_checkpoint
from specverify.reference.oracle.decoder import Oracle
from specverify.reference.trace import Stage
from specverify.setup.subjects import subject_of
from tests.checkpoints import save_checkpoint
from tests.meta.oracle.test_against_transformers import assert_same_trace, case_of

BLOCK = (5, 6)
"""No size of the tiny checkpoints is a multiple of either."""

CONTEXT = tuple(invariant for invariant in ALL if invariant.name == "attention.context-exact")


def quantise_checkpoint(family: str, folder: Path) -> Path:
    """The tiny checkpoint of `family` with its projections in 8-bit floats, as DeepSeek ships them."""
    root = save_checkpoint(family, folder)
    tensors = load_file(root / "model.safetensors")
    for name in [tensor for tensor in tensors if tensor.endswith("_proj.weight")]:
        weight = tensors[name].float()
        shape = [-(-count // size) for count, size in zip(weight.shape, BLOCK, strict=True)]
        factors = torch.empty(shape)
        for row in range(shape[0]):
            for column in range(shape[1]):
                rows = slice(row * BLOCK[0], (row + 1) * BLOCK[0])
                columns = slice(column * BLOCK[1], (column + 1) * BLOCK[1])
                factors[row, column] = weight[rows, columns].abs().max() / 448
                weight[rows, columns] /= factors[row, column]
        tensors |= {name: weight.to(torch.float8_e4m3fn), f"{name}_scale_inv": factors}
    save_file(tensors, root / "model.safetensors", {"format": "pt"})
    return configure(root, {"quant_method": "fp8", "weight_block_size": list(BLOCK), "fmt": "e4m3"})


def configure(root: Path, quantisation: dict[str, Any]) -> Path:
    content = json.loads((root / "config.json").read_text())
    (root / "config.json").write_text(json.dumps({**content, "quantization_config": quantisation}))
    return root


@pytest.mark.parametrize("family", ["llama", "qwen3-moe"])
def test_oracle_engine_and_transformers_hold_the_same_weights(family: str, tmp_path: Path) -> None:
    folder = quantise_checkpoint(family, tmp_path)
    for dtype in ("float64", "bfloat16"):
        case = case_of(folder, understood=True, dtype=dtype)
        assert_same_trace(Oracle()(case), TransformersOracle()(case_of(folder, dtype=dtype)))
        verdict = judge(case, CONTEXT, Oracle(), subject_of(open_cpu()))
        assert (verdict.findings, verdict.outcomes) == ((), {"attention.context-exact": "checked"})


def test_a_weight_is_its_number_times_the_factor_of_its_block(tmp_path: Path) -> None:
    folder = quantise_checkpoint("llama", tmp_path)
    stored, name = load_file(folder / "model.safetensors"), "model.layers.1.mlp.down_proj.weight"
    numbers, factors = stored[name].double().numpy(), stored[f"{name}_scale_inv"].double().numpy()
    _, state = read_checkpoint(folder)
    for row, column in ((0, 0), (4, 5), (5, 6), (31, 47), (4, 6), (30, 11)):
        assert state[name][row, column] == numbers[row, column] * factors[row // 5, column // 6]
    assert np.ptp(factors) > 0


def test_every_byte_is_the_number_that_torch_says() -> None:
    bits = np.arange(256, dtype=np.uint8)
    expected = torch.from_numpy(bits).view(torch.float8_e4m3fn).double().numpy()
    np.testing.assert_array_equal(numbers_of_e4m3(bits), expected)


def test_factors_of_the_block_beside_are_found(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    right = eight_bits.blockwise_product
    monkeypatch.setattr(
        eight_bits, "blockwise_product", lambda numbers, factors, *size: right(numbers, factors.roll(1, 1), *size)
    )
    case = case_of(quantise_checkpoint("llama", tmp_path), understood=True)
    finding = judge(case, CONTEXT, Oracle(), subject_of(open_cpu())).first
    assert finding is not None
    assert finding.stage == Stage.ATTENDED


NAME = "model.layers.0.self_attn.q_proj.weight"


def drop_scales(tensors: dict[str, Any]) -> None:
    del tensors[f"{NAME}_scale_inv"]


def cut_scales(tensors: dict[str, Any]) -> None:
    tensors[f"{NAME}_scale_inv"] = tensors[f"{NAME}_scale_inv"][1:].contiguous()


def not_a_number(tensors: dict[str, Any]) -> None:
    tensors[NAME] = torch.full_like(tensors[NAME], float("nan"))


def widen_weights(tensors: dict[str, Any]) -> None:
    tensors[NAME] = tensors[NAME].float()


@pytest.mark.parametrize(
    ("change", "words"),
    [
        (drop_scales,
         rf"tensor {NAME}_scale_inv is missing; quantization_config.weight_block_size \[5, 6\] asks for it"),
        (cut_scales,
         rf"tensor {NAME}_scale_inv has shape \[6, 6\] of F32; quantization_config.weight_block_size \[5, 6\] "
              r"asks for \[7, 6\]"),
        (not_a_number, f"tensor {NAME} holds NaN"),
        (widen_weights, f"tensor {NAME}_scale_inv has no place"),
    ],
)  # fmt: skip
def test_factors_that_are_not_there_are_refused_by_name(
    change: Callable[[dict[str, Any]], None], words: str, tmp_path: Path
) -> None:
    folder = quantise_checkpoint("llama", tmp_path)
    tensors = load_file(folder / "model.safetensors")
    change(tensors)
    save_file(tensors, folder / "model.safetensors", {"format": "pt"})
    with pytest.raises(UnreadableCheckpoint, match=words):
        read_checkpoint(folder)


@pytest.mark.parametrize(
    ("quantisation", "words"),
    [
        ({"quant_method": "gptq", "bits": 4}, r"quant_method 'gptq' \(whole numbers .* in qweight and qzeros\)"),
        ({"quant_method": "awq", "bits": 4}, r"quant_method 'awq' \(whole numbers"),
        ({"quant_method": "new"}, "quant_method 'new', not of fp8; save the checkpoint dequantized"),
        ([], "quant_method None, not of fp8"),
        ({"quant_method": "fp8"}, "weight_block_size is None, not two sizes"),
        ({"quant_method": "fp8", "weight_block_size": [128, 0]}, r"weight_block_size is \[128, 0\], not two sizes"),
        ({"quant_method": "fp8", "weight_block_size": [5, 6], "activation_scheme": "static"}, "activation_scheme is"),
        ({"quant_method": "fp8", "weight_block_size": [5, 6], "fmt": "e5m2"}, "fmt is 'e5m2', not 'e4m3'"),
    ],
)
@pytest.mark.parametrize("understood", [True, False])
def test_other_quantisations_are_refused_by_name(
    understood: bool, quantisation: Any, words: str, tmp_path: Path
) -> None:
    folder = configure(quantise_checkpoint("llama", tmp_path), quantisation)
    with pytest.raises(UnreadableCheckpoint, match=f"quantization_config asks for quantized weights .*{words}"):
        identify(folder, understood)
