"""MTP modules as they are published beside DeepSeek-V3, GLM-4.5, Qwen3-Next and Qwen3.5: opened, drafted, refused."""

import json
from collections.abc import Callable
from pathlib import Path

import numpy as np
import pytest
import torch
from safetensors.torch import load_file, save_file

from specverify.backends.registry import open_backend
from specverify.checkpoints.given_draft import given_draft
from specverify.reference.case import Case
from specverify.reference.draft.hidden import HiddenStates
from specverify.reference.draft.mtp import Mtp, module_prefix
from specverify.reference.draft_files import open_head
from specverify.reference.oracle.checkpoint import UnreadableCheckpoint, identify, read_checkpoint
from specverify.reference.sampling import Stops
from specverify.reference.tree import RankTree
from specverify.setup.errors import UnusableInput
from tests.checkpoints import save_checkpoint
from tests.meta.words.test_head_drafts import compare_trees, findings_of

WEIGHTS = "model.safetensors"
NORMED = HiddenStates(place="normed", shift=1)
CHAINS = RankTree((0, 0, 0, 1, 2, 3), (0, 0, 1, 0, 0, 0))
NEXT_NAMES = {
    "eh_proj": "fc",
    "enorm": "pre_fc_norm_embedding",
    "hnorm": "pre_fc_norm_hidden",
    "shared_head.norm": "norm",
}

Tensors = dict[str, torch.Tensor]


def with_next_names(state: Tensors, prefix: str) -> Tensors:
    """The tensors of the module `prefix` under Qwen's names."""
    named: Tensors = {}
    for name, tensor in state.items():
        part, _, end = name.removeprefix(f"{prefix}.").rpartition(".")
        named[f"mtp.{NEXT_NAMES[part]}.{end}" if part in NEXT_NAMES else f"mtp.layers.0.{part}.{end}"] = tensor
    return named


def stack_experts(state: Tensors) -> Tensors:
    """The tensors with the matrices of all experts in two."""
    prefix = "mtp.layers.0.mlp.experts"
    experts = {name: tensor for name, tensor in state.items() if name.startswith(f"{prefix}.")}
    count = len(experts) // 3
    gate, up, down = (
        torch.stack([experts[f"{prefix}.{expert}.{part}_proj.weight"] for expert in range(count)])
        for part in ("gate", "up", "down")
    )
    other_tensors = {name: tensor for name, tensor in state.items() if name not in experts}
    return {**other_tensors, f"{prefix}.gate_up_proj": torch.cat([gate, up], 1), f"{prefix}.down_proj": down}


def save_published(family: str, folder: Path, count: int = 1, change: Callable[[Tensors], Tensors] = dict) -> Path:
    """A checkpoint of `family` with modules of random weights where its publishers put them."""
    checkpoint = save_checkpoint(family, folder)
    architecture, _ = read_checkpoint(checkpoint)
    words = Mtp(RankTree((0,), (0,)), NORMED, None, count)
    draw = torch.Generator().manual_seed(2)
    modules = {}
    for name, shape in words.tensors(architecture).items():
        spread = torch.randn(shape, generator=draw)
        rests = architecture.words.resting_gain if name.endswith("norm.weight") else 0.0
        modules[name] = rests + (0.1 if len(shape) == 1 else 0.3) * spread
    fields: dict[str, object] = {"num_nextn_predict_layers": count}
    if family.startswith("qwen3"):
        modules = with_next_names(modules, module_prefix(architecture.layers, 0))
        fields = {"mtp_num_hidden_layers": 1}
    else:  # DeepSeek and GLM repeat both matrices in each module
        target = load_file(checkpoint / WEIGHTS)
        for module in range(count):
            prefix = module_prefix(architecture.layers, module)
            modules[f"{prefix}.embed_tokens.weight"] = target["model.embed_tokens.weight"].clone()
            modules[f"{prefix}.shared_head.head.weight"] = target["lm_head.weight"].clone()
    state = {**load_file(checkpoint / WEIGHTS), **change(modules)}
    save_file(state, checkpoint / WEIGHTS, metadata={"format": "pt"})
    config = json.loads((checkpoint / "config.json").read_text())
    config.pop("num_mtp_layers", None)
    (checkpoint / "config.json").write_text(json.dumps({**config, **fields}))
    return checkpoint


def with_own_matrices(state: Tensors) -> Tensors:
    """Every module with a head of its own, and all but the last with an embedding of their own."""
    first, *_, last = sorted(name for name in state if name.endswith("embed_tokens.weight"))
    matrices = {name: torch.flip(tensor, (0,)) for name, tensor in state.items() if "shared_head.head" in name}
    return {**state, **matrices, first: torch.flip(state[last], (0,))}


FORMS: dict[str, tuple[str, int, Callable[[Tensors], Tensors]]] = {
    "deepseek-v3": ("deepseek-v3", 1, dict),
    "two modules": ("deepseek-v3", 2, dict),
    "two modules, with matrices of their own": ("deepseek-v3", 2, with_own_matrices),
    "glm-4-moe": ("glm4-moe", 1, dict),
    "qwen3-next": ("qwen3-next", 1, dict),
    "qwen3.5": ("qwen3.5", 1, dict),
    "qwen3.5-moe, experts in one tensor": ("qwen3.5-moe", 1, stack_experts),
}


