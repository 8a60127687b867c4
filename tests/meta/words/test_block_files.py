"""Files of DFlash and DSpark: both layouts are read, and mean what they mean to transformers' modules and `dflash`."""

import json
from dataclasses import replace
from importlib.util import find_spec
from pathlib import Path
from typing import Any

import numpy as np
import pytest
import torch

from specverify.reference.draft.block import Block
from specverify.reference.draft.hidden import HiddenStates
from specverify.reference.draft.layer_head import HeadLayer
from specverify.reference.draft_files import open_head
from specverify.reference.files.fields import UnreadableCheckpoint
from specverify.reference.oracle.draft.block import BlockFormulas
from specverify.reference.oracle.draft.question import Question
from specverify.reference.oracle.parameters import load
from specverify.reference.trace import Array
from specverify.reference.tree import RankTree
from tests.block_rows import package_outputs, package_path, scores_of
from tests.headfiles import TARGET, save_head, weights_of

CLOSE = 1e-9
BARE = RankTree((0,), (0,))
LAYER = HeadLayer(2, 1, 4, 12, 500.0, 1e-6)
STATES = HiddenStates((1, 3, 5))
DFLASH = Block(BARE, STATES, LAYER, 4, 23, layers=2)
DSPARK = replace(DFLASH, from_anchor=True, markov_rank=3)
DFLASH2 = replace(DFLASH, conv_taps=2, conv_group=4, selector_rank=3, selector_top_k=4)
REDUCED = (1, 2, 5, 11, 16)

DRAFTS: dict[str, tuple[Block, str]] = {
    "DFlash of z-lab": (DFLASH, "zlab"),
    "DFlash with windows": (replace(DFLASH, windows=(3, 0), causal="windowed"), "zlab"),
    "DFlash with windows that look ahead": (replace(DFLASH, windows=(2, 2), causal="none"), "zlab"),
    "causal in all layers": (replace(DFLASH, causal="all"), "zlab"),
    "DSpark of SpecForge": (DSPARK, "zlab"),
    "DSpark with a gate": (replace(DSPARK, markov="gated"), "zlab"),
    "DSpark with a state": (replace(DSPARK, markov="rnn"), "zlab"),
    "DSpark in place": (replace(DSPARK, from_anchor=False), "zlab"),
    "DFlash2 of z-lab": (DFLASH2, "zlab"),
    "DFlash2 with windows": (replace(DFLASH2, windows=(2, 2), conv_taps=3, conv_group=1), "zlab"),
    "DFlash2 of speculators": (replace(DFLASH2, vocabulary=REDUCED), "speculators"),
    "DFlash of speculators": (replace(DFLASH, vocabulary=REDUCED), "speculators"),
    "DSpark of speculators": (replace(DSPARK, vocabulary=REDUCED, markov="rnn"), "speculators"),
}


def tensors_of_target(draft: Block, rows: int, seed: int) -> dict[str, Array]:
    """The target's embedding and head, and random states of `rows` tokens as wide as the draft reads."""
    parameters = load(TARGET, "float64")
    width = draft.reads.parts * TARGET.architecture.hidden_size
    hidden = np.random.default_rng(seed).normal(size=(rows, width))
    return {"embedding": parameters.state["model.embed_tokens.weight"], "head": parameters.head, "hidden": hidden}


def formulas_of(draft: Block) -> BlockFormulas:
    return BlockFormulas(draft, Question((0,), 0, None, None, None, TARGET))  # type: ignore[arg-type]


@pytest.mark.parametrize("name", DRAFTS)
def test_a_draft_of_blocks_is_read_and_right(name: str, tmp_path: Path) -> None:
    draft, layout = DRAFTS[name]
    content = json.loads((save_head(tmp_path, draft, layout) / "config.json").read_text())
    opened = open_head(tmp_path, TARGET)
    assert isinstance(opened.words, Block)
    assert replace(opened.words, files=None) == draft
    arrays = tensors_of_target(draft, 7, 5)
    tensors = {name: torch.tensor(array) for name, array in arrays.items()}
    formulas = formulas_of(opened.words)
    outputs = formulas.outputs(9, arrays["hidden"])
    for path in ((9,), (9, 4, 17)[: draft.levels]):
        theirs = scores_of(content, tmp_path, path, tensors, draft.slot_of(0))
        np.testing.assert_allclose(formulas.score(outputs, path), theirs, rtol=0, atol=CLOSE)


def drawn_draft(seed: int) -> Block:
    """A DFlash draft of one to three layers, half of them with windows, as z-lab's package takes them."""
    draw = np.random.default_rng(seed)
    layers = int(draw.integers(1, 4))
    heads = int(draw.choice([1, 2, 4]))
    layer = HeadLayer(heads, int(draw.choice([1, heads])), int(draw.choice([2, 4, 8])), 12, 10000.0, 1e-6)
    count = int(draw.integers(1, 4))
    reads = HiddenStates(tuple(sorted(draw.choice(7, size=count, replace=False).tolist())))
    draft = Block(BARE, reads, layer, int(draw.integers(2, 9)), int(draw.integers(24)), layers=layers)
    own = np.random.default_rng([seed, 2])
    if own.integers(2):
        draft = replace(
            draft,
            conv_taps=int(own.integers(1, 4)),
            conv_group=int(own.choice([1, 2, 4, 8])),
            selector_rank=int(own.integers(1, 5)),
            selector_top_k=int(own.integers(1, 9)),
        )
    if draw.integers(2):
        return draft if draw.integers(2) else replace(draft, causal="all")
    window = int(draw.integers(1, 6))
    windows = tuple(window if layer == 0 or draw.integers(2) else 0 for layer in range(layers))
    return replace(draft, windows=windows, causal=str(draw.choice(["windowed", "none", "all"])))


