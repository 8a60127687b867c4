"""Heads that cannot be read: one line each, and nothing is loaded."""

import json
from collections.abc import Callable
from dataclasses import dataclass, field, replace
from pathlib import Path
from typing import Any

import numpy as np
import pytest
from safetensors.numpy import save_file

from specverify.reference.case import Case
from specverify.reference.draft.eagle1 import Eagle1
from specverify.reference.draft.eagle3 import Eagle3
from specverify.reference.draft.head import Head, HeadFiles
from specverify.reference.draft.hidden import HiddenStates
from specverify.reference.draft.layer_head import HeadLayer
from specverify.reference.draft.medusa import Medusa
from specverify.reference.draft_files import open_head
from specverify.reference.files.fields import UnreadableCheckpoint
from specverify.reference.malformed import Malformed
from specverify.reference.sampling import Stops
from specverify.reference.trace import Array
from specverify.reference.tree import RankTree
from specverify.reference.weights import head_weights
from tests.headfiles import TARGET, save_head, weights_of

BARE = RankTree((0,), (0,))
LAYER = HeadLayer(2, 1, 4, 12)
EAGLE1 = Eagle1(BARE, HiddenStates(place="normed", shift=1), LAYER)
EAGLE3 = Eagle3(BARE, HiddenStates((1, 3, 4), shift=1), LAYER, (1, 2, 5, 11, 16))
MEDUSA = Medusa(BARE, HiddenStates(place="normed"), 2)
IDS = "eagle_aux_hidden_state_layer_ids"


@dataclass(frozen=True)
class Wrong:
    """A head with something wrong: fields of config.json, tensors (None removes one), and words of the message."""

    head: Head
    layout: str
    words: str
    config: dict[str, Any] = field(default_factory=dict)
    state: dict[str, Array | None] = field(default_factory=dict)


def d2t(*ids: int) -> Array:
    return np.array(ids) - np.arange(len(ids))


def longer(name: str, head: Head = EAGLE3) -> Array:
    return np.pad(weights_of(head)[name], [(0, 4), *[(0, 0)] * (weights_of(head)[name].ndim - 1)])


