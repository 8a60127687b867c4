"""Published configs of heads, sizes shrunk and every other field as published: read and right, or one true line."""

import json
import re
from pathlib import Path
from typing import Any

import pytest

from specverify.reference.draft.eagle1 import Eagle1
from specverify.reference.draft.eagle3 import Eagle3
from specverify.reference.draft.head import Head
from specverify.reference.draft.hidden import HiddenStates
from specverify.reference.draft.layer_head import HeadLayer
from specverify.reference.draft_files import open_head
from specverify.reference.files.fields import UnreadableCheckpoint
from specverify.reference.tree import RankTree
from tests.headfiles import TARGET, saved
from tests.meta.words.test_head_config_files import distance

PUBLISHED: dict[str, dict[str, Any]] = json.loads(
    (Path(__file__).parents[2] / "published_heads.json").read_text(encoding="utf-8")
)
"""The name of a head to its source and its config; both repositories are under free licences (MIT, Apache 2.0)."""

BARE = RankTree((0,), (0,))
CLOSE = 1e-9


def written(name: str, folder: Path) -> tuple[str, dict[str, Any]]:
    """Write the head `name` with seeded weights; its kind and its config."""
    config = PUBLISHED[name]["config"]
    layer = HeadLayer(2, config.get("num_key_value_heads", 2), 4, 12)
    is_eagle1 = "draft_vocab_size" not in config
    head: Head = Eagle1(BARE, HiddenStates(place="normed", shift=1), layer)
    if not is_eagle1:
        head = Eagle3(BARE, HiddenStates((1, 3, 4), shift=1), layer, (1, 2, 5, 11, 16))
    saved(folder, head, "safeailab")
    (folder / "config.json").write_text(json.dumps(config))
    return "eagle1" if is_eagle1 else "eagle3", config


BLOCK = "a draft that proposes a block at once"

LINES = {
    "qwen2-5-vl-7b-eagle3": "rope field 'mrope_section' is not computed in heads",
    "qwen2.5-vl-32b-eagle3": "rope field 'mrope_section' is not computed in heads",
    "qwen3-30B-A3B-eagle3.1": "norm_output is true beside tensors named midlayer",
    **{name: BLOCK for name in PUBLISHED if re.search("dflash|dspark|domino|peagle", name)},
}
"""The heads that are refused, each with words of the line."""


@pytest.mark.parametrize("name", PUBLISHED)
def test_a_published_head_is_read_and_right_or_refused_in_one_true_line(name: str, tmp_path: Path) -> None:
    kind, config = written(name, tmp_path)
    if name in LINES:
        with pytest.raises(UnreadableCheckpoint, match=re.escape(LINES[name])) as refusal:
            open_head(tmp_path, TARGET)
        assert "\n" not in str(refusal.value)
    else:
        answer = distance(kind, config, tmp_path)
        assert isinstance(answer, float), answer
        assert answer < CLOSE


def test_the_class_alone_tells_a_draft_of_blocks_from_a_head(tmp_path: Path) -> None:
    """The published config of P-EAGLE has the fields of an EAGLE-3 head, and one layer more or less."""
    _, config = written("qwen3-8b-peagle", tmp_path)
    (tmp_path / "config.json").write_text(json.dumps({**config, "num_hidden_layers": 1}))
    with pytest.raises(UnreadableCheckpoint, match="architectures names 'PEagleDraftModel'"):
        open_head(tmp_path, TARGET)
