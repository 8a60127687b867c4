"""Batches, draft lengths and sampled texts of `bench decode`; acceptance compared between two of its records."""

import json
import shutil
from pathlib import Path
from typing import Any

import pytest

from specverify.backends.engine.composition import SEAMS
from specverify.backends.faults import fault_named
from specverify.bench import decode
from specverify.bench.decode_figures import batch_throughput
from specverify.bench.turn import Turn
from specverify.interrupts import Interrupts
from specverify.records.read import compare_records, read
from specverify.reports.acceptance import SAME_RUN
from specverify.reports.pages.decode_series import with_error
from tests.checkpoints import readable
from tests.inprocess import exit_code_of

PROMPTS = 3


@pytest.fixture(scope="module")
def checkpoint(tmp_path_factory: pytest.TempPathFactory) -> Path:
    return readable("llama", tmp_path_factory.mktemp("batches"))


def bench(checkpoint: Path, folder: Path, *options: object) -> int:
    """A bench of the target as its own draft, whose tokens are all accepted."""
    arguments = ("--model", checkpoint, "--draft", f"model:{checkpoint}", "--cases", PROMPTS, "--new-tokens", 6)
    return exit_code_of("bench", "decode", *arguments, "--threads", 1, "--trace", folder, *options)


@pytest.fixture(scope="module")
def alone(checkpoint: Path, tmp_path_factory: pytest.TempPathFactory) -> Path:
    """The record of prompts by themselves, in batches of one."""
    folder = tmp_path_factory.mktemp("alone") / "run"
    assert bench(checkpoint, folder, "--batch", "1") == 0
    return folder


@pytest.fixture(scope="module")
def together(checkpoint: Path, tmp_path_factory: pytest.TempPathFactory) -> Path:
    """The record of the same prompts in a batch."""
    folder = tmp_path_factory.mktemp("together") / "run"
    assert bench(checkpoint, folder, "--batch", str(PROMPTS)) == 0
    return folder