NAN = np.full((8,), np.nan)
WRONG: dict[str, Wrong] = {
    "hidden size of another target": Wrong(
        EAGLE3, "safeailab", "hidden_size is 16, and the built-in target has 8", {"hidden_size": 16}
    ),
    "target_hidden_size": Wrong(EAGLE3, "vllm", "target_hidden_size is 64", {"target_hidden_size": 64}),
    "vocabulary of another target": Wrong(
        EAGLE1, "safeailab", "vocab_size is 32000, and the built-in target has 24", {"vocab_size": 32000}
    ),
    "layers of another target": Wrong(
        EAGLE3, "vllm", "[2, 18, 33], and the built-in target has the layers 0 to 7", {IDS: [2, 18, 33]}
    ),
    "input of a layer that is the output of the last": Wrong(
        EAGLE3, "vllm", "of which the inputs are read", {IDS: [2, 4, 8]}
    ),
    "one layer twice": Wrong(EAGLE3, "vllm", "each once", {IDS: [2, 4, 4]}),
    "layers that are no numbers": Wrong(EAGLE3, "vllm", "not a list of layer numbers", {IDS: "2"}),
    "layers stated twice": Wrong(EAGLE3, "specforge", "is stated twice, and differently", {IDS: [0, 1, 2]}),
    "width of fc": Wrong(EAGLE3, "vllm", "tensor fc.weight has shape [8, 24]", {IDS: [2, 4]}),
    "a tensor of another shape": Wrong(
        EAGLE3,
        "safeailab",
        "has shape [12], where config.json and the target ask for [8]",
        state={"norm.weight": longer("norm.weight")},
    ),
    "a tensor that is missing": Wrong(
        EAGLE3,
        "safeailab",
        "tensor midlayer.hidden_norm.weight is missing",
        state={"midlayer.hidden_norm.weight": None},
    ),
    "a tensor without a place": Wrong(
        EAGLE1,
        "safeailab",
        "tensor layers.0.input_layernorm.weight has no place in the EAGLE-1",
        state={"layers.0.input_layernorm.weight": np.ones(8)},
    ),
    "a second layer's tensor": Wrong(
        EAGLE3,
        "vllm",
        "tensor layers.1.mlp.up_proj.weight has no place",
        state={"layers.1.mlp.up_proj.weight": np.ones((12, 8))},
    ),
    "several layers": Wrong(
        EAGLE3, "safeailab", "num_hidden_layers is 2: EAGLE-3 heads of one decoder", {"num_hidden_layers": 2}
    ),
    "a layer too many": Wrong(EAGLE3, "vllm", "layers.1.self_attn.q_proj.weight is missing", {"num_hidden_layers": 2}),
    "too many layers": Wrong(EAGLE3, "vllm", "heads of 1 to 8 layers are read", {"num_hidden_layers": 9}),
    "a layer of EAGLE-1 too many": Wrong(
        EAGLE1, "safeailab", "layers.1.self_attn.q_proj.weight is missing", {"num_hidden_layers": 2}
    ),
    "too many layers of EAGLE-1": Wrong(EAGLE1, "vllm", "heads of 1 to 8 layers are read", {"num_hidden_layers": 9}),
    "several layers of EAGLE-1 in speculators": Wrong(
        EAGLE1, "speculators", "num_hidden_layers is 2: EAGLE-1 heads of one decoder", {"num_hidden_layers": 2}
    ),
    "flags of rotation that count the target's layers": Wrong(
        EAGLE1, "vllm", "no_rope_layers has 8 entries, and the head 1 layers", {"no_rope_layers": [1, 1, 1, 0] * 2}
    ),
    "flags of rotation that are layers": Wrong(
        EAGLE1, "safeailab", "a list of 1 (rotated) and 0 is read", {"no_rope_layers": [3]}
    ),
    "a layer of EAGLE-3 without rotary embedding": Wrong(
        EAGLE3, "vllm", "EAGLE-3 heads are computed with rotary embedding in every layer", {"no_rope_layers": [0]}
    ),
    "experts in EAGLE-3": Wrong(EAGLE3, "vllm", "are computed without experts", {"num_local_experts": 4}),
    "experts that are missing": Wrong(
        EAGLE1, "safeailab", "feed_forward.router.weight is missing (num_local_experts is 4)", {"num_local_experts": 4}
    ),
    "more experts for a row than there are": Wrong(
        replace(EAGLE1, experts=2), "safeailab", "experts_per_token: 3 with 2 experts", {"num_experts_per_tok": 3}
    ),
    "experts that nobody asks for": Wrong(
        replace(EAGLE1, experts=2), "safeailab", "layers.0.mlp.gate_proj.weight is missing", {"num_local_experts": 0}
    ),
    "NaN": Wrong(EAGLE3, "speculators", "tensor norm.weight holds NaN", state={"norm.weight": NAN}),
    "d2t beyond the vocabulary": Wrong(
        EAGLE3,
        "safeailab",
        "d2t is out of range: draft id 4 means target id 24",
        state={"d2t": d2t(1, 2, 5, 11, 24), "t2d": None},
    ),
    "d2t that holds ids": Wrong(
        EAGLE3, "safeailab", "d2t holds offsets", state={"d2t": np.array([1, 2, 5, 20, 23]), "t2d": None}
    ),
    "d2t below 0": Wrong(EAGLE3, "safeailab", "draft id 0 means target id -1", state={"d2t": d2t(-1, 2, 5, 11, 16)}),
    "d2t that does not ascend": Wrong(
        EAGLE3, "safeailab", "target ids must ascend", state={"d2t": d2t(1, 2, 11, 5, 16), "t2d": None}
    ),
    "d2t of another t2d": Wrong(
        EAGLE3, "safeailab", "belong to different vocabularies", state={"d2t": d2t(1, 2, 5, 11, 17)}
    ),
    "d2t of zeros": Wrong(EAGLE3, "vllm", "the map was never filled", state={"d2t": d2t(0, 1, 2, 3, 4), "t2d": None}),
    "d2t of fractions": Wrong(EAGLE3, "vllm", "must hold whole numbers", state={"d2t": np.ones(5)}),
    "no d2t": Wrong(EAGLE3, "vllm", "draft ids would be read as the first target ids", state={"d2t": None}),
    "a draft vocabulary that is too large": Wrong(EAGLE3, "vllm", "more than the 24", {"draft_vocab_size": 25}),
    "a weight of whole numbers": Wrong(
        EAGLE3, "vllm", "must hold fractions", state={"norm.weight": np.ones(8, np.int64)}
    ),
    "a bias that is missing": Wrong(
        EAGLE1,
        "safeailab",
        "tensor fc.bias is missing (config.json has no field bias, which",
        {"bias": None},
        {"fc.bias": None},
    ),
    "a bias that should not be there": Wrong(
        EAGLE1, "safeailab", "fc.bias is stored, and config.json has bias false", {"bias": False}
    ),
    "a bias of fc in EAGLE-3": Wrong(EAGLE3, "safeailab", "tensor fc.bias is missing", {"bias": True}),
    "a bias of fc in vLLM": Wrong(EAGLE3, "vllm", "bias is true: vLLM and SGLang give it to different", {"bias": True}),
    "no bias of attention": Wrong(
        EAGLE3, "vllm", "q_proj.bias is missing (config.json has attention_bias true)", {"attention_bias": True}
    ),
    "a bias of attention": Wrong(
        EAGLE1,
        "safeailab",
        "is stored, and config.json has attention_bias false",
        state={"layers.0.self_attn.q_proj.bias": np.ones(8)},
    ),
    "norm_before_residual in SGLang": Wrong(
        EAGLE3, "specforge", "vLLM heeds it, SafeAILab and SGLang do not", {"norm_before_residual": True}
    ),
    "norm_output in SpecForge": Wrong(EAGLE3, "specforge", "SpecForge before its change 879", {"norm_output": True}),
    "two norms before fc": Wrong(EAGLE3, "vllm", "both true", {"norm_before_fc": True, "fc_norm": True}),
    "no norm before fc": Wrong(
        EAGLE3, "vllm", "input_norm.weight is missing (norm_before_fc is true)", {"norm_before_fc": True}
    ),
    "fc without states of layers": Wrong(
        EAGLE3, "specforge", "tensor fc.weight has no place", {"eagle_config": {"use_aux_hidden_state": False}}
    ),
    "a head that is tied and stored": Wrong(
        EAGLE3, "specforge", "tie_word_embeddings is true", {"tie_word_embeddings": True}
    ),
    "no lm_head": Wrong(EAGLE3, "vllm", "tensor lm_head.weight is missing", state={"lm_head.weight": None}),
    "lm_head of EAGLE-1": Wrong(
        EAGLE1, "vllm", "scores come from the target's own head", state={"lm_head.weight": np.ones((24, 8))}
    ),
    "further norms of speculators": Wrong(EAGLE1, "speculators", "layernorms is true", {"layernorms": True}),
    "a token map": Wrong(MEDUSA, "vllm", "a token map reduces the vocabulary", {"truncated_vocab_size": 12}),
    "a token map of EAGLE-1": Wrong(
        EAGLE1, "vllm", "a token map reduces the vocabulary", state={"token_map": np.arange(12)}
    ),
    "rope variant": Wrong(
        EAGLE3, "vllm", "rope_type is 'longrope'", {"rope_scaling": {"rope_type": "longrope", "factor": 2.0}}
    ),
    "activation": Wrong(EAGLE3, "vllm", "hidden_act is 'gelu'", {"hidden_act": "gelu"}),
    "quantized": Wrong(EAGLE3, "vllm", "quantized weights", {"quantization_config": {"bits": 4}}),
    "parallel drafting": Wrong(EAGLE3, "vllm", "parallel_drafting is True", {"parallel_drafting": True}),
    "logit_scale": Wrong(MEDUSA, "vllm", "logit_scale is 0.5", {"logit_scale": 0.5}),
    "another kind of speculators": Wrong(
        EAGLE3,
        "speculators",
        "'mtp'; eagle, eagle3, peagle, dflash, dflash2, dspark are read",
        {"speculators_model_type": "mtp"},
    ),
    "no number of heads": Wrong(
        MEDUSA, "fasterdecoding", "field medusa_num_heads is missing", {"medusa_num_heads": None}
    ),
    "more heads than stored": Wrong(
        MEDUSA, "fasterdecoding", "tensor medusa_head.2.0.linear.weight is missing", {"medusa_num_heads": 3}
    ),
    "fewer heads than stored": Wrong(
        MEDUSA, "fasterdecoding", "(and 2 more) has no place in the Medusa head", {"medusa_num_heads": 1}
    ),
    "blocks that differ": Wrong(replace(MEDUSA, layers=2), "fasterdecoding", "head 0 has different blocks"),
    "no bias of a block": Wrong(
        MEDUSA, "vllm", "is stored, and config.json has medusa_fc_bias false", {"medusa_fc_bias": False}
    ),
    "no head at all": Wrong(EAGLE1, "safeailab", "those of no draft head", state={"fc.weight": None}),
    "MTP modules elsewhere": Wrong(
        EAGLE1, "safeailab", "MTP modules are read from the target's own checkpoint", {"num_nextn_predict_layers": 1}
    ),
}


