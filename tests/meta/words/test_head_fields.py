"""Every field of a head's config.json is read, changes nothing, or is refused by name."""

from dataclasses import replace
from pathlib import Path
from typing import Any

import pytest
import torch
from transformers import LlamaConfig
from transformers.models.llama.modeling_llama import LlamaRotaryEmbedding
from transformers.models.qwen2_5_vl.configuration_qwen2_5_vl import Qwen2_5_VLTextConfig
from transformers.models.qwen2_5_vl.modeling_qwen2_5_vl import Qwen2_5_VLRotaryEmbedding

from specverify.backends.compositions import open_cpu
from specverify.properties.verdict.judge import judge
from specverify.reference.architecture import Rope
from specverify.reference.case import Case
from specverify.reference.draft.eagle3 import Eagle3
from specverify.reference.draft.hidden import HiddenStates
from specverify.reference.draft.layer_head import HeadLayer, LayerHead
from specverify.reference.draft_files import open_head
from specverify.reference.draft_files.known_fields import BLOCK_DRAFTS, INERT, NEUTRAL, READ
from specverify.reference.files.fields import UnreadableCheckpoint
from specverify.reference.sampling import Stops
from specverify.reference.tree import RankTree
from specverify.setup.subjects import subject_of
from tests.corruption import BY_NAME, ORACLE
from tests.headfiles import TARGET, save_head, weights_of

TREE = RankTree((0, 0, 0, 1, 2), (0, 0, 1, 0, 0))
LAYER = HeadLayer(2, 1, 4, 12)
HEAD = Eagle3(TREE, HiddenStates((1, 3, 4), shift=1), LAYER, (1, 2, 5, 11, 16))
YARN = Rope(kind="yarn", factor=4.0, original=8, truncate=False)
BARE = {"draft_vocab_size": 24}
"""The field of a head that names every token of the target."""


def refusal_line(folder: Path, **fields: Any) -> str:
    """The line with which the head with these fields is refused."""
    with pytest.raises(UnreadableCheckpoint) as refusal:
        open_head(save_head(folder, HEAD, "vllm", fields), TARGET)
    return str(refusal.value)


@pytest.mark.parametrize("name", NEUTRAL)
def test_a_field_of_another_formula_is_refused_by_name(name: str, tmp_path: Path) -> None:
    plain = NEUTRAL[name]
    assert f"{name} is" in refusal_line(tmp_path / "other", **{name: not plain if isinstance(plain, bool) else 7})
    if plain is not None:
        assert open_head(save_head(tmp_path / "plain", HEAD, "vllm", {name: plain}), TARGET).words.vocabulary


IMPOSSIBLE_FIELDS: dict[str, tuple[dict[str, Any], str]] = {
    "unknown": ({"gated_attention": True}, "gated_attention is True, a field that heads are not known to have"),
    "window": ({"sliding_window": 7}, "sliding_window is stated: layers of heads have none"),
    "windows": ({"layer_types": ["sliding_attention"]}, "layer_types is ['sliding_attention']: layers of heads see"),
    "partial": (
        {"rope_parameters": {"rope_type": "default", "rope_theta": 1e4, "partial_rotary_factor": 0.5}},
        "partial_rotary_factor in the rope dictionary",
    ),
    "axes": (
        {"rope_parameters": {"rope_type": "default", "mrope_section": [1, 1]}},
        "mrope_section is [1, 1], not three numbers of rotary pairs",
    ),
}  # fmt: skip


@pytest.mark.parametrize("name", IMPOSSIBLE_FIELDS)
def test_what_a_head_cannot_have_is_said(name: str, tmp_path: Path) -> None:
    fields, words = IMPOSSIBLE_FIELDS[name]
    assert words in refusal_line(tmp_path, **fields)


@pytest.mark.parametrize("name", sorted(set(BLOCK_DRAFTS) - {"dflash_config"}))
def test_a_draft_of_blocks_is_never_taken_for_a_head(name: str, tmp_path: Path) -> None:
    assert f"({BLOCK_DRAFTS[name]}), which is not computed here" in refusal_line(tmp_path, **{name: 16})


def test_a_head_with_the_options_of_a_draft_of_blocks_is_read_as_one(tmp_path: Path) -> None:
    assert "dflash_config is 16, not an object" in refusal_line(tmp_path, dflash_config=16)
    assert "norm_before_residual is False, a field that heads" in refusal_line(
        tmp_path, dflash_config={"block_size": 4}
    )


def test_fields_without_effect_and_stated_windows_that_are_off_are_taken(tmp_path: Path) -> None:
    fields = {
        "max_window_layers": 28,
        "use_sliding_window": False,
        "sliding_window": 4096,
        "transformers_version": "5.0",
    }
    opened = open_head(save_head(tmp_path, HEAD, "vllm", {**fields, "layer_types": ["full_attention"]}), TARGET)
    assert opened.words.vocabulary == HEAD.vocabulary