def test_batches_contexts_and_draft_lengths_are_measured(
    checkpoint: Path, tmp_path: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    file, page = tmp_path / "out.json", tmp_path / "out.html"
    shapes = ("--batch", "1,3", "--lengths", "1,2", "--prompt-length", 8, "--prompt-length", 20)
    assert bench(checkpoint, tmp_path / "run", *shapes, "--json", file, "--html", page) == 0
    out = capsys.readouterr().out
    assert max(map(len, out.splitlines())) <= 80
    result = json.loads(file.read_text())
    name = f"{checkpoint.name} chain" if len(f"model:{checkpoint}") >= 24 else f"model:{checkpoint} chain"
    ways = ["target-only", f"{name} 1", f"{name} 2"]
    cells = {(cell["way"], cell["batch"], cell["context"]): cell for cell in result["cells"]}
    assert list(cells) == [(way, batch, context) for way in ways for batch in (1, 3) for context in (8, 20)]
    rows = {row["way"]: row for row in result["ways"]}
    assert list(rows) == [f"{way} b{batch}" for way in ways for batch in (1, 3)]
    for (way, batch, _), cell in cells.items():
        assert cell["tokens"] == PROMPTS * 6
        # A chain of n brings n tokens and the target's own; the last call of a text may be cut.
        length = {ways[0]: 0, ways[1]: 1, ways[2]: 2}[way]
        assert cell["tokens_per_call"] == pytest.approx(6 / -(-6 // (length + 1)))
        assert cell["tokens_per_call_error"] == pytest.approx(0, abs=1e-9)
        assert cell["ttft_ms"] > cell["prefill_ms"] > 0
        assert cell["tpot_ms"] > 0
        assert (cell["batch_speed_up_error"] is None) == (batch == PROMPTS)
    assert [cells[ways[0], batch, 8]["batch_speed_up"] for batch in (1, 3)] == [1.0, 1.0]
    # Texts in a batch are those of prompts alone, the target's own as well.
    assert [(text["way"], text["equal"], text["other"]) for text in result["texts"]] == [
        (way, 2 * PROMPTS, []) for way in list(rows)[1:]
    ]
    for way in ways:
        memories = [rows[f"{way} b{batch}"]["memory"] for batch in (1, 3)]
        assert memories[1]["target_kv_mb"] == pytest.approx(3 * memories[0]["target_kv_mb"])
        assert memories[1]["draft_kv_mb"] == pytest.approx(3 * memories[0]["draft_kv_mb"])
        assert memories[1]["peak_mb"] > memories[0]["peak_mb"]
    assert [row["length"] for row in result["chains"]] == [1, 2]
    assert result["grids"] == []
    for title in (f"× of {ways[1]} by batch and tokens of the prompt", "× by draft and batch, after 8 tokens"):
        assert " ".join(title.split()) in " ".join(out.split())
    assert page.read_text().count("<svg") >= 6


def test_a_run_goes_on_after_blocks_that_are_finished(checkpoint: Path, alone: Path, tmp_path: Path) -> None:
    record = Path(shutil.copytree(alone, tmp_path / "run"))
    lines = (record / "prompts.jsonl").read_text().splitlines()
    (record / "prompts.jsonl").write_text(lines[0] + "\n")
    assert bench(checkpoint, record, "--batch", "1") == 0
    assert sorted(read(record).prompts) == [0, 1, 2]
    assert exit_code_of("trace", "compare", alone, record) == 0


@pytest.mark.slow
def test_half_a_block_runs_again_whole(checkpoint: Path, together: Path, tmp_path: Path) -> None:
    record, file = Path(shutil.copytree(together, tmp_path / "run")), tmp_path / "out.json"
    lines = (record / "prompts.jsonl").read_text().splitlines()
    (record / "prompts.jsonl").write_text(lines[0] + "\n")
    assert bench(checkpoint, record, "--batch", PROMPTS, "--json", file) == 0
    result = json.loads(file.read_text())
    assert all(row["tokens"] == PROMPTS * 6 for row in result["ways"])  # no prompt counts twice
    assert result["resumed"] == 0


def test_ctrl_c_keeps_what_is_measured(
    checkpoint: Path, tmp_path: Path, monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]
) -> None:
    class SecondPrompt(Interrupts):
        """Ctrl-C while the second prompt runs."""

        calls = 0

        @property
        def word(self) -> str | None:
            type(self).calls += 1
            return "Ctrl-C" if type(self).calls > 5 else None

        @word.setter
        def word(self, value: str | None) -> None: ...

    monkeypatch.setattr(decode, "Interrupts", SecondPrompt)
    assert bench(checkpoint, tmp_path / "run", "--batch", "1", "--json", tmp_path / "out.json") == 3
    assert "Ctrl-C: 1 of 3 prompts are measured; the same command goes on" in " ".join(capsys.readouterr().out.split())
    result = json.loads((tmp_path / "out.json").read_text())
    assert {row["tokens"] for row in result["ways"]} == {6}
    monkeypatch.undo()
    assert bench(checkpoint, tmp_path / "run", "--batch", "1", "--json", tmp_path / "out.json") == 0
    assert json.loads((tmp_path / "out.json").read_text())["resumed"] == 1


@pytest.mark.slow
def test_sampled_texts_are_timed_and_not_compared(
    checkpoint: Path, tmp_path: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    file = tmp_path / "out.json"
    sampled = ("--temperature", 0.9, "--top-p", 0.8, "--repeat", 2, "--json", file)
    assert bench(checkpoint, tmp_path / "run", *sampled) == 0
    out = capsys.readouterr().out
    assert "temperature 0.9, top-p 0.8, rule eagle" in " ".join(out.split())
    assert "texts are sampled, and so not compared" in out
    result = json.loads(file.read_text())
    assert result["texts"] == []
    drafted = next(row for row in result["ways"] if row["accepted"] is not None)
    assert 1 < drafted["tokens_per_call"] <= 5
    assert drafted["tokens_per_call_error"] > 0
    turns = [turn for turn in read(tmp_path / "run").finished_turns if turn["way"] == "target-only"]
    texts = {(turn["prompt"], turn["repeat"]): turn["tokens"] for turn in turns}
    # Each prompt and each round has coins of its own.
    assert any(texts[prompt, 0] != texts[prompt, 1] for prompt in range(PROMPTS))
    # The same command draws the same texts.
    assert bench(checkpoint, tmp_path / "again", *sampled) == 0
    again = {(turn["prompt"], turn["repeat"]): turn["tokens"] for turn in read(tmp_path / "again").finished_turns
             if turn["way"] == "target-only"}  # fmt: skip
    assert again == texts


def test_batch_and_alone_and_overlap_accept_alike(
    checkpoint: Path, alone: Path, together: Path, tmp_path: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    assert bench(checkpoint, tmp_path / "ahead", "--batch", PROMPTS, "--overlap") == 0
    for folder in (together, tmp_path / "ahead"):
        capsys.readouterr()
        assert exit_code_of("trace", "compare", alone, folder) == 0
        assert "acceptance is equal on every prompt" in capsys.readouterr().out
        assert compare_records(read(alone), read(folder)).is_same_run


def test_recorded_graphs_accept_as_eager_forwards_do(checkpoint: Path, alone: Path, tmp_path: Path) -> None:
    assert bench(checkpoint, tmp_path / "graphs", "--batch", "1", "--backend", "cpu-recorded") == 0
    comparison = compare_records(read(alone), read(tmp_path / "graphs"))
    assert [test.verdict for test in comparison.acceptance.values()] == ["equal"]
    assert comparison.settings["backend"] == ("cpu-eager", "cpu-recorded")


def lift_record(folder: Path, copy_folder: Path, share: float) -> Path:
    """A copy of a record in which so many steps of drafts accept a token more."""
    record = Path(shutil.copytree(folder, copy_folder))
    turns = [json.loads(line) for line in (record / "turns.jsonl").read_text().splitlines()]
    for number, turn in enumerate(turns):
        if any(turn["nodes"]) and number % round(1 / share) == 0:
            turn["accepted"] = [length + 1 for length in turn["accepted"]]
    (record / "turns.jsonl").write_text("".join(json.dumps(turn) + "\n" for turn in turns))
    return record


def many_prompts(folder: Path, copy_folder: Path, copies: int) -> Path:
    """A copy of a record with each prompt so many times."""
    record = Path(shutil.copytree(folder, copy_folder))
    for name in ("turns.jsonl", "prompts.jsonl"):
        facts = [json.loads(line) for line in (record / name).read_text().splitlines()]
        repeated = [fact | {"prompt": fact["prompt"] + PROMPTS * copy} for copy in range(copies) for fact in facts]
        (record / name).write_text("".join(json.dumps(fact) + "\n" for fact in repeated))
    return record


def test_two_runs_that_accept_otherwise_are_told_with_their_error_rate(
    alone: Path, tmp_path: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    first = many_prompts(alone, tmp_path / "first", 8)
    second = lift_record(first, tmp_path / "second", 1.0)
    assert exit_code_of("trace", "compare", first, second, "--json", tmp_path / "out.json") == 1
    out = " ".join(capsys.readouterr().out.split())
    assert SAME_RUN in out
    assert "error rate 0.001" in out
    (test,) = json.loads((tmp_path / "out.json").read_text())["acceptance"].values()
    assert (test["verdict"], test["prompts"], test["differing"]) == ("differs", 24, 24)
    assert test["positions"][0]["second"] == pytest.approx(test["positions"][0]["first"] + 1)
    # Three prompts cannot show a difference at that rate, whatever it is.
    few = lift_record(alone, tmp_path / "few", 1.0)
    capsys.readouterr()
    assert exit_code_of("trace", "compare", alone, few) == 1
    assert "too few prompts to tell whether acceptance differs" in " ".join(capsys.readouterr().out.split())
    # Another draft or seed is no such surprise.
    manifest = json.loads((second / "manifest.json").read_text()) | {"seed": 5}
    (second / "manifest.json").write_text(json.dumps(manifest))
    capsys.readouterr()
    assert exit_code_of("trace", "compare", first, second) == 1
    assert SAME_RUN not in capsys.readouterr().out


def test_throughput_is_that_of_the_longest_text() -> None:
    def turn(way: str, prompt: int, tokens: int, seconds: float) -> Turn:
        return Turn(prompt, 0, way, (0,) * tokens, seconds, (seconds,), (tokens,), batch=2)

    alone = [turn("target-only", 0, 4, 4.0), turn("target-only", 1, 2, 2.0)]
    drafted = [turn("x", 0, 4, 1.0), turn("x", 1, 2, 2.0)]
    figures = batch_throughput(drafted, {(turn.prompt, 0, 0, 2): turn for turn in alone})
    assert figures == {"batch_tokens_per_s": 3.0, "batch_speed_up": 2.0, "batch_speed_up_error": None}


def test_prompts_fill_whole_batches_and_none_stands_in_two_lanes(
    checkpoint: Path, tmp_path: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    texts, file = tmp_path / "texts.txt", tmp_path / "out.json"
    texts.write_text("1 2 3\n4 5\n6 7 8 9\n")
    arguments = ("--prompts", texts, "--new-tokens", 2, "--draft", "ngram", "--json", file)
    assert bench(checkpoint, tmp_path / "run", *arguments, "--batch", "2") == 0
    assert {row["tokens"] for row in json.loads(file.read_text())["ways"]} == {2 * 2}  # the third fills no batch
    assert bench(checkpoint, tmp_path / "other", *arguments, "--batch", "4") == 2
    assert "3 prompts fill no batch" in capsys.readouterr().err


def test_a_value_stands_with_its_error() -> None:
    assert [with_error(*pair) for pair in ((None, None), (1.0, None), (1.0, 0.25))] == ["-", "1.00", "1.00±0.25"]


WRONG: dict[tuple[Any, ...], str] = {
    ("--batch", "4,1"): "numbers from 1 on, ascending",
    ("--overlap",): "--overlap needs --batch",
    ("--batch", "2", "--dialogues", "x"): "a dialogue runs by itself",
    ("--top-p", "0.5"): "--top-p needs --temperature",
    ("--temperature", "1", "--rule", "multi-round", "--draft", "ngram", "--lengths", "0"): "numbers from 1 on",
}


@pytest.mark.parametrize("options", WRONG, ids=" ".join)
def test_wrong_options_are_one_line(
    options: tuple[str, ...], checkpoint: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    assert exit_code_of("bench", "decode", "--model", checkpoint, *options) == 2
    assert WRONG[options] in " ".join(capsys.readouterr().err.split())


def test_batches_under_torchrun_are_refused(
    checkpoint: Path, tmp_path: Path, monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]
) -> None:
    monkeypatch.setenv("WORLD_SIZE", "2")
    assert bench(checkpoint, tmp_path / "run", "--batch", "1") == 2
    assert "prompts that step together belong to one process" in capsys.readouterr().err


def test_a_count_that_is_read_a_token_late_is_told(
    checkpoint: Path,
    together: Path,
    tmp_path: Path,
    monkeypatch: pytest.MonkeyPatch,
    capsys: pytest.CaptureFixture[str],
) -> None:
    monkeypatch.setattr("specverify.backends.compositions.SEAMS", fault_named("accept-length-with-bonus").plant(SEAMS))
    assert bench(checkpoint, tmp_path / "ahead", "--batch", PROMPTS, "--overlap") == 0  # every text is right
    monkeypatch.undo()
    first, second = (many_prompts(folder, tmp_path / name, 8) for folder, name in
                     ((together, "first"), (tmp_path / "ahead", "second")))  # fmt: skip
    capsys.readouterr()
    assert exit_code_of("trace", "compare", first, second) == 1
    assert SAME_RUN in " ".join(capsys.readouterr().out.split())
