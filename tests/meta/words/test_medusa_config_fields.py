"""The config.json of Medusa heads means to the oracle what it means to its authors' code, whatever one field says."""

import copy
import json
from pathlib import Path

import numpy as np
import pytest
import torch
from safetensors.torch import load_file
from torch import Tensor

from specverify.reference.draft.head import Head
from specverify.reference.draft.hidden import HiddenStates
from specverify.reference.draft.medusa import Medusa
from specverify.reference.draft_files import open_head
from specverify.reference.draft_files.known_fields import NEUTRAL, READ
from specverify.reference.files.fields import UnreadableCheckpoint
from specverify.reference.oracle.draft.medusa import guess
from specverify.reference.oracle.draft.question import Question
from specverify.reference.oracle.sampled_step import SampledStep
from specverify.reference.tree import RankTree
from tests.config_files import Content, changes
from tests.headfiles import TARGET, save_head

CLOSE = 1e-9
STATE = np.random.default_rng(5).normal(size=TARGET.architecture.hidden_size)
HEADS: dict[str, Head] = {
    "fasterdecoding": Medusa(RankTree((0,), (0,)), HiddenStates(place="normed"), heads=3),
    "vllm": Medusa(RankTree((0,), (0,)), HiddenStates(place="normed"), heads=3, bias=False, layers=2),
}
ADDED = {
    **{name: (7, True, "x") for name in (READ | NEUTRAL.keys())},
    "truncated_vocab_size": (TARGET.vocab_size, 5),
    "medusa_fc_bias": (True, False),
    "original_lm_head": (True, False),
    "medusa_num_layers": (1, 2),
    "num_hidden_layers": (1, 2),
    "unknown": (1,),
}
"""Fields that are added to a config without them."""


def author_scores(layout: str, content: Content, tensors: dict[str, Tensor]) -> list[Tensor]:
    """The scores of each head by the classes of FasterDecoding (`MedusaModel`) and of vLLM (`Medusa`)."""
    state = torch.tensor(STATE)
    scores = []
    if layout == "fasterdecoding":
        for head in range(content["medusa_num_heads"]):
            block = state
            for _ in range(content.get("medusa_num_layers", 1)):
                weight, bias = (tensors[f"{head}.0.linear.{part}"].double() for part in ("weight", "bias"))
                block = block + torch.nn.functional.silu(weight @ block + bias)
            scores.append(tensors[f"{head}.{content.get('medusa_num_layers', 1)}.weight"].double() @ block)
        return scores
    for head in range(content["num_heads"]):
        block = state
        for layer in range(content.get("num_hidden_layers", 1)):
            name = f"blocks.{head}.layers.{layer}"
            inner = tensors[f"{name}.weight"].double() @ block
            if content.get("medusa_fc_bias", False):
                inner = inner + tensors[f"{name}.bias"].double()
            block = block + torch.nn.functional.silu(inner)
        shared = content.get("original_lm_head", False)
        scores.append(tensors[f"lm_heads.{0 if shared else head}.weight"].double() @ block)
    return scores


def distance(layout: str, content: Content, folder: Path) -> float | str:
    """How far the oracle's scores lie from the authors', over their size; or why the config is refused."""
    (folder / "config.json").write_text(json.dumps(content))
    try:
        draft = open_head(folder, TARGET).words
    except UnreadableCheckpoint as why:
        return f"refused: {why}"
    assert isinstance(draft, Medusa)
    question = Question((0,), 0, None, SampledStep.__new__(SampledStep), STATE[None], TARGET, "float64")
    scores = np.stack([guess(draft, question, STATE, head) for head in range(draft.heads)])
    expected = torch.stack(author_scores(layout, content, load_file(folder / "model.safetensors"))).numpy()
    assert scores.shape == expected.shape
    return float(np.abs(scores - expected).max() / np.abs(expected).max())


@pytest.mark.parametrize("layout", HEADS)
def test_one_field_at_a_time_gives_equal_numbers_or_a_refusal(layout: str, tmp_path: Path) -> None:
    save_head(tmp_path, HEADS[layout], layout)
    base = json.loads((tmp_path / "config.json").read_text())
    changed = [
        *changes(base),
        *((f"{name} {value!r} added", {**base, name: value}) for name, values in ADDED.items() for value in values
          if name not in base),
    ]  # fmt: skip
    answers = {"as it is": distance(layout, base, tmp_path)}
    answers |= {words: distance(layout, copy.deepcopy(content), tmp_path) for words, content in changed}
    assert isinstance(answers["as it is"], float)
    equal = [words for words, answer in answers.items() if isinstance(answer, float) and answer < CLOSE]
    wrong = {words: answer for words, answer in answers.items() if isinstance(answer, float) and answer >= CLOSE}
    assert not wrong
    assert len(equal) > 20
    assert all("\n" not in answer for answer in answers.values() if isinstance(answer, str))
