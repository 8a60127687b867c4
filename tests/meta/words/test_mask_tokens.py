"""Heads that score all levels by mask tokens (P-EAGLE): their rows, their files by transformers' modules, refusals."""

import json
from dataclasses import replace
from pathlib import Path
from typing import Any

import numpy as np
import pytest
import torch

from specverify.backends.registry import open_backend
from specverify.reference.case import Case
from specverify.reference.draft.hidden import HiddenStates
from specverify.reference.draft.layer_head import HeadLayer
from specverify.reference.draft.peagle import MASK_STATE, PEagle
from specverify.reference.draft_files import open_head
from specverify.reference.draft_trees import Expansion
from specverify.reference.files.fields import UnreadableCheckpoint
from specverify.reference.malformed import Malformed
from specverify.reference.oracle.decoder import Oracle
from specverify.reference.oracle.draft.eagle3 import Eagle3Formulas
from specverify.reference.oracle.draft.peagle import ScoresOfMasks
from specverify.reference.oracle.draft.question import Question
from specverify.reference.oracle.parameters import load
from specverify.reference.sampling import Stops
from specverify.reference.tree import RankTree
from tests.head_rows import scores_of
from tests.headfiles import TARGET, save_head, weights_of
from tests.models import LLAMA

BARE = RankTree((0,), (0,))
LAYER = HeadLayer(2, 1, 4, 12, 500.0)
HEAD = PEagle(BARE, HiddenStates((1, 3, 4), shift=1), LAYER, (1, 2, 5, 11, 16), mask_slots=3, mask_token=23)
ROWS = 9


def test_a_head_of_files_is_read_and_right(tmp_path: Path) -> None:
    content = json.loads((save_head(tmp_path, HEAD, "speculators") / "config.json").read_text())
    opened = open_head(tmp_path, TARGET)
    assert isinstance(opened.words, PEagle)
    assert replace(opened.words, files=None) == HEAD
    draw = np.random.default_rng(5)
    tokens = tuple(int(token) for token in draw.integers(0, TARGET.vocab_size, ROWS))
    states = draw.normal(size=(ROWS, 24))
    question = Question(tokens, 0, None, None, states, TARGET)  # type: ignore[arg-type]
    formulas = Eagle3Formulas(opened.words, question)
    above = formulas.extend(formulas.empty_past(), tokens, formulas.target_states(states))
    scores = ScoresOfMasks(opened.words, formulas, above)([(), (4,), (4, 7), (4, 7, 9)])
    # Mask tokens are rows like all others: each sees the rows above it.
    embedding = load(TARGET, "float64").state["model.embed_tokens.weight"]
    masks = np.tile(opened.weights[MASK_STATE], (3, 1))
    tensors = {
        "embedded": torch.tensor(embedding[[*tokens, 23, 23, 23]]),
        "states": torch.tensor(np.concatenate([states, masks])),
    }
    theirs = scores_of("eagle3", content, tmp_path, tensors)[ROWS - 1 :]
    np.testing.assert_allclose(scores, theirs, rtol=0, atol=1e-9)


WRONG: dict[str, tuple[dict[str, Any], str]] = {
    "no mask token": ({"mask_token_id": None}, "mask_token_id is missing; add it"),
    "two mask tokens": ({"pard_token": 3}, "mask_token_id is 23 and 3; correct it"),
    "layers of either kind": (
        {"speculators_model_type": None, "architectures": ["PEagleDraftModel"]},
        "SpecForge counts outputs, vLLM inputs",
    ),
    "no token to draft": (
        {"speculators_config": {"proposal_methods": [{"speculative_tokens": 1}]}},
        "speculative_tokens is 1, not a number",
    ),
}  # fmt: skip


@pytest.mark.parametrize("name", WRONG)
def test_a_head_that_cannot_be_read_is_refused_in_one_line(name: str, tmp_path: Path) -> None:
    config, words = WRONG[name]
    with pytest.raises(UnreadableCheckpoint) as refusal:
        open_head(save_head(tmp_path, HEAD, "speculators", config), TARGET)
    assert words in str(refusal.value)
    assert "\n" not in str(refusal.value)


def test_a_head_without_its_mask_state_is_refused(tmp_path: Path) -> None:
    state = {name: array for name, array in weights_of(HEAD).items() if name != MASK_STATE}
    with pytest.raises(UnreadableCheckpoint, match=r"tensor mask_hidden is missing \(a head of P-EAGLE\)"):
        open_head(save_head(tmp_path, HEAD, "speculators", {}, state), TARGET)


def test_all_levels_take_one_forward_and_no_row_stays() -> None:
    tree = RankTree((0, 0, 0, 1, 2, 3), (0, 0, 1, 0, 0, 0))
    head = replace(HEAD, shape=tree, reads=HiddenStates((-1, 0, 1), shift=1), mask_token=9)
    case = Case(LLAMA, (3, 1, 4, 1, 5), head, stops=Stops(6), dtype="float64")
    trace, true = open_backend("cpu-eager").run(case), Oracle()(case)
    assert trace.accounting is not None
    assert trace.accounting.draft_calls == 2 * len(trace.steps)
    for step, oracle_step in zip(trace.steps, true.steps, strict=True):
        assert step.drafted is not None
        assert oracle_step.drafted is not None
        assert step.drafted.tree == oracle_step.drafted.tree
        assert step.committed is not None
        assert step.committed.draft is not None
        assert step.committed.draft.keys.shape[2] == len(step.context)


def test_what_makes_no_sense_is_refused() -> None:
    with pytest.raises(Malformed, match="a tree of depth 5, and 3 mask tokens reach one level more"):
        replace(HEAD, shape=Expansion(2, 5, 9))
    with pytest.raises(Malformed, match="mask_slots"):
        replace(HEAD, mask_slots=65)
    assert HEAD.as_chain().height == 2
    assert replace(HEAD, mask_slots=1).with_fixed_tree(Oracle()(Case(LLAMA, (3, 1))).steps[0].drafted.tree) is not None  # type: ignore[union-attr]