def test_the_lists_of_fields_do_not_meet() -> None:
    sets = (READ, INERT, set(NEUTRAL), set(BLOCK_DRAFTS) - {"parallel_drafting"})
    assert sum(map(len, sets)) == len(set().union(*sets))


READABLE: dict[str, tuple[Eagle3, dict[str, Any]]] = {
    "yarn": (
        replace(HEAD, layer=replace(LAYER, rope=YARN)),
        {"rope_scaling": {"type": "yarn", "factor": 4.0, "original_max_position_embeddings": 8, "truncate": False}},
    ),
    "yarn with magnitudes": (
        replace(HEAD, layer=replace(LAYER, rope=replace(YARN, truncate=True, mscale=0.7, mscale_all_dim=1.1))),
        {"rope_parameters": {"rope_type": "yarn", "factor": 4.0, "original_max_position_embeddings": 8, "mscale": 0.7,
                             "mscale_all_dim": 1.1, "rope_theta": 10000.0}},
    ),
    "narrow": (replace(HEAD, hidden_size=6), {"hidden_size": 6, "target_hidden_size": 8}),
    "wide": (
        replace(HEAD, hidden_size=12, vocabulary=()), {"hidden_size": 12, "target_hidden_size": 8, **BARE},
    ),
}  # fmt: skip


@pytest.mark.parametrize("name", READABLE)
def test_a_published_head_is_read_and_run(name: str, tmp_path: Path) -> None:
    head, fields = READABLE[name]
    opened = open_head(save_head(tmp_path, head, "vllm", fields), TARGET)
    assert replace(opened.words.with_shapes((TREE,)), files=None) == head
    for draft in (head, opened.words.with_shapes((TREE,))):
        case = Case(TARGET, (3, 1, 4, 1, 5, 9), draft, stops=Stops(8), dtype="float64")
        verdict = judge(case, (BY_NAME["draft.fidelity"],), ORACLE, subject_of(open_cpu()))
        assert verdict.outcomes["draft.fidelity"] == "checked"
        assert not verdict.findings


@pytest.mark.parametrize("fields", [{}, BARE, {"draft_vocab_size": None}])
def test_a_head_of_the_whole_vocabulary_without_a_matrix_scores_with_the_targets(
    fields: dict[str, Any], tmp_path: Path
) -> None:
    head = replace(HEAD, vocabulary=())
    state = {name: array for name, array in weights_of(head).items() if name != "lm_head.weight"}
    opened = open_head(save_head(tmp_path, head, "vllm", fields, state), TARGET)
    assert "lm_head.weight" not in opened.weights
    case = Case(TARGET, (3, 1, 4), opened.words.with_shapes((TREE,)), stops=Stops(4), dtype="float64")
    assert not judge(case, (BY_NAME["draft.fidelity"],), ORACLE, subject_of(open_cpu())).findings


def test_a_narrow_head_without_an_embedding_is_refused(tmp_path: Path) -> None:
    head, fields = READABLE["narrow"]
    state = {name: array for name, array in weights_of(head).items() if name != "embed_tokens.weight"}
    with pytest.raises(UnreadableCheckpoint, match=r"hidden_size is 6, and .* has 8: such a head has fc, embed_tokens"):
        open_head(save_head(tmp_path, head, "vllm", fields, state), TARGET)


@pytest.mark.parametrize("kind", ["default", "mrope"])
def test_rotary_pairs_of_axes_are_those_of_text(kind: str, tmp_path: Path) -> None:
    axes = {"rope_scaling": {"type": kind, "mrope_section": [1, 1, 0], "mrope_interleaved": True}, "rope_theta": 5e5}
    head = open_head(save_head(tmp_path / "axes", HEAD, "vllm", axes), TARGET)
    plain = open_head(save_head(tmp_path / "plain", HEAD, "vllm", {"rope_scaling": None, "rope_theta": 5e5}), TARGET)
    assert isinstance(head.words, LayerHead)
    assert isinstance(plain.words, LayerHead)
    assert head.words.layer == plain.words.layer


def test_axes_with_one_number_turn_as_plain_rotary_embedding_does() -> None:
    """By transformers' own class, whose pairs of each section turn by the position on another axis."""
    rope = {"rope_type": "default", "rope_theta": 5e5}
    sizes = {"hidden_size": 16, "num_attention_heads": 2, "num_hidden_layers": 1}
    axes = Qwen2_5_VLTextConfig(**sizes, rope_parameters={**rope, "mrope_section": [2, 1, 1]})
    positions, hidden = torch.arange(9)[None], torch.zeros(1, 9, 16)
    turned = Qwen2_5_VLRotaryEmbedding(axes)(hidden, positions[None].expand(3, -1, -1))
    plain = LlamaRotaryEmbedding(LlamaConfig(**sizes, rope_parameters=rope))(hidden, positions)
    for ours, theirs in zip(turned, plain, strict=True):
        torch.testing.assert_close(ours, theirs, rtol=0, atol=0)