def write(folder: Path, wrong: Wrong) -> Path:
    state = {name: array for name, array in {**weights_of(wrong.head), **wrong.state}.items() if array is not None}
    return save_head(folder, wrong.head, wrong.layout, wrong.config, state)


@pytest.mark.parametrize("name", WRONG)
def test_a_head_that_cannot_be_read_is_refused_in_one_line(tmp_path: Path, name: str) -> None:
    wrong = WRONG[name]
    with pytest.raises(UnreadableCheckpoint) as error:
        open_head(write(tmp_path, wrong), TARGET)
    assert wrong.words in str(error.value)
    assert "\n" not in str(error.value)


def pickle_weights(folder: Path) -> None:
    (folder / "model.safetensors").rename(folder / "medusa_lm_head.pt")


def twice(folder: Path) -> None:
    state = weights_of(EAGLE3)
    save_file({**state, "layers.0.hidden_norm.weight": np.ones(8)}, folder / "model.safetensors")


def tear_file(folder: Path) -> None:
    content = (folder / "model.safetensors").read_bytes()
    (folder / "model.safetensors").write_bytes(content[:-9])


DAMAGED: dict[str, tuple[Callable[[Path], object], str]] = {
    "pickle": (
        pickle_weights,
        "pickle is never loaded; convert to safetensors with torch's load(file, weights_only=True)",
    ),
    "no config": (lambda folder: (folder / "config.json").unlink(), "config.json is missing"),
    "two layouts in one": (twice, "layers named midlayer and layers.0 in one head"),
    "torn": (tear_file, "truncated or corrupt"),
    "a list": (lambda folder: (folder / "config.json").write_text("[]"), "holds no JSON object"),
}


