"""In 16 bits oracle and engine hold each weight in the dtype in which transformers holds it, rounded once."""

import json
from pathlib import Path
from typing import Any

import numpy as np
import pytest
import torch
from safetensors.torch import load_file, save_file
from transformers import AutoModelForCausalLM

from specverify.backends.engine.model.models import from_disk
from specverify.reference.files.mxfp4 import BLOCKS, SCALES
from specverify.reference.oracle.checkpoint import identify
from tests.config_files import full_content, logits_of, network_of, own_logits, save_checkpoint, shrunk_config
from tests.published import CONFIGS
from tests.tiers import each

CLOSE = 1e-9
WEIGHTS = "model.safetensors"
BLOCK = (8, 16)
DTYPES = {"float16": torch.float16, "bfloat16": torch.bfloat16}


def distance(folder: Path, dtype: str, network: Any) -> float:
    """How far the oracle's logits lie from those of `network` with the weights that it holds, computed in float64."""
    wide_network = network_of(network.config)
    wide_network.load_state_dict({name: tensor.double() for name, tensor in network.state_dict().items()})
    expected = logits_of(wide_network)
    return float(np.abs(own_logits(folder, dtype) - expected).max() / np.abs(expected).max())


@pytest.mark.parametrize(("name", "dtype"), each([(name, dtype) for name in CONFIGS for dtype in DTYPES], 7))
def test_weights_are_rounded_as_transformers_rounds_them(name: str, dtype: str, tmp_path: Path) -> None:
    save_checkpoint(full_content(shrunk_config(name)), tmp_path)
    network = AutoModelForCausalLM.from_pretrained(tmp_path, dtype=DTYPES[dtype], attn_implementation="eager")
    assert distance(tmp_path, dtype, network) < CLOSE


def in_four_bits(folder: Path) -> dict[str, Any]:
    """Store the experts of the gpt-oss checkpoint in `folder` as bytes; the quantisation of its config.json."""
    draw = torch.Generator().manual_seed(2)
    state = load_file(folder / WEIGHTS)
    for name in [name for name in state if name.endswith(("experts.gate_up_proj", "experts.down_proj"))]:
        experts, inputs, outputs = state.pop(name).shape
        sizes = (experts, outputs, inputs // 32)
        state[f"{name}{BLOCKS}"] = torch.randint(256, (*sizes, 16), generator=draw, dtype=torch.uint8)
        state[f"{name}{SCALES}"] = torch.randint(122, 127, sizes, generator=draw, dtype=torch.uint8)
    save_file(state, folder / WEIGHTS, {"format": "pt"})
    return {"quant_method": "mxfp4"}


def in_eight_bits(folder: Path) -> dict[str, Any]:
    """Store the projections of the checkpoint in `folder` in 8-bit floats; the quantisation of its config.json."""
    state = load_file(folder / WEIGHTS)
    for name in [name for name in state if name.endswith("_proj.weight")]:
        rows, columns = (-(-size // block) for size, block in zip(state[name].shape, BLOCK, strict=True))
        state[name] = state[name].to(torch.float8_e4m3fn)
        state[f"{name}_scale_inv"] = 0.5 + torch.rand(rows, columns, generator=torch.Generator().manual_seed(rows))
    save_file(state, folder / WEIGHTS, {"format": "pt"})
    return {"quant_method": "fp8", "weight_block_size": list(BLOCK), "fmt": "e4m3"}


QUANTISED = {"gpt-oss-20b": in_four_bits, "deepseek-v3": in_eight_bits, "glm-4.5": in_eight_bits}


@pytest.mark.parametrize("dtype", DTYPES)
@pytest.mark.parametrize("name", QUANTISED)
def test_weights_beside_quantised_ones_are_rounded_once(name: str, dtype: str, tmp_path: Path) -> None:
    content = full_content(shrunk_config(name))
    save_checkpoint(content, tmp_path)
    (tmp_path / "config.json").write_text(json.dumps({**content, "quantization_config": QUANTISED[name](tmp_path)}))
    network = from_disk(identify(tmp_path), dtype)
    assert distance(tmp_path, dtype, network) < CLOSE
    stored = load_file(tmp_path / WEIGHTS)
    as_stored = [name for name in network.state_dict() if stored.get(name, torch.empty(0)).dtype == torch.float64]
    for name in as_stored:
        tensor = network.state_dict()[name]
        assert torch.equal(tensor, stored[name].to(tensor.dtype)), f"{name} is rounded to {dtype} on the way"
    assert len(as_stored) > 5
