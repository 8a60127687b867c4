"""Every setting of a generation_config.json is read, changes no token, or is refused by name."""

import json
from pathlib import Path
from typing import Any

import pytest
import torch
from transformers import AutoModelForCausalLM, GenerationConfig

from specverify.backends.adapt import checkpoint_of, transformers_model
from specverify.reference.case import Case
from specverify.reference.files.fields import UnreadableCheckpoint
from specverify.reference.files.generation_settings import INERT, NEUTRAL_VALUES, READ, generation_settings
from specverify.reference.oracle.checkpoint import identify
from specverify.reference.oracle.decoder import Oracle
from specverify.reference.sampling import Sampling, Stops
from tests.headfiles import checkpoint

PROMPT = (3, 1, 4, 1, 5)
ROOM = 8


def write_settings(folder: Path, settings: dict[str, Any]) -> Path:
    place = folder / "target"
    if not place.exists():
        checkpoint(place, eos_token_id=[23])
    (place / "generation_config.json").write_text(json.dumps(settings))
    return place


def test_every_setting_of_transformers_has_its_place() -> None:
    assert set(vars(GenerationConfig())) <= READ | INERT | set(NEUTRAL_VALUES)
    assert not READ & INERT
    assert not (READ | INERT) & set(NEUTRAL_VALUES)


OBEYED: dict[str, dict[str, Any]] = {
    "repetition penalty": {"repetition_penalty": 1.7},
    "suppressed tokens": {"suppress_tokens": [0, 2, 7, 11, 17]},
    "bad words": {"bad_words_ids": [[3], [1, 5], [23], [20, 13]]},
    "least new tokens": {"min_new_tokens": 5},
    "all of them": {"repetition_penalty": 1.2, "suppress_tokens": [9, 14], "min_new_tokens": 2},
    "none": {"temperature": None, "top_k": None, "do_sample": None, "num_beams": 1, "use_cache": True},
}


@pytest.mark.parametrize("name", OBEYED)
def test_a_setting_that_is_read_gives_the_tokens_of_transformers(name: str, tmp_path: Path) -> None:
    place = write_settings(tmp_path, OBEYED[name])
    settings = generation_settings(place)
    case = Case(identify(place), PROMPT, sampling=Sampling(**vars(settings)), stops=Stops(ROOM, (23,)), dtype="float64")
    network = AutoModelForCausalLM.from_pretrained(place, dtype=torch.float64)
    prompt = torch.tensor([PROMPT])
    text = network.generate(
        prompt, attention_mask=torch.ones_like(prompt), max_new_tokens=ROOM, do_sample=False, pad_token_id=0,
        eos_token_id=[23],
    )  # fmt: skip
    assert Oracle()(case).output == tuple(text[0, len(PROMPT) :].tolist())


REFUSED: dict[str, Any] = {
    "begin_suppress_tokens": [1], "sequence_bias": [[[3], -9.0]], "min_length": 7, "forced_bos_token_id": 3,
    "forced_eos_token_id": 4, "exponential_decay_length_penalty": [3, 1.5], "no_repeat_ngram_size": 2,
    "encoder_no_repeat_ngram_size": 2, "typical_p": 0.9, "guidance_scale": 2.0, "watermarking_config": {"bias": 2.0},
    "penalty_alpha": 0.6, "dola_layers": "low", "num_beams": 4, "token_healing": True, "stop_strings": ["x"],
    "num_return_sequences": True, "sampling_penalty": 1.0,
}  # fmt: skip


@pytest.mark.parametrize("name", REFUSED)
def test_a_setting_that_no_case_can_hold_is_refused_by_name(name: str, tmp_path: Path) -> None:
    with pytest.raises(UnreadableCheckpoint, match=rf"generation_config\.json: {name} is .*remove it"):
        generation_settings(write_settings(tmp_path, {name: REFUSED[name]}))


@pytest.mark.parametrize("name", NEUTRAL_VALUES)
def test_the_neutral_value_of_a_setting_is_taken(name: str, tmp_path: Path) -> None:
    plain = generation_settings(write_settings(tmp_path, {}))
    for value in (NEUTRAL_VALUES[name], None):
        assert generation_settings(write_settings(tmp_path, {name: value})) == plain


@pytest.mark.parametrize("words", [{"suppress_tokens": [1.5]}, {"bad_words_ids": [3]}, {"bad_words_ids": [[]]}])
def test_words_that_are_none_are_refused(words: dict[str, Any], tmp_path: Path) -> None:
    with pytest.raises(UnreadableCheckpoint, match=f"{next(iter(words))} is "):
        generation_settings(write_settings(tmp_path, words))


def test_what_an_engine_is_handed_follows_the_case_and_not_the_file(tmp_path: Path) -> None:
    place = write_settings(tmp_path, {"repetition_penalty": 5.0, "suppress_tokens": [2], "eos_token_id": [23]})
    model = identify(place)
    expected = Oracle()(Case(model, PROMPT, stops=Stops(ROOM), dtype="float32")).output
    prompt = torch.tensor([PROMPT])
    options: dict[str, Any] = {"attention_mask": torch.ones_like(prompt), "pad_token_id": 0, "eos_token_id": 99}
    folder = checkpoint_of(model, "float32")
    assert folder != place
    assert json.loads((folder / "generation_config.json").read_text()) == {"eos_token_id": [23]}
    for network in (transformers_model(model, "float32"), AutoModelForCausalLM.from_pretrained(folder)):
        text = network.generate(prompt, max_new_tokens=ROOM, do_sample=False, **options)
        assert tuple(text[0, len(PROMPT) :].tolist()) == expected
    own_text = AutoModelForCausalLM.from_pretrained(place).generate(
        prompt, max_new_tokens=ROOM, do_sample=False, **options
    )
    assert tuple(own_text[0, len(PROMPT) :].tolist()) != expected, "the file's settings change this text"


def test_a_directory_without_such_settings_is_handed_as_it_is(tmp_path: Path) -> None:
    place = write_settings(tmp_path, {"eos_token_id": 23, "transformers_version": "4.51.0"})
    assert checkpoint_of(identify(place), "float32") == place
