"""Weights as they are published: MTP modules beside a target, and experts in 4-bit floats."""

import json
from pathlib import Path
from typing import Any

import numpy as np
import pytest
import torch
from safetensors.torch import load_file, save_file

from specverify.backends.compositions import open_cpu
from specverify.backends.engine.model.stored_state import four_bit_product
from specverify.properties.verdict.judge import judge
from specverify.reference.case import Case
from specverify.reference.draft import Scripted
from specverify.reference.files.fields import UnreadableCheckpoint
from specverify.reference.files.mxfp4 import NUMBERS
from specverify.reference.oracle.checkpoint import identify, read_checkpoint
from specverify.reference.sampling import Stops
from specverify.reference.tree import Tree
from specverify.setup.subjects import subject_of
from tests.checkpoints import save_checkpoint
from tests.corruption import BY_NAME, ORACLE

WEIGHTS = "model.safetensors"


def changed_config(folder: Path, **fields: Any) -> None:
    content = json.loads((folder / "config.json").read_text())
    (folder / "config.json").write_text(json.dumps({**content, **fields}))


def pack_stack(weights: torch.Tensor, draw: torch.Generator) -> tuple[torch.Tensor, torch.Tensor]:
    """Bytes and scales of a stack [experts, in, out], drawn: `weights` gives the shape alone."""
    experts, into, out = weights.shape
    blocks = torch.randint(256, (experts, out, into // 32, 16), generator=draw, dtype=torch.uint8)
    scales = torch.randint(122, 127, (experts, out, into // 32), generator=draw, dtype=torch.uint8)
    return blocks, scales


@pytest.fixture
def gpt_oss(tmp_path: Path) -> Path:
    """A checkpoint with experts as gpt-oss ships them; its widths are multiples of 32."""
    folder = save_checkpoint("gpt-oss", tmp_path)
    draw = torch.Generator().manual_seed(2)
    content = json.loads((folder / "config.json").read_text())
    hidden, inner, experts = content["hidden_size"], 64, content["num_local_experts"]
    changed_config(folder, intermediate_size=inner, quantization_config={"quant_method": "mxfp4"})
    state = load_file(folder / WEIGHTS)
    for name in [*state]:
        if name.endswith("experts.gate_up_proj_bias"):
            state[name] = torch.randn(experts, 2 * inner, generator=draw)
        if name.endswith(("experts.gate_up_proj", "experts.down_proj")):
            del state[name]
            into, out = (hidden, 2 * inner) if "gate_up" in name else (inner, hidden)
            state[f"{name}_blocks"], state[f"{name}_scales"] = pack_stack(torch.empty(experts, into, out), draw)
    save_file(state, folder / WEIGHTS, metadata={"format": "pt"})
    return folder


def test_experts_in_four_bits_are_one_number_to_oracle_engine_and_transformers(gpt_oss: Path) -> None:
    from transformers.integrations.mxfp4 import convert_moe_packed_tensors

    _, state = read_checkpoint(gpt_oss)
    stored = load_file(gpt_oss / WEIGHTS)
    prefix = "model.layers.1.mlp.experts"
    pair = [stored[f"{prefix}.gate_up_proj{end}"] for end in ("_blocks", "_scales")]
    product, theirs = four_bit_product(*pair), convert_moe_packed_tensors(*pair, dtype=torch.float32)
    assert torch.equal(product, theirs.double())
    assert np.array_equal(state[f"{prefix}.2.gate_proj.weight"], product[2, :, ::2].T.numpy())
    case = Case(
        identify(gpt_oss), (1, 2, 3, 9, 8), Scripted((Tree((0, 0, 1), (8, 3, 5)),)), stops=Stops(3), dtype="float64"
    )
    verdict = judge(case, (BY_NAME["attention.context-exact"],), ORACLE, subject_of(open_cpu()))
    assert verdict.outcomes["attention.context-exact"] == "checked"
    assert not verdict.findings


def test_the_sixteen_numbers_are_those_of_the_specification() -> None:
    """OCP MX 1.0, table 1: e2m1 has a sign, two bits of exponent with bias 1, one bit of mantissa."""
    for bits, number in enumerate(NUMBERS):
        exponent, mantissa = bits >> 1 & 3, bits & 1
        size = 2.0 ** (exponent - 1) * (1 + mantissa / 2) if exponent else mantissa / 2
        assert number == (-size if bits >> 3 else size)


def test_bytes_that_are_no_half_of_a_stack_are_refused(gpt_oss: Path) -> None:
    state = load_file(gpt_oss / WEIGHTS)
    del state["model.layers.0.mlp.experts.down_proj_scales"]
    save_file(state, gpt_oss / WEIGHTS, metadata={"format": "pt"})
    with pytest.raises(UnreadableCheckpoint, match="down_proj_blocks of bytes is no half of 4-bit floats"):
        identify(gpt_oss)


def test_a_scale_that_stands_for_no_number_is_refused(gpt_oss: Path) -> None:
    state = load_file(gpt_oss / WEIGHTS)
    state["model.layers.0.mlp.experts.down_proj_scales"][0, 0, 0] = 255
    save_file(state, gpt_oss / WEIGHTS, metadata={"format": "pt"})
    with pytest.raises(UnreadableCheckpoint, match="down_proj_scales holds NaN"):
        read_checkpoint(gpt_oss)


def test_modules_beside_a_qwen3_next_target_are_left_alone(tmp_path: Path) -> None:
    folder = save_checkpoint("qwen3-next", tmp_path)
    before = read_checkpoint(folder)[1]
    state = load_file(folder / WEIGHTS)
    modules = {"mtp.fc.weight": torch.ones(32, 64), "mtp.layers.0.input_layernorm.weight": torch.ones(32)}
    save_file({**state, **modules}, folder / WEIGHTS, metadata={"format": "pt"})
    after = read_checkpoint(folder)[1]
    assert before.keys() == after.keys()
    case = Case(identify(folder), (1, 2, 3), Scripted(), stops=Stops(2), dtype="float32")
    assert not judge(case, (BY_NAME["attention.context-exact"],), ORACLE, subject_of(open_cpu())).findings
    save_file({**state, "mtq.fc.weight": torch.ones(1)}, folder / WEIGHTS, metadata={"format": "pt"})
    with pytest.raises(UnreadableCheckpoint, match=r"mtq\.fc\.weight has no place"):
        identify(folder)