@pytest.mark.parametrize("name", FORMS)
def test_published_modules_are_opened_and_drafted_alike(name: str, tmp_path: Path) -> None:
    family, count, change = FORMS[name]
    folder = save_published(family, tmp_path, count, change)
    target = identify(folder)
    opened = given_draft(str(folder), target, None)
    assert isinstance(opened, Mtp)
    assert opened.layer is None
    assert opened.count == count
    assert (opened.own_embedding, opened.own_head) == (change is with_own_matrices,) * 2
    draft = opened.with_shapes((CHAINS,))
    case = Case(target, (3, 1, 4, 1, 5), draft, stops=Stops(5), dtype="float64")
    assert compare_trees(case, open_backend("cpu-eager").run(case))
    assert findings_of(case) == []


def test_a_composite_checkpoint_has_its_module_beside_the_text_model(tmp_path: Path) -> None:
    folder = save_published("qwen3.5", tmp_path)
    before = open_head(folder, identify(folder)).weights
    text = json.loads((folder / "config.json").read_text())
    (folder / "config.json").write_text(json.dumps({"model_type": "qwen3_5", "text_config": text}))
    state = {
        name.replace("model.", "model.language_model.", 1) if name.startswith("model.") else name: tensor
        for name, tensor in load_file(folder / WEIGHTS).items()
    }
    save_file(state, folder / WEIGHTS, metadata={"format": "pt"})
    after = open_head(folder, identify(folder)).weights
    assert before.keys() == after.keys()
    assert all(np.array_equal(before[name], after[name]) for name in before)


def in_eight_bits(state: Tensors) -> Tensors:
    """The projections of attention and experts in 8-bit floats, each with a factor for blocks of 8 by 8."""
    scaled: Tensors = {}
    for name, tensor in state.items():
        if not name.endswith("_proj.weight") or "eh_proj" in name:
            scaled[name] = tensor
            continue
        factors = 0.5 + torch.rand(tuple(-(-size // 8) for size in tensor.shape))
        scaled[name] = tensor.to(torch.float8_e4m3fn)
        scaled[f"{name}_scale_inv"] = factors
    return scaled


def test_modules_in_8_bit_floats_are_read_as_deepseek_ships_them(tmp_path: Path) -> None:
    folder = save_published("deepseek-v3", tmp_path, 1, in_eight_bits)
    config = json.loads((folder / "config.json").read_text())
    blocks = {"quant_method": "fp8", "weight_block_size": [8, 8]}
    (folder / "config.json").write_text(json.dumps({**config, "quantization_config": blocks}))
    target = identify(folder)
    opened = open_head(folder, target)
    stored = load_file(folder / WEIGHTS)
    name = "model.layers.2.self_attn.o_proj.weight"
    factors = stored[f"{name}_scale_inv"].double().repeat_interleave(8, 0).repeat_interleave(8, 1)
    expected = stored[name].double() * factors[: stored[name].shape[0], : stored[name].shape[1]]
    np.testing.assert_array_equal(opened.weights[name], expected.numpy())
    case = Case(target, (3, 1, 4, 1, 5), opened.words.with_shapes((CHAINS,)), stops=Stops(3), dtype="float64")
    assert compare_trees(case, open_backend("cpu-eager").run(case))
    assert findings_of(case) == []
    del stored[f"{name}_scale_inv"]
    save_file(stored, folder / WEIGHTS, metadata={"format": "pt"})
    with pytest.raises(UnreadableCheckpoint, match=r"o_proj\.weight_scale_inv is missing"):
        open_head(folder, identify(folder))


def without(part: str) -> Callable[[Tensors], Tensors]:
    return lambda state: {name: tensor for name, tensor in state.items() if part not in name}


def cut_router(state: Tensors) -> Tensors:
    return {name: tensor[:3] if name.endswith("mlp.gate.weight") else tensor for name, tensor in state.items()}


@pytest.mark.parametrize(
    ("family", "change", "line"),
    [
        ("deepseek-v3", without("kv_b_proj"), "kv_b_proj.weight is missing; the MTP modules are not whole"),
        ("glm4-moe", without(".hnorm"), r"hnorm\.weight is missing"),
        ("glm4-moe", cut_router, r"mlp\.gate\.weight has shape \[3, 32\], an MTP module of the target has \[4, 32\]"),
        ("qwen3-next", lambda state: {**state, "mtp.more.weight": torch.ones(1)}, "has no place in an MTP module"),
    ],
)
def test_modules_that_are_not_whole_are_refused(
    family: str, change: Callable[[Tensors], Tensors], line: str, tmp_path: Path
) -> None:
    folder = save_published(family, tmp_path, 1, change)
    with pytest.raises(UnusableInput, match=line):
        given_draft(str(folder), identify(folder), None)


def test_several_layers_beside_a_target_are_refused(tmp_path: Path) -> None:
    folder = save_published("qwen3.5", tmp_path)
    config = json.loads((folder / "config.json").read_text())
    (folder / "config.json").write_text(json.dumps({**config, "mtp_num_hidden_layers": 2}))
    with pytest.raises(UnreadableCheckpoint, match="modules of one layer are read, since fc and norm are shared"):
        open_head(folder, identify(folder))
