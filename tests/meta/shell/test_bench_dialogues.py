"""Dialogues of `bench decode`: each turn goes on with the caches of the one before; texts are the target's own."""

import json
import shutil
from dataclasses import replace
from itertools import pairwise, product
from pathlib import Path

import numpy as np
import pytest
from torch import Tensor

from specverify.backends.adapt.models import words_tokenizer
from specverify.backends.compositions import open_cpu
from specverify.backends.engine.accept import greedy_walk
from specverify.backends.engine.backend import EngineBackend
from specverify.backends.engine.composition import SEAMS
from specverify.backends.engine.dialogue import DialogueServer
from specverify.backends.engine.lower_tree import TreeTensors
from specverify.backends.engine.two_modes import in_mode
from specverify.bench.agreement import logit_rows
from specverify.bench.dialogues import TransformersDialogue
from specverify.bench.hugging_face import ASSISTED, LOOKUP, PLAIN, continue_turn, generate_turn
from specverify.properties.strategies.draft.head import LAYERS
from specverify.properties.strategies.models import GALLERY
from specverify.records.read import check
from specverify.reference.architecture import Seeded
from specverify.reference.case import Case
from specverify.reference.draft import Draft, LanguageModel, Ngram, most_rows
from specverify.reference.draft.eagle1 import Eagle1
from specverify.reference.draft.eagle3 import Eagle3
from specverify.reference.draft.head import Head
from specverify.reference.draft.hidden import HiddenStates
from specverify.reference.draft.layer_head import HeadLayer
from specverify.reference.draft.medusa import Medusa
from specverify.reference.draft.mtp import Mtp
from specverify.reference.layout import KINDS, KvLayout
from specverify.reference.sampling import Stops
from specverify.reference.tree import RankTree
from tests.checkpoints import readable
from tests.headfiles import checkpoint as published_target
from tests.headfiles import save_head as saved_head
from tests.headfiles import weights_of
from tests.inprocess import exit_code_of
from tests.tiers import each

SHAPE = RankTree((0, 0, 0, 1), (0, 1, 0, 0))
UTTERANCES = ((1, 2, 3, 1, 2), (4, 0, 1, 2), (3,), (0, 1))
HYBRIDS = [place for place, model in enumerate(GALLERY) if model.family in ("qwen3_next", "lfm2")]


def serve_dialogue(case: Case, backend: EngineBackend) -> tuple[DialogueServer, list[tuple[Case, int]]]:
    """The server of a dialogue that has played UTTERANCES, and each turn's case with the columns that it found.

    The text and the logits of every turn are those of the same prompt on empty caches.
    """
    roomy = replace(case, stops=Stops(max_new_tokens=60))
    server = DialogueServer(roomy, backend.models, in_mode(backend.seams, backend.mode))
    history: tuple[int, ...] = ()
    turns = []
    for utterance in UTTERANCES:
        turn = replace(case, prompt=history + utterance)
        warm_trace, anew = server.turn(turn), backend.run(turn)
        assert warm_trace.output == anew.output
        for warm_row, fresh_row in zip(logit_rows(warm_trace), logit_rows(anew), strict=True):
            np.testing.assert_allclose(warm_row, fresh_row, rtol=0, atol=1e-9)
        assert warm_trace.accounting is not None
        assert anew.accounting is not None
        # Of the target's forwards, the prefill alone may differ: behind kept columns, one of one token is a decode.
        assert replace(warm_trace.accounting, target_calls=None) == replace(anew.accounting, target_calls=None)
        assert warm_trace.accounting.target_calls is not None
        assert anew.accounting.target_calls is not None
        assert warm_trace.accounting.target_calls.verify == anew.accounting.target_calls.verify
        # The texts of a wrong draft are right too: its scores tell whether it went on with the right states.
        for step, twin in zip(warm_trace.steps, anew.steps, strict=True):
            assert step.drafted is not None
            assert twin.drafted is not None
            assert step.drafted.tree == twin.drafted.tree
            if twin.drafted.logits is not None:
                assert step.drafted.logits is not None
                np.testing.assert_allclose(step.drafted.logits, twin.drafted.logits, rtol=0, atol=1e-9)
        turns.append((turn, server.num_shared))
        history = turn.prompt + warm_trace.output
    return server, turns


