"""Each generation setting at each kind of value: transformers' law of every token, or a refusal by name."""

import json
import warnings
from pathlib import Path
from typing import Any

import numpy as np
import pytest
import torch
from transformers import AutoModelForCausalLM, GenerationConfig

from specverify.reference.files.fields import UnreadableCheckpoint
from specverify.reference.files.generation_settings import INERT, NEUTRAL_VALUES, READ, generation_settings
from specverify.reference.malformed import Malformed
from specverify.reference.oracle.checkpoint import identify
from specverify.reference.oracle.model import PathByPath
from specverify.reference.oracle.parameters import load
from specverify.reference.oracle.processing import law, scores, softmax
from specverify.reference.sampling import Sampling, Stops
from specverify.reference.trace import Array
from tests.headfiles import checkpoint
from tests.tiers import each

CLOSE = 1e-5
"""Largest difference of a probability; transformers processes logits in float32."""

PROMPT = (3, 1, 4, 1, 5, 3)
ROOM = 6
END = 23

BASES: dict[str, dict[str, Any]] = {
    "greedy": {},
    "sampled": {"do_sample": True},
    "sampled, with all": {
        "do_sample": True, "temperature": 0.7, "top_k": 9, "top_p": 0.9, "repetition_penalty": 1.2,
        "suppress_tokens": [2, 7], "min_new_tokens": 3,
    },
}  # fmt: skip

VALUES: tuple[Any, ...] = (
    None, True, False, 0, 1, 3, 40, 0.0, 0.4, 1.0, 1.7, -1, -0.5, "x", "3", [], [3], [3, END], [[3]], [[3], [1, 5]],
    [[]], [1.5], {}, {"3": 1.0}, 1e30,
)  # fmt: skip
"""Values of every setting, sensible or not."""

OF_TRANSFORMERS = set(vars(GenerationConfig()))

EVERY_NAME = sorted((READ | INERT | set(NEUTRAL_VALUES) | {"unknown"}) - {"max_time"})
"""Every setting but that which ends a run by the clock."""


@pytest.fixture(scope="module")
def target(tmp_path_factory: pytest.TempPathFactory) -> Path:
    return checkpoint(tmp_path_factory.mktemp("settings") / "target", eos_token_id=[END])


def scores_of(place: Path) -> tuple[tuple[int, ...], Array]:
    """The tokens that transformers generates by the settings of `place`, and its law of each [tokens, vocabulary]."""
    with warnings.catch_warnings():
        warnings.simplefilter("ignore")
        network = AutoModelForCausalLM.from_pretrained(place, dtype=torch.float64)
        torch.manual_seed(0)
        prompt = torch.tensor([PROMPT])
        output = network.generate(
            prompt, attention_mask=torch.ones_like(prompt), max_new_tokens=ROOM, pad_token_id=0, eos_token_id=[END],
            return_dict_in_generate=True, output_scores=True,
        )  # fmt: skip
    tokens = tuple(output.sequences[0, len(PROMPT) :].tolist())
    return tokens, torch.cat(output.scores).double().softmax(-1).numpy()


def greedy_law(*row: Any) -> Array:
    """The softmax of the scores whose arg-max greedy decoding takes."""
    return softmax(scores(*row))


def distance(place: Path) -> float | str:
    """The largest difference of a probability between the oracle and transformers; or who refuses the settings."""
    try:
        settings = generation_settings(place)
        sampling = Sampling(**vars(settings), tape=(0.5,) * 64)
    except (UnreadableCheckpoint, Malformed):
        return "refused"
    try:
        tokens, expected = scores_of(place)
    except Exception:  # validators and broken settings fail in many ways
        return "refused by transformers"
    parameters = load(identify(place), "float64")
    states = PathByPath(parameters).states((*PROMPT, *tokens))[-1]
    logits, stops = parameters.logits(states), Stops(ROOM, (END,))
    far = 0.0
    for number, theirs in enumerate(expected):
        law_of_row = greedy_law if sampling.greedy else law
        row = law_of_row(logits[len(PROMPT) - 1 + number], sampling, stops, PROMPT, tokens[:number])
        far = max(far, float(np.abs(row - theirs).max()))
    return far


@pytest.mark.parametrize(("base", "name"), each([(base, name) for base in BASES for name in EVERY_NAME], 47))
def test_a_setting_at_any_value_is_transformers_law_or_refused(base: str, name: str, target: Path) -> None:
    wrong = {}
    for value in VALUES:
        (target / "generation_config.json").write_text(json.dumps({**BASES[base], name: value}))
        answer = distance(target)
        # Transformers passes over some settings of vLLM, and may refuse what changes no law.
        is_unjudged = (isinstance(answer, float) and name not in OF_TRANSFORMERS) or (
            answer == "refused by transformers" and name not in READ
        )
        is_right = answer == "refused" or (isinstance(answer, float) and answer < CLOSE)
        if not is_right and not is_unjudged:
            wrong[repr(value)] = answer
    assert not wrong
