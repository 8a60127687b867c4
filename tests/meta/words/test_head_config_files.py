"""A head's config.json means to the oracle what it means to transformers' Llama modules, whatever one field says."""

import copy
import json
import warnings
from pathlib import Path
from typing import Any

import numpy as np
import pytest
import torch

from specverify.reference.draft.eagle1 import Eagle1
from specverify.reference.draft.eagle3 import Eagle3
from specverify.reference.draft.head import Head
from specverify.reference.draft.hidden import HiddenStates
from specverify.reference.draft.layer_head import HeadLayer
from specverify.reference.draft_files import open_head
from specverify.reference.draft_files.known_fields import NEUTRAL, READ
from specverify.reference.files.fields import UnreadableCheckpoint
from specverify.reference.oracle.draft.eagle1 import Eagle1Formulas
from specverify.reference.oracle.draft.eagle3 import Eagle3Formulas
from specverify.reference.oracle.draft.question import Question
from specverify.reference.oracle.parameters import load
from specverify.reference.oracle.sampled_step import SampledStep
from specverify.reference.tree import RankTree
from tests.config_files import ADDED, Content, changes
from tests.head_rows import scores_of
from tests.headfiles import TARGET, save_head
from tests.tiers import first

CLOSE = 1e-9
BARE = RankTree((0,), (0,))
LAYER = HeadLayer(2, 1, 4, 12)
ROWS = 40

HEADS: dict[str, tuple[str, Head, str]] = {
    "EAGLE-1 of SafeAILab": ("eagle1", Eagle1(BARE, HiddenStates(place="normed", shift=1), LAYER), "safeailab"),
    "EAGLE-1 of speculators": ("eagle1", Eagle1(BARE, HiddenStates(place="normed", shift=1), LAYER), "speculators"),
    "EAGLE-3 of vLLM": ("eagle3", Eagle3(BARE, HiddenStates((1, 3, 4), shift=1), LAYER, (1, 2, 5, 11, 16)), "vllm"),
    "EAGLE-3 of SpecForge": (
        "eagle3",
        Eagle3(BARE, HiddenStates((1, 3, 4), shift=1), LAYER, (1, 2, 5, 11, 16)),
        "specforge",
    ),
}

FORMS: dict[str, Content] = {
    "transformers 4": {"rope_theta": 500.0},
    "transformers 5": {"rope_theta": None, "rope_parameters": {"rope_type": "default", "rope_theta": 500.0}},
    "with yarn": {
        "rope_theta": 500.0,
        "rope_scaling": {"rope_type": "yarn", "factor": 4.0, "original_max_position_embeddings": 16},
    },
    "with llama3": {
        "rope_theta": None,
        "rope_parameters": {
            "rope_type": "llama3", "rope_theta": 500.0, "factor": 8.0, "low_freq_factor": 1.0,
            "high_freq_factor": 4.0, "original_max_position_embeddings": 16,
        },
    },
}  # fmt: skip
"""Fields by which a head states its rotary embedding."""

OF_HEADS: dict[str, tuple[Any, ...]] = {
    **{name: (7, True, "x") for name in (READ | NEUTRAL.keys())},
    **ADDED,
    "max_position_embeddings": (16,),
    "bias": (True, False),
    "norm_before_residual": (True, False),
    "norm_output": (False,),
    "target_hidden_size": (8, 7),
    "no_rope_layers": ([1], [0]),
    "unknown": (1,),
}
"""Fields that are added to the config of a head without them."""


def inner(content: Content) -> tuple[Content, str | None]:
    """The object that describes the decoder layer, and the field that holds it, if one does."""
    name = "transformer_layer_config"
    return (content[name], name) if name in content else (content, None)


def heads_changed(content: Content) -> list[tuple[str, Content]]:
    """`content` with one field left out, null, changed or added, each with words for it."""
    layer, place = inner(content)
    layer = {"max_position_embeddings": 64, **layer}
    changed = [
        *changes(layer),
        *(
            (f"{name} {value!r} added", {**layer, name: value})
            for name, values in OF_HEADS.items()
            for value in values
            if name not in layer
        ),
    ]
    if place is None:
        return changed
    return [(words, {**content, place: fields}) for words, fields in changed] + [*changes({**content, place: layer})]


def distance(kind: str, content: Content, folder: Path) -> float | str:
    """How far the oracle's scores lie from those of transformers' modules; or `refused`, or who else refuses."""
    (folder / "config.json").write_text(json.dumps(content))
    try:
        words: Any = open_head(folder, TARGET).words
    except UnreadableCheckpoint:
        return "refused"
    draw = np.random.default_rng(5)
    target, parts = load(TARGET, "float64").state, max(1, len(words.reads.layers))
    tokens = tuple(int(token) for token in draw.integers(0, TARGET.vocab_size, ROWS))
    states = draw.normal(size=(ROWS, parts * 8))
    question = Question(tokens, 0, None, SampledStep.__new__(SampledStep), states, TARGET, "float64")
    formulas = Eagle1Formulas(words, question) if isinstance(words, Eagle1) else Eagle3Formulas(words, question)
    outputs = formulas.extend(formulas.empty_past(), tokens, formulas.target_states(states)).outputs
    scores = np.stack([formulas.score(output) for output in outputs])
    tensors = {
        "embedded": torch.tensor(target["model.embed_tokens.weight"][list(tokens)]),
        "states": torch.tensor(states),
        "head": torch.tensor(target["lm_head.weight"]),
    }
    try:
        with warnings.catch_warnings():
            warnings.simplefilter("ignore")
            expected = scores_of(kind, content, folder, tensors)
    except Exception as error:  # validators and broken models fail in many ways
        return f"transformers refuses: {' '.join(str(error).split())[:120]}"
    return float(np.abs(scores - expected).max() / np.abs(expected).max())


@pytest.mark.parametrize(("name", "form"), first([(name, form) for name in HEADS for form in FORMS], 1))
def test_one_field_at_a_time_gives_equal_numbers_or_a_refusal(name: str, form: str, tmp_path: Path) -> None:
    kind, head, layout = HEADS[name]
    save_head(tmp_path, head, layout)
    content = json.loads((tmp_path / "config.json").read_text())
    layer, place = inner(content)
    fields: Content = {**layer, **FORMS[form]}
    stated: Content = {field: value for field, value in fields.items() if value is not None}
    base: Content = stated if place is None else {**content, place: stated}
    answers: dict[str, Any] = {"as it is": distance(kind, base, tmp_path)}
    assert isinstance(answers["as it is"], float)
    answers |= {words: distance(kind, copy.deepcopy(changed), tmp_path) for words, changed in heads_changed(base)}
    numbers = [answer for answer in answers.values() if isinstance(answer, float)]
    wrong = [
        f"{words}: {answer}"
        for words, answer in answers.items()
        if answer != "refused" and not (isinstance(answer, float) and answer < CLOSE)
    ]
    assert not wrong
    assert len(numbers) > 20
