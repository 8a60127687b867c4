"""The eager-aligned mode, and attention calls that ran a backend's own attention, counted by mode."""

import json
from pathlib import Path
from typing import Any

import pytest
import torch
from transformers import AttentionInterface

from specverify.backends.adapt.models import transformers_model
from specverify.backends.flags import FORCE_EAGER, NO_FUSED, NO_FUSED_TREE
from specverify.bench.hugging_face import PLAIN, generate_turn
from specverify.properties.tally import native_calls
from specverify.reference.case import Case
from specverify.reference.sampling import Stops
from tests.checkpoints import readable
from tests.inprocess import exit_code_of
from tests.models import LLAMA


@pytest.fixture(scope="module")
def checkpoint(tmp_path_factory: pytest.TempPathFactory) -> Path:
    return readable("llama", tmp_path_factory.mktemp("aligned"))


@pytest.fixture
def fused_calls(monkeypatch: pytest.MonkeyPatch) -> list[str]:
    """A name for each call of torch's fused attention inside the test."""
    calls = list[str]()
    attention = torch.nn.functional.scaled_dot_product_attention

    def note_call(*arguments: Any, **named: Any) -> torch.Tensor:
        calls.append("sdpa")
        return attention(*arguments, **named)

    monkeypatch.setattr(torch.nn.functional, "scaled_dot_product_attention", note_call)
    return calls


def test_transformers_generates_by_eager_attention_and_goes_back(fused_calls: list[str]) -> None:
    case = Case(LLAMA, (3, 1, 4), stops=Stops(4), dtype="float32")
    before = transformers_model(case.model, case.dtype).config._attn_implementation
    plain = generate_turn(PLAIN, case, 0, 0)
    assert fused_calls
    fused_calls.clear()
    aligned = generate_turn(PLAIN, case, 0, 0, eager=True)
    assert not fused_calls
    assert aligned.tokens == plain.tokens
    assert transformers_model(case.model, case.dtype).config._attn_implementation == before
    assert before in AttentionInterface().valid_keys()


def counts(checkpoint: Path, folder: Path, *mode: str) -> tuple[dict[str, tuple[int, int]], str]:
    """Own calls and all calls of attention by way, of a bench on torch's fused attention, and the mode of its facts."""
    file = folder / "bench.json"
    arguments = ("--model", checkpoint, "--cases", 1, "--new-tokens", 6, "--draft", "ngram", "--json", file)
    assert exit_code_of("bench", "decode", *arguments, "--backend", "cpu-fused", *mode) == 0
    figures = json.loads(file.read_text())
    mode_word = figures["facts"]["mode"]
    return {
        row["way"]: (native_calls(mode_word, row["attention_calls"], row["fallbacks"]), row["attention_calls"])
        for row in figures["ways"]
        if row["attention_calls"]
    }, mode_word


@pytest.mark.parametrize(
    ("flag", "word"),
    [
        ("", "performance"),
        (NO_FUSED, "reference"),
        (FORCE_EAGER, "eager-aligned"),
        (NO_FUSED_TREE, "performance, trees eager"),
    ],
)
def test_own_calls_are_counted_by_mode(
    flag: str,
    word: str,
    checkpoint: Path,
    tmp_path: Path,
    fused_calls: list[str],
    monkeypatch: pytest.MonkeyPatch,
    capsys: pytest.CaptureFixture[str],
) -> None:
    if flag:
        monkeypatch.setenv(flag, "1")
    ways, mode = counts(checkpoint, tmp_path)
    assert mode == word
    target, drafted = ways["target-only"], ways["ngram"]
    page = " ".join(capsys.readouterr().out.split())
    assert f"own attention, in mode {word}: target-only {target[0]} of {target[1]}, ngram {drafted[0]}" in page
    if word == "performance":
        assert target[0] == target[1] > 0
        assert drafted[0] == drafted[1] > 0
    elif word == "performance, trees eager":
        assert target[0] == target[1], "the rows of the target alone are no trees"
        assert 0 < drafted[0] < drafted[1]
        assert "the target alone does not" in page
    else:
        assert target[0] == drafted[0] == 0 < target[1]
        # In `reference` the ways of transformers alone run fused attention; aligned, none does.
        assert bool(fused_calls) == (word == "reference")