@pytest.mark.skipif(find_spec("dflash") is None, reason="needs dflash: pip install --no-deps dflash==0.1.0")
@pytest.mark.parametrize("seed", [*range(3), *(pytest.param(seed, marks=pytest.mark.slow) for seed in range(3, 30))])
def test_the_oracle_is_the_published_package_on_drawn_configurations(seed: int, tmp_path: Path) -> None:
    draft = drawn_draft(seed)
    content = json.loads((save_head(tmp_path, draft, "zlab") / "config.json").read_text())
    opened = open_head(tmp_path, TARGET)
    assert isinstance(opened.words, Block)
    draw = np.random.default_rng([seed, 1])
    rows = int(draw.integers(1, 12))
    arrays = tensors_of_target(draft, rows, seed)
    cuts = sorted({int(cut) for cut in draw.integers(1, rows + 1, size=2)} - {rows})
    root = int(draw.integers(24))
    tensors = {name: torch.tensor(array) for name, array in arrays.items()}
    theirs = package_outputs(content, tmp_path, root, tensors, cuts)
    formulas = formulas_of(opened.words)
    np.testing.assert_allclose(formulas.outputs(root, arrays["hidden"]), theirs, rtol=0, atol=CLOSE)
    if draft.selector_rank:
        path = [root]
        for _ in range(draft.levels):
            path.append(int(formulas.score(theirs, tuple(path)).argmax()))
        assert path[1:] == package_path(content, tmp_path, root, theirs, tensors["head"])


WRONG: dict[str, tuple[Block, str, dict[str, Any], str]] = {
    "a part of DFlash2": (DFLASH, "zlab", {"conv_kernel_size": 3}, "conv_group_size, selector_rank"),
    "groups that do not fit": (DFLASH2, "speculators", {"conv_group_size": 3}, "which does not divide hidden_size 8"),
    "Domino": (DFLASH, "zlab", {"projector_type": "domino"}, "projector_type is 'domino', which is not computed here"),
    "a class of DFlash2": (DFLASH, "zlab", {"architectures": ["DFlash2DraftModel"]}, "missing from a draft that names"),
    "an option stated twice": (DFLASH, "zlab", {"mask_token_id": 5}, "mask_token_id is stated twice, and differently"),
    "layers of another target": (DFLASH, "zlab", {"num_target_layers": 36}, "the head of another target"),
    "another attention": (DFLASH, "zlab", {"attention_mode": "mla"}, "attention_mode is 'mla'; gqa, mha are computed"),
    "no block size": (DFLASH, "zlab", {"block_size": None}, "field block_size is missing"),
    "a block of one slot": (DFLASH, "zlab", {"block_size": 1}, "a block of the root alone scores no token"),
    "a scale": (DFLASH, "zlab", {"output_multiplier": 0.5}, "output_multiplier is 0.5; heads are computed without it"),
    "an unknown field": (DFLASH, "zlab", {"thirst": 1}, "thirst is 1, a field that heads are not known to have"),
    "windows without the word": (
        replace(DFLASH, windows=(3, 0), causal="windowed"), "zlab", {"use_sliding_window": False},
        "and use_sliding_window is not true",
    ),
    "windows of speculators": (
        replace(DFLASH, windows=(3, 0), causal="windowed"), "speculators", {}, "no reading is right for both"
    ),
    "layers both ways": (DFLASH, "speculators", {"target_layer_ids": [1, 2, 3]}, "are both stated; keep one"),
    "the last layer": (
        DFLASH, "speculators", {"aux_hidden_state_layer_ids": [2, 4, 8]}, "names the output of the last layer"
    ),
    "a confidence head that is missing": (
        DSPARK, "zlab", {"enable_confidence_head": True}, "confidence_head.proj.weight is missing"
    ),
}  # fmt: skip


@pytest.mark.parametrize("name", WRONG)
def test_a_draft_of_blocks_that_cannot_be_read_is_refused_in_one_line(name: str, tmp_path: Path) -> None:
    draft, layout, config, words = WRONG[name]
    with pytest.raises(UnreadableCheckpoint) as refusal:
        open_head(save_head(tmp_path, draft, layout, config), TARGET)
    assert words in str(refusal.value)
    assert "\n" not in str(refusal.value)


@pytest.mark.parametrize(("with_markov", "confidence"), [(True, "markov"), (False, "state")])
def test_a_confidence_head_is_read(with_markov: bool, confidence: str, tmp_path: Path) -> None:
    draft = replace(DSPARK, confidence=confidence)
    config = {"enable_confidence_head": True, "confidence_head_with_markov": with_markov}
    opened = open_head(save_head(tmp_path, draft, "zlab", config, weights_of(draft)), TARGET)
    assert replace(opened.words, files=None) == draft
    assert set(opened.weights) == set(weights_of(draft)) > set(weights_of(DSPARK))


def test_early_files_of_specforge_have_another_prefix(tmp_path: Path) -> None:
    state = {
        f"logit_head.{name}" if name.startswith("markov_head") else name: array
        for name, array in weights_of(DSPARK).items()
    }
    assert set(open_head(save_head(tmp_path, DSPARK, "zlab", {}, state), TARGET).weights) == set(weights_of(DSPARK))


def test_layers_that_are_not_stated_are_those_of_the_trainers(tmp_path: Path) -> None:
    folder = save_head(tmp_path, replace(DFLASH, reads=HiddenStates((1, 5))), "zlab")
    content = json.loads((folder / "config.json").read_text())
    del content["dflash_config"]["target_layer_ids"]
    (folder / "config.json").write_text(json.dumps(content))
    assert open_head(folder, TARGET).words.reads == HiddenStates((1, 5))