@pytest.mark.parametrize("name", DAMAGED)
def test_a_damaged_directory_is_refused_in_one_line(tmp_path: Path, name: str) -> None:
    damage, words = DAMAGED[name]
    folder = save_head(tmp_path, EAGLE3, "safeailab")
    damage(folder)
    with pytest.raises(UnreadableCheckpoint) as error:
        open_head(folder, TARGET)
    assert words in str(error.value)
    assert "\n" not in str(error.value)


def test_a_directory_that_is_none_is_refused(tmp_path: Path) -> None:
    with pytest.raises(UnreadableCheckpoint, match="no such directory"):
        open_head(tmp_path / "nowhere", TARGET)


def test_the_usual_layers_need_a_target_that_has_them(tmp_path: Path) -> None:
    folder = save_head(tmp_path, EAGLE3, "safeailab")
    small = replace(TARGET, architecture=replace(TARGET.architecture, windows=(0,) * 6))
    with pytest.raises(UnreadableCheckpoint, match="make no sense in the 6 layers"):
        open_head(folder, small)


def test_weights_of_another_digest_or_of_other_words_are_refused(tmp_path: Path) -> None:
    head = open_head(save_head(tmp_path, EAGLE3, "safeailab"), TARGET).words
    assert head.files is not None
    with pytest.raises(UnreadableCheckpoint, match="the case was made with sha256:00"):
        head_weights(replace(head, files=HeadFiles(head.files.source, "sha256:00")), TARGET)
    assert isinstance(head, Eagle3)
    with pytest.raises(UnreadableCheckpoint, match="describes another EAGLE-3 head"):
        head_weights(replace(head, norm_output=True), TARGET)


def test_stored_weights_have_no_seed_and_keep_their_words(tmp_path: Path) -> None:
    head = open_head(save_head(tmp_path, EAGLE3, "safeailab"), TARGET).words
    with pytest.raises(Malformed, match="seed: 1, though the weights are stored"):
        replace(head, seed=1)
    assert head.with_renamed_tokens(lambda tokens: tokens, 1) is None
    assert list(head.simpler()) == []
    with pytest.raises(Malformed, match="draft: a seeded EAGLE-3 head is made for a built-in target"):
        _on_checkpoint(tmp_path, EAGLE3)
    with pytest.raises(Malformed, match=r"layer.intermediate_size: 5000; a seeded head has at most 4096"):
        replace(EAGLE3, layer=replace(LAYER, intermediate_size=5000))


def _on_checkpoint(folder: Path, head: Head) -> Case:
    from specverify.reference.architecture import Checkpoint

    (folder / "target").mkdir()
    (folder / "target" / "config.json").write_text(json.dumps({}))
    return Case(Checkpoint(str(folder), "sha256:0", 24, 64), (1, 2), head, stops=Stops(2))
