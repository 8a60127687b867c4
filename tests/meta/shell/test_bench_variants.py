"""Forms of a draft in `bench decode`: widths of weights, vocabularies; dialogues with prefixes and histories."""

import json
from collections import Counter
from pathlib import Path

import pytest
import torch
from safetensors.torch import load_file

from specverify.backends.adapt.models import words_tokenizer
from specverify.bench.dialogues import BUILT_IN, dialogues_of, shape_dialogues
from specverify.bench.vocabularies import reduce_head
from specverify.checkpoints.given_draft import given_draft
from specverify.checkpoints.opening import open_checkpoint
from specverify.reference.draft.eagle1 import Eagle1
from specverify.reference.draft.eagle3 import Eagle3
from specverify.reference.draft.hidden import HiddenStates
from specverify.reference.draft.layer_head import HeadLayer
from specverify.reference.tree import RankTree
from tests.headfiles import checkpoint as published_target
from tests.headfiles import save_head as saved_head
from tests.inprocess import exit_code_of
from tests.tiers import first

BARE = RankTree((0,), (0,))
LAYER = HeadLayer(2, 1, 4, 12)
NAMED = tuple(range(1, 24, 2))
EAGLE3 = Eagle3(BARE, HiddenStates((1, 3, 4), shift=1), LAYER, NAMED, seed=5)
EAGLE1 = Eagle1(BARE, HiddenStates(place="normed", shift=1), LAYER, seed=5)


