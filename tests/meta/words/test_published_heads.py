"""Published configs of heads, sizes shrunk and every other field as published: read and right, or one true line."""

import json
import re
from dataclasses import replace
from pathlib import Path
from typing import Any

import numpy as np
import pytest
import torch

from specverify.reference.draft.block import Block
from specverify.reference.draft.eagle1 import Eagle1
from specverify.reference.draft.eagle3 import Eagle3
from specverify.reference.draft.head import Head
from specverify.reference.draft.hidden import HiddenStates
from specverify.reference.draft.layer_head import HeadLayer
from specverify.reference.draft_files import open_head
from specverify.reference.files.fields import UnreadableCheckpoint
from specverify.reference.tree import RankTree
from tests.block_rows import scores_of
from tests.headfiles import TARGET, save_head, weights_of
from tests.meta.words.test_block_files import formulas_of, tensors_of_target
from tests.meta.words.test_head_config_files import distance

PUBLISHED: dict[str, dict[str, Any]] = json.loads(
    (Path(__file__).parents[2] / "published_heads.json").read_text(encoding="utf-8")
)
"""The name of a head to its source and its config; both repositories are under free licences (MIT, Apache 2.0)."""

BARE = RankTree((0,), (0,))
CLOSE = 1e-9


def write_head(name: str, folder: Path) -> tuple[str, dict[str, Any]]:
    """Write the head `name` with seeded weights; its kind and its config."""
    config = PUBLISHED[name]["config"]
    layer = HeadLayer(2, config.get("num_key_value_heads", 2), 4, 12)
    is_eagle1 = "draft_vocab_size" not in config
    head: Head = Eagle1(BARE, HiddenStates(place="normed", shift=1), layer)
    if not is_eagle1:
        head = Eagle3(BARE, HiddenStates((1, 3, 4), shift=1), layer, (1, 2, 5, 11, 16))
    save_head(folder, head, "safeailab")
    (folder / "config.json").write_text(json.dumps(config))
    return "eagle1" if is_eagle1 else "eagle3", config


LINES = {
    "qwen3-30B-A3B-eagle3.1": "norm_output is true beside tensors named midlayer",
    "qwen3-8b-peagle": "mask_token_id is missing; add it",
    **{name: "projector_type is 'domino', which is not computed" for name in PUBLISHED if "domino" in name},
}
"""The heads that are refused, each with words of the line."""


BLOCKS = [name for name in PUBLISHED if re.search("dflash|dspark", name)]
"""Drafts of blocks that are read."""


def small_block(name: str, folder: Path) -> dict[str, Any]:
    """Write the draft of blocks `name` for the small target, with seeded weights; its config."""
    config = PUBLISHED[name]["config"]
    options = dict(config["dflash_config"])
    count = len(options["target_layer_ids"])
    options |= {"target_layer_ids": [1, 2, 3, 5, 6][:count], "mask_token_id": 23}
    options |= {"markov_rank": 3} if "markov_rank" in options else {}
    words = {"conv_taps": "conv_kernel_size", "conv_group": "conv_group_size"}
    words |= {word: word for word in ("selector_rank", "selector_top_k")}
    further = {word: options.get(name, 0) for word, name in words.items()}
    window = {"sliding_window": 3} if config.get("sliding_window") else {}
    content = {**config, **window, "dflash_config": options, "num_target_layers": 8}
    layer = HeadLayer(config["num_attention_heads"], config["num_key_value_heads"], config["head_dim"], 12)
    rank = options.get("markov_rank", 0)
    reads = HiddenStates(tuple(options["target_layer_ids"]))
    draft = Block(BARE, reads, layer, 4, 23, layers=config["num_hidden_layers"], markov_rank=rank, **further)
    save_head(folder, draft, "zlab")
    # Every published DSpark has a confidence head.
    if options.get("enable_confidence_head"):
        width = 8 + rank * bool(options.get("confidence_head_with_markov"))
        shapes = {"confidence_head.proj.weight": (1, width), "confidence_head.proj.bias": (1,)}
        extra = {part: np.ones(shape) for part, shape in shapes.items()}
        save_head(folder, draft, "zlab", state={**weights_of(draft), **extra})
    (folder / "config.json").write_text(json.dumps(content))
    return content


@pytest.mark.parametrize("name", BLOCKS)
def test_a_published_draft_of_blocks_is_read_and_right(name: str, tmp_path: Path) -> None:
    content = small_block(name, tmp_path)
    draft = open_head(tmp_path, TARGET).words
    assert isinstance(draft, Block)
    assert draft.from_anchor == ("dspark" in name)
    assert draft.slots == {**content, **content["dflash_config"]}["block_size"]
    assert draft.windows == tuple(3 * (kind == "sliding_attention") for kind in content["layer_types"]) * (
        "sliding_attention" in content["layer_types"]
    )
    assert (draft.selector_top_k > 0) == ("dflash2" in name)
    arrays = tensors_of_target(draft, 6, 1)
    tensors = {part: torch.tensor(array) for part, array in arrays.items()}
    formulas = formulas_of(draft)
    outputs = formulas.outputs(7, arrays["hidden"])
    for path in ((7,), (7, 3, 11)):
        theirs = scores_of(content, tmp_path, path, tensors, draft.slot_of(0))
        np.testing.assert_allclose(formulas.score(outputs, path), theirs, rtol=0, atol=CLOSE)


@pytest.mark.parametrize("name", [name for name in PUBLISHED if name not in BLOCKS])
def test_a_published_head_is_read_and_right_or_refused_in_one_true_line(name: str, tmp_path: Path) -> None:
    kind, config = write_head(name, tmp_path)
    if name in LINES:
        with pytest.raises(UnreadableCheckpoint, match=re.escape(LINES[name])) as refusal:
            open_head(tmp_path, TARGET)
        assert "\n" not in str(refusal.value)
    else:
        if "mrope_section" in (config.get("rope_scaling") or {}):
            # The axes are those of a target that sees images; transformers' Llama, the truth here, has text alone.
            read = open_head(tmp_path, TARGET).words
            config = {**config, "rope_scaling": None}
            (tmp_path / "config.json").write_text(json.dumps(config))
            plain = open_head(tmp_path, TARGET).words
            assert plain == replace(read, files=plain.files)
        answer = distance(kind, config, tmp_path)
        assert isinstance(answer, float), answer
        assert answer < CLOSE


def test_the_class_alone_tells_a_head_with_mask_tokens_from_another(tmp_path: Path) -> None:
    """The published config of P-EAGLE has the fields of an EAGLE-3 head, and one layer more or less."""
    _, config = write_head("qwen3-8b-peagle", tmp_path)
    (tmp_path / "config.json").write_text(json.dumps({**config, "num_hidden_layers": 1, "mask_token_id": 23}))
    with pytest.raises(UnreadableCheckpoint, match="tensor mask_hidden is missing"):
        open_head(tmp_path, TARGET)