def layout(kind: str) -> KvLayout:
    return KvLayout(kind=kind, page_size=4 if KINDS[kind].pages else 0)


def case_with(draft: Draft, kv_layout: KvLayout, model: int = 0) -> Case:
    target = Seeded(GALLERY[model], 3)
    return Case(target, UTTERANCES[0], draft, kv_layout, stops=Stops(max_new_tokens=7), dtype="float64")


@pytest.mark.parametrize("kind", sorted(KINDS))
def test_every_turn_on_kept_caches_is_the_turn_on_empty_ones(kind: str) -> None:
    _, turns = serve_dialogue(case_with(Ngram(SHAPE, 2), layout(kind)), open_cpu())
    for (before, _), (turn, num_kept) in pairwise(turns):
        assert len(before.prompt) <= num_kept < len(turn.prompt)
    assert turns[0][1] == 0


@pytest.mark.parametrize("model", HYBRIDS[:2])
def test_recurrent_states_go_on_with_the_caches(model: int) -> None:
    _, turns = serve_dialogue(case_with(Ngram(SHAPE, 2), layout("branch"), model), open_cpu())
    assert turns[-1][1] > 0


@pytest.mark.parametrize("kind", ["branch", "paged", "prefix"])
def test_the_cache_of_a_draft_goes_on_too(kind: str) -> None:
    draft = LanguageModel(Seeded(GALLERY[0], 8), SHAPE)
    _, turns = serve_dialogue(case_with(draft, layout(kind)), open_cpu())
    assert turns[-1][1] > len(turns[-2][0].prompt)


BARE, SMALL = RankTree((0,), (0,)), HeadLayer(2, 1, 4, 12)
LAST = HiddenStates(place="normed", shift=1)
HEADS: dict[str, Draft] = {
    "eagle1": Eagle1(SHAPE, LAST, LAYERS[0], seed=1),
    "eagle3": Eagle3(SHAPE, HiddenStates((-1, 0), shift=1), LAYERS[1], (2, 3, 4)),
    "medusa": Medusa(SHAPE, HiddenStates(place="normed"), 2),
    "mtp": Mtp(SHAPE, LAST, LAYERS[0], 2),
}
"""A draft of each kind that reads hidden states."""


@pytest.mark.parametrize(("name", "kind"), each(product(HEADS, ["branch", "paged", "static"]), 2))
def test_a_head_goes_on_with_the_hidden_states_of_the_turns_before(name: str, kind: str) -> None:
    server, turns = serve_dialogue(case_with(HEADS[name], layout(kind)), open_cpu())
    assert turns[-1][1] > len(turns[-2][0].prompt)
    (first, *_) = server.trace.steps
    assert first.drafted is not None
    assert first.drafted.given is not None
    # The head ran the rows of the last turn alone, those of the other turns were in its cache.
    assert first.drafted.given.first >= turns[-1][1] - 1 - most_rows(HEADS[name])


def test_a_head_whose_history_is_another_text_begins_with_empty_caches() -> None:
    backend, case = open_cpu(), case_with(HEADS["mtp"], layout("paged"))
    server, turns = serve_dialogue(case, backend)
    other_case = replace(case, prompt=(2, *turns[-1][0].prompt[1:]))
    assert server.turn(other_case).output == backend.run(other_case).output
    assert server.num_shared == 0


def test_a_turn_whose_history_is_another_text_begins_with_empty_caches() -> None:
    backend, case = open_cpu(), case_with(Ngram(SHAPE, 2), layout("paged"))
    server, turns = serve_dialogue(case, backend)
    other_case = replace(case, prompt=(2, *turns[-1][0].prompt[1:]))
    assert server.turn(other_case).output == backend.run(other_case).output
    assert server.num_shared == 0