@pytest.fixture(autouse=True)
def work(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> Path:
    monkeypatch.chdir(tmp_path)
    return tmp_path


@pytest.fixture
def target(tmp_path: Path) -> Path:
    folder = published_target(tmp_path / "target")
    words_tokenizer([str(token) for token in range(24)]).save_pretrained(folder)
    return folder


@pytest.fixture
def head(tmp_path: Path) -> Path:
    return saved_head(tmp_path / "head", EAGLE3, "safeailab")


def bench(target: Path, file: Path, *options: object) -> int:
    arguments = ("--model", target, "--cases", 2, "--new-tokens", 6, "--threads", 1, "--json", file)
    return exit_code_of("bench", "decode", *arguments, *options)


@pytest.mark.parametrize(
    ("widths", "sizes"), first([(("stored", "int8"), (3,)), (("stored", "int8", "fp8"), (3, 6))], 1)
)
def test_widths_of_weights_and_vocabularies_are_ways_of_their_own(
    widths: tuple[str, ...],
    sizes: tuple[int, ...],
    target: Path,
    head: Path,
    tmp_path: Path,
    capsys: pytest.CaptureFixture[str],
) -> None:
    file = tmp_path / "out.json"
    forms = ("--draft-weights", ",".join(widths), "--draft-vocabulary", ",".join(map(str, sizes)), "--lengths", 2)
    assert bench(target, file, "--draft", head, *forms) == 0
    out = capsys.readouterr().out
    result = json.loads(file.read_text())
    name = next(row["way"] for row in result["chains"]).split()[0]
    kinds = ["", *(f" {width}" for width in widths[1:])]
    suffixes = [f"{kind}{size}" for kind in kinds for size in ("", *(f" v{size}" for size in sizes))]
    assert [row["way"] for row in result["chains"]] == [f"{name} chain 2{suffix}" for suffix in suffixes]
    assert [row["weights"] for row in result["weights"]] == [width for width in widths for _ in range(1 + len(sizes))]
    assert [row["vocabulary"] for row in result["vocabularies"]] == [None, *sizes] * len(widths)
    for row in result["weights"]:
        assert 1 <= row["tokens_per_call"] <= 3
        assert row["drafting_ms"] > 0
    # A head with fewer tokens has as many rows fewer, and says so in its weights.
    parameters = {row["vocabulary"]: row["draft_parameters"] for row in result["vocabularies"]}
    for size in sizes:
        assert parameters[None] - parameters[size] == (len(NAMED) - size) * 8
    assert all(text["other"] == [] for text in result["texts"])
    assert "by weights of the draft" in out
    assert "by tokens that the draft can name" in out


def test_a_smaller_head_scores_its_own_rows(target: Path, head: Path) -> None:
    kept_tokens = (3, 9, 21)
    folder = reduce_head(head, NAMED, kept_tokens, 24)
    assert reduce_head(head, NAMED, kept_tokens, 24) == folder  # written once
    full_weights, few = load_file(head / "model.safetensors"), load_file(folder / "model.safetensors")
    rows = [NAMED.index(token) for token in kept_tokens]
    assert torch.equal(few["lm_head.weight"], full_weights["lm_head.weight"][rows])
    assert (few["d2t"] + torch.arange(3)).tolist() == list(kept_tokens) == few["t2d"].nonzero().flatten().tolist()
    draft = given_draft(str(folder), open_checkpoint(str(target)), None)
    assert isinstance(draft, Eagle3)
    assert draft.vocabulary == kept_tokens


@pytest.mark.slow
def test_a_second_model_names_the_tokens_that_texts_use_most(target: Path, tmp_path: Path) -> None:
    texts, file = tmp_path / "texts.txt", tmp_path / "out.json"
    texts.write_text("7 7 7 9 9 2\n")
    twin = published_target(tmp_path / "twin")
    words_tokenizer([str(token) for token in range(24)]).save_pretrained(twin)
    arguments = ("--draft", f"model:{twin}", "--draft-vocabulary", "2", "--vocabulary-text", texts, "--trace", "run")
    assert bench(target, file, *arguments) == 0
    assert [row["vocabulary"] for row in json.loads(file.read_text())["vocabularies"]] == [None, 2]
    digests = {draft["digest"] for draft in json.loads(Path("run/manifest.json").read_text())["drafts"]}
    assert len(digests) == 2


WRONG = {
    ("--draft", "ngram", "--draft-weights", "int8"): "ngram has no weights",
    ("--draft", "head", "--draft-vocabulary", "13"): "names 12 tokens, and no more",
    ("--draft", "eagle1", "--draft-vocabulary", "3"): "eagle1 has no vocabulary of its own",
    ("--draft", "head", "--draft-weights", "int3"): "'int3' is none of stored, int4, int4-groups,",
    ("--prefix-length", "4"): "need --dialogues",
    ("--dialogues", "builtin:three-turns"): "known: builtin:two-turns",
}


@pytest.mark.parametrize("options", WRONG, ids=" ".join)
def test_wrong_options_are_one_line(
    options: tuple[str, ...], target: Path, head: Path, tmp_path: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    saved_head(tmp_path / "eagle1", EAGLE1, "safeailab")
    assert bench(target, tmp_path / "out.json", *options) == 2
    assert WRONG[options] in " ".join(capsys.readouterr().err.split())


def test_prefixes_and_histories_are_brought_to_their_lengths() -> None:
    dialogues = [[(1, 2, 3), (4, 5)], [(6,), (7, 8), (9,)]]
    shaped, lengths = shape_dialogues(dialogues, (2,), (2, 5))
    assert lengths == [(2, 2), (2, 2), (2, 5), (2, 5)]
    # The prefix is the same everywhere; a history ends as the dialogue did, and its last message stays.
    assert shaped == [
        [(1, 2, 2, 3), (4, 5)],
        [(1, 2, 7, 8), (9,)],
        [(1, 2, 1, 2, 1, 2, 3), (4, 5)],
        [(1, 2, 1, 2, 6, 7, 8), (9,)],
    ]
    assert shape_dialogues(dialogues, (), ()) == (dialogues, [(0, 0), (0, 0)])


@pytest.mark.slow
def test_dialogues_of_our_own_run_with_every_default(target: Path, tmp_path: Path) -> None:
    dialogues = dialogues_of(BUILT_IN, str(target), 99)
    assert len(dialogues) == 12
    assert {len(turns) for turns in dialogues} == {2}
    file = tmp_path / "out.json"
    arguments = ("--dialogues", BUILT_IN, "--cases", 2, "--prefix-length", "3", "--history-length", "4,20")
    assert bench(target, file, *arguments) == 0
    result = json.loads(file.read_text())
    rows = {(row["way"], row["history"], row["place"]): row for row in result["dialogues"]}
    assert Counter(history for _, history, _ in rows) == {4: len(rows) // 2, 20: len(rows) // 2}
    assert {row["prefix"] for row in result["dialogues"]} == {3}
    first, second = (rows["target-only", 20, place] for place in (1, 2))
    assert first["context"] == 3 + 20
    assert second["kept"] >= first["context"]
    assert {"draft", "lower", "mask", "verify"} <= set(second["stage_ms"])
    assert all(text["other"] == [] for text in result["texts"])


@pytest.mark.slow
def test_dialogues_are_sampled_too(target: Path, tmp_path: Path) -> None:
    file = tmp_path / "out.json"
    arguments = ("--dialogues", BUILT_IN, "--temperature", 0.8, "--top-p", 0.9)
    assert bench(target, file, *arguments) == 0
    result = json.loads(file.read_text())
    assert result["texts"] == []
    assert {row["place"] for row in result["dialogues"]} == {1, 2}