@pytest.fixture(scope="module")
def checkpoint(tmp_path_factory: pytest.TempPathFactory) -> Path:
    return readable("llama", tmp_path_factory.mktemp("dialogues"))


def bench(*options: object) -> int:
    return exit_code_of("bench", "decode", *options)


def test_turns_are_told_with_their_history_and_what_was_kept(
    checkpoint: Path, tmp_path: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    turns_file, file = tmp_path / "said.jsonl", tmp_path / "out.json"
    turns_file.write_text('{"turns": ["1 2 3 1 2", "4 5", "6"]}\n{"turns": ["7 8 7"]}\n')
    drafts = ("--draft", f"model:{readable('mistral', tmp_path)}", "--draft-window", 4)
    arguments = ("--model", checkpoint, "--dialogues", turns_file, "--new-tokens", 6, "--repeat", 2, "--json", file)
    assert bench(*arguments, *drafts) == 0
    out = capsys.readouterr().out
    assert max(map(len, out.splitlines())) <= 80
    assert "by turn: its prompt with the history" in out
    result = json.loads(file.read_text())
    names = [way["way"] for way in result["ways"]]
    assert names[:2] == ["target-only", "target-anew"]
    assert names[3].endswith(" w4")
    assert all((text["equal"] + text["tied"], text["other"]) == (4, []) for text in result["texts"])
    rows = {(turn["way"], turn["place"]): turn for turn in result["dialogues"]}
    assert len(rows) == len(names) * 3
    anew = ("target-anew", LOOKUP, ASSISTED)
    assert {PLAIN, *anew} <= {*names}
    assert "every turn with an empty cache: target-anew, transformers-lookup" in " ".join(out.split())
    for way in names:
        # A turn's history is the turn before with its answer, of which the last token has no column yet.
        assert [rows[way, place]["context"] for place in (2, 3)] == [5 + 6 + 2, 5 + 6 + 2 + 6 + 1]
        kept_counts = [rows[way, place]["kept"] for place in (1, 2, 3)]
        assert kept_counts == ([0, 0, 0] if way in anew else [0, 5 + 6 - 1, 5 + 6 + 2 + 6 - 1])


@pytest.mark.parametrize(
    ("content", "why"),
    [
        ("", "holds no dialogue"),
        ("[1]", ":1: no object with `turns`, a list of texts"),
        ('{"turns": []}', ":1: no object with `turns`, a list of texts"),
        ('{"turns": ["1"]}\n{"turns": ["1", 2]}', ":2: turn 2 is no text"),
        ("{", ":1: not JSON"),
        ('{"turns": ["1", "1 ' + "2 " * 600 + '"]}', "prompt 1"),
    ],
)
def test_a_file_without_dialogues_is_one_line(
    content: str, why: str, checkpoint: Path, tmp_path: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    turns_file = tmp_path / "said.jsonl"
    turns_file.write_text(content)
    assert bench("--model", checkpoint, "--dialogues", turns_file) == 2
    (line,) = capsys.readouterr().err.strip().splitlines()[-1:]
    assert why in line


def test_options_that_dialogues_exclude_are_one_line(
    checkpoint: Path, tmp_path: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    arguments = ("--model", checkpoint, "--dialogues", tmp_path / "none.jsonl")
    assert bench(*arguments, "--prompt-length", 4) == 2
    assert "in place of --prompts" in capsys.readouterr().err
    assert bench(*arguments) == 2
    assert "none.jsonl: no such file" in capsys.readouterr().err.lower()


@pytest.fixture
def dialogues_file(tmp_path: Path) -> Path:
    file = tmp_path / "said.jsonl"
    file.write_text('{"turns": ["1 2 3 1 2", "4 5", "6"]}\n{"turns": ["7 8 7", "1"]}\n')
    return file


@pytest.mark.slow
def test_a_record_has_a_line_for_each_turn_of_each_dialogue(
    checkpoint: Path, dialogues_file: Path, tmp_path: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    folder, other_folder, page = tmp_path / "traced", tmp_path / "other", tmp_path / "page.html"
    arguments = ("--model", checkpoint, "--dialogues", dialogues_file, "--new-tokens", 6, "--repeat", 2)
    assert bench(*arguments, "--trace", folder) == 0
    written = [json.loads(line) for line in (folder / "turns.jsonl").read_text().splitlines()]
    ways = {record["way"] for record in written}
    assert {"target-only", "target-anew", "ngram"} <= ways
    keys = [(record["prompt"], record["place"], record["repeat"], record["way"]) for record in written]
    places = [(0, 1), (0, 2), (0, 3), (1, 1), (1, 2)]
    assert sorted(keys) == sorted((*place, repeat, way) for place in places for repeat in (0, 1) for way in ways)
    capsys.readouterr()
    assert exit_code_of("trace", "show", folder, "--json", "-", "--html", page) == 0
    report = json.loads(capsys.readouterr().out)
    assert len(report["turns"]) == len(written)
    rows = {(turn["way"], turn["place"]): turn for turn in report["dialogues"]}
    assert rows["ngram", 3]["kept"] == 5 + 6 + 2 + 6 - 1
    assert "place" in page.read_text()
    # The first dialogue is taken from the record, the second runs again.
    shutil.copytree(folder, other_folder)
    prompt_lines = [
        line for line in (other_folder / "turns.jsonl").read_text().splitlines() if json.loads(line)["prompt"] == 0
    ]
    (other_folder / "turns.jsonl").write_text("\n".join(prompt_lines) + "\n")
    (other_folder / "prompts.jsonl").write_text((other_folder / "prompts.jsonl").read_text().splitlines()[0] + "\n")
    assert bench(*arguments, "--trace", other_folder) == 0
    assert "1 dialogue taken from the record of an earlier run" in capsys.readouterr().out
    assert exit_code_of("trace", "compare", folder, other_folder) == 0
    changed = [{**turn, "tokens": [9]} if (turn["prompt"], turn["place"]) == (1, 2) else turn for turn in written]
    (other_folder / "turns.jsonl").write_text("".join(json.dumps(turn) + "\n" for turn in changed))
    capsys.readouterr()
    assert exit_code_of("trace", "compare", folder, other_folder) == 1
    assert "dialogue 1, turn 2, target-only: tokens differ" in capsys.readouterr().out


def test_other_dialogues_are_another_run(
    checkpoint: Path, dialogues_file: Path, tmp_path: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    arguments = (
        "--model",
        checkpoint,
        "--dialogues",
        dialogues_file,
        "--new-tokens",
        4,
        "--trace",
        tmp_path / "traced",
    )
    assert bench(*arguments) == 0
    dialogues_file.write_text('{"turns": ["1 2 3 1 2", "4 5", "7"]}\n{"turns": ["7 8 7", "1"]}\n')
    assert bench(*arguments) == 2
    assert "holds the record of another run" in capsys.readouterr().err


def test_a_text_of_a_turn_that_is_not_the_targets_own_is_dumped(
    checkpoint: Path,
    dialogues_file: Path,
    tmp_path: Path,
    monkeypatch: pytest.MonkeyPatch,
    capsys: pytest.CaptureFixture[str],
) -> None:
    def walk(tensors: TreeTensors, logits: Tensor) -> tuple[list[int], int]:
        path, bonus = greedy_walk(tensors, logits)
        return path, (bonus + 1) % 32 if len(tensors.token) > 1 else bonus

    monkeypatch.setattr("specverify.backends.compositions.SEAMS", replace(SEAMS, walk=walk))
    drafts = ("--draft", f"model:{checkpoint}")
    arguments = (
        "--model",
        checkpoint,
        "--dialogues",
        dialogues_file,
        "--new-tokens",
        6,
        "--trace",
        tmp_path / "traced",
    )
    assert bench(*arguments, *drafts) == 1
    assert "dialogue 1, turn 1, from token" in " ".join(capsys.readouterr().out.split())
    dumps = sorted((tmp_path / "traced" / "failures").iterdir())
    assert dumps[0].name.startswith("dialogue-0-turn-1-")
    dump = json.loads(dumps[0].read_text())
    check("failure", dump, "the dump")
    assert (dump["prompt"], dump["place"]) == (0, 1)


@pytest.mark.parametrize("model", [0, *HYBRIDS[:2]])
def test_transformers_own_turn_on_a_kept_cache_is_its_turn_anew(model: int) -> None:
    case, history = case_with(Ngram(SHAPE, 2), layout("branch"), model).plain_decode(), tuple[int, ...]()
    dialogue = TransformersDialogue(PLAIN)
    for number, utterance in enumerate(UTTERANCES):
        turn = replace(case, prompt=history + utterance)
        answer = dialogue.turn(turn, 0, 0)
        assert answer.tokens == generate_turn(PLAIN, turn, 0, 0).tokens
        assert answer.kept == max(0, len(history) - 1)
        assert (answer.context, number == 0) == (len(turn.prompt), answer.kept == 0)
        history = turn.prompt + answer.tokens
    other_case = replace(case, prompt=((history[0] + 1) % 5, *history[1:], 1))
    assert dialogue.turn(other_case, 0, 0).kept == 0


def test_assisted_generation_of_transformers_cannot_take_a_kept_cache() -> None:
    """Where it can, `specverify.bench.dialogues.KEEPING` is to name its ways too, and this test goes."""
    case = case_with(Ngram(SHAPE, 2), layout("branch")).plain_decode()
    first, cache = continue_turn(PLAIN, case, 0, 0)
    turn = replace(case, prompt=(*case.prompt, *first.tokens, 4, 0, 1))
    length = cache.get_seq_length()
    _, after = continue_turn(LOOKUP, turn, 0, 0, cache)
    # Every token of the prompt has run once more behind the columns that were kept.
    assert after.get_seq_length() >= length + len(turn.prompt)


PUBLISHED: dict[str, tuple[Head, str]] = {
    "eagle1": (Eagle1(BARE, LAST, SMALL), "vllm"),
    "eagle3": (Eagle3(BARE, HiddenStates((1, 3, 4), shift=1), SMALL, (1, 2, 5, 11, 16)), "safeailab"),
    "medusa": (Medusa(BARE, HiddenStates(place="normed"), 2), "fasterdecoding"),
}


@pytest.mark.slow
@pytest.mark.parametrize("kind", ["mtp", *PUBLISHED])
def test_a_published_head_keeps_its_caches_from_turn_to_turn(kind: str, dialogues_file: Path, tmp_path: Path) -> None:
    target, head, file = tmp_path / "target", tmp_path / "target", tmp_path / "out.json"
    if kind == "mtp":
        module = Mtp(BARE, LAST, SMALL, 2, normed_back=True)
        published_target(target, weights_of(module), num_nextn_predict_layers=2)
    else:
        published_target(target)
        head = saved_head(tmp_path / "head", *PUBLISHED[kind])
    words_tokenizer([str(token) for token in range(24)]).save_pretrained(target)
    arguments = (
        "--model",
        target,
        "--dialogues",
        dialogues_file,
        "--draft",
        head,
        "--new-tokens",
        6,
        "--dtype",
        "float64",
    )
    assert bench(*arguments, "--json", file) == 0
    result = json.loads(file.read_text())
    rows = {(turn["way"], turn["place"]): turn for turn in result["dialogues"]}
    way = next(way["way"] for way in result["ways"] if way["way"].startswith(head.name))
    for place in (2, 3):
        assert rows[way, place]["kept"] == rows["target-only", place]["kept"] > 0
        assert rows[way, place]["ttft_ms"] > 0
    assert all(text["equal"] == 5 for text in result["texts"] if text["way"] in (way, "target-anew"))
