"""`bench decode` times what it says it times, and tells a wrong text; no time itself is asserted."""

import json
import os
import shutil
from dataclasses import replace
from pathlib import Path

import numpy as np
import pytest
import torch
from torch import Tensor

from specverify.backends.engine.accept import greedy_walk
from specverify.backends.engine.composition import SEAMS
from specverify.backends.engine.kv.base import CacheSpec
from specverify.backends.engine.kv.branch import Branch
from specverify.backends.engine.lower_tree import TreeTensors
from specverify.backends.engine.reach import Reach
from specverify.backends.flags import ATTENTION_TABLE
from specverify.bench import attention
from specverify.bench.agreement import compare_turn, first_difference, noise_between
from specverify.bench.budgets import grids
from specverify.bench.contexts import lengthen
from specverify.bench.decode_figures import by_depth, row
from specverify.bench.estimates import Estimate, estimate
from specverify.bench.memory import cache_bytes
from specverify.bench.stage_clock import STAGES
from specverify.bench.tensor_peak import peak_bytes
from specverify.bench.turn import Turn, Way
from specverify.cli import main
from specverify.records.read import check
from specverify.reference.trace import CHOSEN
from specverify.reports.pages.decode import decode_page
from tests.checkpoints import readable
from tests.inprocess import exit_code_of
from tests.tiers import first


@pytest.fixture(scope="module")
def checkpoint(tmp_path_factory: pytest.TempPathFactory) -> Path:
    return readable("llama", tmp_path_factory.mktemp("decode"))


FIGURES = {
    "facts": {"backend": "cpu-eager", "device": "cpu", "dtype": "float32", "threads": 1, "prompts": 1,
              "peak_resident_mb": 1.0},
    "ways": [], "texts": [],
}  # fmt: skip


def bench(*options: object) -> int:
    return exit_code_of("bench", "decode", *options)


def test_every_way_is_timed_and_its_text_is_compared(
    checkpoint: Path, tmp_path: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    file, folder = tmp_path / "out.json", tmp_path / "traced"
    arguments = (
        "--model",
        checkpoint,
        "--cases",
        2,
        "--new-tokens",
        8,
        "--repeat",
        2,
        "--json",
        file,
        "--trace",
        folder,
    )
    assert bench(*arguments, "--draft", "ngram", "--draft", f"model:{checkpoint}") == 0
    out = capsys.readouterr().out
    assert max(map(len, out.splitlines())) <= 80
    assert "±: standard error over prompts" in out
    result = json.loads(file.read_text())
    ways = {way["way"]: way for way in result["ways"]}
    drafted = f"model:{checkpoint}" if len(f"model:{checkpoint}") < 24 else checkpoint.name
    theirs = ["transformers", "transformers-lookup", "transformers-assisted"]
    assert list(ways) == ["target-only", "ngram", drafted, *theirs]
    assert all(way["tokens"] == 2 * 2 * 8 for way in ways.values())
    assert [(text["equal"], text["other"]) for text in result["texts"]] == [(2, [])] * 5
    for name in ("target-only", "ngram", drafted):
        assert set(ways[name]["stages"]) <= set(STAGES)
        assert sum(ways[name]["stages"].values()) == pytest.approx(1)
        assert ways[name]["stages"]["verify"] > 0
        assert 0 < ways[name]["beyond_forwards"] < 1
    assert "percent beyond forwards: target-only " in out
    for name in ("target-only", "ngram", drafted):
        memory = ways[name]["memory"]
        assert memory["target_mb"] == ways["transformers"]["memory"]["target_mb"] > 0
        assert memory["target_kv_mb"] > 0
        # What a way holds at once is its weights, its caches and what its forwards make in between.
        assert (
            memory["peak_mb"]
            > memory["target_mb"] + memory["draft_mb"] + memory["target_kv_mb"] + memory["draft_kv_mb"]
        )
        assert memory["peak_mb"] < 1 < result["facts"]["peak_resident_mb"]
        assert set(ways[name]["stage_ms"]) <= set(STAGES)
        assert {"prefill", "verify", "mask", "lower"} <= set(ways[name]["stage_ms"])
        assert all(stage["mean"] >= 0 and stage["tail"] >= 0 for stage in ways[name]["stage_ms"].values())
        assert ways[name]["verify_calls"] == ways[name]["steps"]
        assert set(ways[name]["spreads"]) == {"ttft_ms", "prefill_ms", "tpot_ms"}
        assert ways[name]["spreads"]["ttft_ms"]["mean"] == pytest.approx(ways[name]["ttft_ms"])
    assert [ways[name]["memory"]["draft_mb"] > 0 for name in ("ngram", drafted)] == [False, True]
    # The draft has a cache of its own, and as many weights as the target.
    assert ways[drafted]["memory"]["draft_kv_mb"] > ways["ngram"]["memory"]["draft_kv_mb"] == 0
    parameters = [ways[name]["memory"]["draft_parameters"] for name in ("ngram", drafted, "transformers-assisted")]
    assert parameters[0] == 0 < parameters[1] == parameters[2]
    # Every tree is accepted whole, so that a call brings its levels and the target's own token.
    assert ways["target-only"]["tokens_per_call"] == 1
    assert ways[drafted]["tokens_per_call"] == pytest.approx(ways[drafted]["tokens"] / ways[drafted]["steps"])
    assert ways[drafted]["break_even"] >= 0
    # The draft is the target itself: every tree is accepted down to its last level, but where the text ends.
    assert ways[drafted]["accepted"]["p50"] == 4
    assert ways[drafted]["draft_calls"] > 0
    assert (ways["ngram"]["draft_calls"], ways["target-only"]["accepted"]) == (0, None)
    turns = [json.loads(line) for line in (folder / "turns.jsonl").read_text().splitlines()]
    assert len(turns) == 2 * 2 * 6
    for turn in turns:
        assert sum(turn["emitted"]) == len(turn["tokens"]) == 8
        assert turn["steps"] == sorted(turn["steps"])
        assert turn["steps"][-1] <= turn["seconds"]
        for path, accepted in zip(turn["paths"], turn["accepted"], strict=True):
            assert (path[0], len(path)) == (0, accepted + 1)
    assert json.loads((folder / "manifest.json").read_text())["asked"]["new_tokens"] == 8


@pytest.mark.slow
def test_budgets_and_depths_are_ways(checkpoint: Path, tmp_path: Path, capsys: pytest.CaptureFixture[str]) -> None:
    file = tmp_path / "out.json"
    shapes = ("--nodes", 2, "--nodes", 6, "--depth", 1, "--depth", 3)
    assert bench("--model", checkpoint, "--cases", 1, "--new-tokens", 6, *shapes, "--json", file) == 0
    out = capsys.readouterr().out
    assert "one prompt has no error" in out
    assert max(map(len, out.splitlines())) <= 80
    assert "±" not in out
    ways = [way["way"] for way in json.loads(file.read_text())["ways"]]
    assert ways[1:-2] == ["ngram 2x1", "ngram 6x1", "ngram 2x3", "ngram 6x3"]
    (grid,) = json.loads(file.read_text())["grids"]
    assert (grid["nodes"], grid["depths"], len(grid["cells"])) == ([2, 6], [1, 3], 4)


@pytest.mark.parametrize(("options", "threads"), first([(("--threads", "2"), 2), ((), None)], 1))
def test_a_checkpoint_gets_the_threads_that_are_asked_for_or_all_cores(
    options: tuple[str, ...], threads: int | None, checkpoint: Path, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr("specverify.campaign.threads._set_names", {"OMP_NUM_THREADS"})
    before, result_file = torch.get_num_threads(), tmp_path / "told.json"
    few = ("--cases", "1", "--new-tokens", "2", "--json", str(result_file))
    assert bench("--model", checkpoint, *few, *options) == 0
    assert json.loads(result_file.read_text())["facts"]["threads"] == (threads or os.cpu_count())
    assert torch.get_num_threads() == before


def test_the_best_budget_of_a_sweep_is_named() -> None:
    ways = [Way(f"ngram {n}x{d}", "ngram", n, d) for n, d in ((2, 1), (4, 1), (4, 2))]
    speeds = zip(ways, (1.0, 3.0, 2.0), strict=True)
    rows = [
        {
            "way": way.name,
            "tokens_per_s": pace,
            "speed_up": {"mean": pace / 2},
            "accepted": {"mean": 1.0},
            "break_even": 0.5,
        }
        for way, pace in speeds
    ]
    # A draft with other weights, vocabulary or window is another one, whatever its budget.
    for word, variant in (("v9", {"vocabulary": 9}), ("int8", {"weights": "int8"}), ("w4", {"window": 4})):
        ways.append(Way(f"ngram 4x1 {word}", "ngram", 4, 1, **variant))
        rows.append({**rows[1], "way": ways[-1].name, "tokens_per_s": 9.0})
    (grid,) = grids(ways, rows)
    assert grid["best"]["way"] == "ngram 4x1"
    assert len(grid["cells"]) == 3
    page = decode_page(FIGURES | {"grids": [grid]})
    assert "best budget: 4 nodes in 1 level, 1.50 times the target alone" in page
    (row,) = (line.split() for line in page.splitlines() if line.split()[:2] == ["2", "-"])
    assert row == ["2", "-", "1.00×", "1.00"]


def test_a_text_that_is_not_the_targets_own_is_told(
    checkpoint: Path, tmp_path: Path, monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]
) -> None:
    def walk(tensors: TreeTensors, logits: Tensor) -> tuple[list[int], int]:
        path, bonus = greedy_walk(tensors, logits)
        return path, (bonus + 1) % 32 if len(tensors.token) > 1 else bonus

    monkeypatch.setattr("specverify.backends.compositions.SEAMS", replace(SEAMS, walk=walk))
    assert (
        bench(
            "--model",
            checkpoint,
            "--cases",
            1,
            "--new-tokens",
            12,
            "--draft",
            f"model:{checkpoint}",
            "--trace",
            tmp_path,
        )
        == 1
    )
    assert "below the best logit" in " ".join(capsys.readouterr().out.split())
    (dump,) = (tmp_path / "failures").iterdir()
    failure = json.loads(dump.read_text())
    check("failure", failure, "the dump")
    rows = len(failure["tree"]["parent"])
    assert len(failure["lowered"]["token"]) == rows > 1
    # Every mask has the rows of the tree, and sees the committed columns and these rows.
    assert all(len(mask) == rows for mask in failure["lowered"]["visible"])
    assert failure["environment"]["torch"]


WRONG = {
    ("--nodes", "4"): "Missing option '--model'",
    ("--model", "x", "--device", "cpu"): "--device is for bench attention",
    ("--model", "nowhere"): "nowhere",
}


@pytest.mark.parametrize("options", WRONG, ids=" ".join)
def test_wrong_options_are_one_line(options: tuple[str, ...], capsys: pytest.CaptureFixture[str]) -> None:
    assert bench(*options) == 2
    assert WRONG[options] in capsys.readouterr().err


def test_attention_by_a_table_of_the_checkpoint(
    checkpoint: Path, tmp_path: Path, monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]
) -> None:
    arguments = ("--model", checkpoint, "--cases", 1, "--new-tokens", 4, "--backend", "cpu-measured")
    wide = json.loads((checkpoint / "config.json").read_text())
    wide |= {"num_attention_heads": 16, "num_key_value_heads": 16, "head_dim": wide["hidden_size"] // 16}
    settings = replace(attention.SETTINGS["cpu"], prefixes=(16,), nodes=(4,), batches=(1,))
    monkeypatch.setitem(attention.SETTINGS, "cpu", settings)
    table = tmp_path / "table.json"
    (tmp_path / "config.json").write_text(json.dumps(wide))
    monkeypatch.setenv(ATTENTION_TABLE, str(table))
    for model, code in ((tmp_path, 2), (checkpoint, 0)):
        with pytest.raises(SystemExit):
            main(["bench", "attention", "--model", str(model), "--table", str(table)])
        capsys.readouterr()
        assert bench(*arguments, "--json", tmp_path / "out.json") == code
        out, err = capsys.readouterr()
        if code:
            # Times of other heads say nothing of this checkpoint's.
            assert (out, err.count("\n")) == ("", 1)
            assert "bench decode --backend cpu-measured: the table of attention times has none for float32, " in err
    result = json.loads((tmp_path / "out.json").read_text())
    ways = {way: counts for row in result["ways"] for way, counts in row["fallbacks"].items() if way.startswith(CHOSEN)}
    assert ways
    assert "target-only: attention chosen by measured times, with the calls of each: " in " ".join(out.split())


def test_a_script_and_another_engine_are_refused(checkpoint: Path, capsys: pytest.CaptureFixture[str]) -> None:
    assert bench("--model", checkpoint, "--draft", "scripted") == 2
    assert bench("--model", checkpoint, "--backend", "hf-generate") == 2
    assert "stages of our engine" in capsys.readouterr().err


def test_acceptance_by_depth_counts_trees_that_reach_it() -> None:
    assert by_depth([0, 1, 3, 3], [1, 2, 3, 4]) == [0.75, 2 / 3, 1.0, 0.0]


def test_break_even_is_the_cost_of_a_step() -> None:
    alone = Turn(0, 0, "target-only", (1, 2, 3, 4), 5.0, (2.0, 3.0, 4.0, 5.0), (1, 1, 1, 1), prefill_s=1.0)
    drafted = Turn(
        0,
        0,
        "ngram",
        (1, 2, 3, 4),
        4.0,
        (2.5, 4.0),
        (2, 2),
        prefill_s=1.0,
        accepted=(1, 1),
        nodes=(3, 3),
        height=(1, 2),
    )
    result = row("ngram", [drafted], {(0, 0, 0, 0): alone})
    assert result["break_even"] == pytest.approx(0.5)
    assert (result["break_even_error"], result["speed_up_error"]) == (None, None)  # one prompt has no spread
    assert result["speed_up"]["mean"] == pytest.approx(1.25)
    assert (result["ttft_ms"], result["tpot_ms"], result["rejected"]) == (2500, 750, 4)


def drafted_pair(prompt: int, step_s: float) -> tuple[Turn, Turn]:
    """A text in two steps of `step_s`, and the same text by the target alone in four steps of a second."""
    alone = Turn(prompt, 0, "target-only", (1, 2, 3, 4), 4.0, (1.0, 2.0, 3.0, 4.0), (1, 1, 1, 1), prefill_s=0.0)
    steps = (step_s, 2 * step_s)
    drafted = replace(alone, way="ngram", seconds=2 * step_s, steps=steps, emitted=(3, 1), accepted=(2, 0))
    return replace(drafted, nodes=(3, 3), height=(2, 2), stages={"verify": 2 * step_s}), alone


def test_break_even_has_noise_and_is_never_below_zero() -> None:
    pairs = [drafted_pair(prompt, step_s) for prompt, step_s in enumerate((1.2, 1.4))]
    alone = {(turn.prompt, 0, 0, 0): turn for _, turn in pairs}
    result = row("ngram", [turn for turn, _ in pairs], alone)
    assert result["break_even"] == pytest.approx(0.3)
    assert result["break_even_error"] == pytest.approx(0.1)
    assert (result["tokens_per_call"], result["tokens_per_call_error"]) == (2.0, 0.0)
    # A step that took less than the target's own, by noise, asks for no token at all.
    faster = [drafted_pair(prompt, step_s) for prompt, step_s in enumerate((0.7, 0.9))]
    result = row("ngram", [turn for turn, _ in faster], {(turn.prompt, 0, 0, 0): turn for _, turn in faster})
    assert result["break_even"] == 0.0
    assert result["break_even_error"] == pytest.approx(0.1)


def test_an_error_is_that_of_the_prompts_and_not_of_their_rounds() -> None:
    result = estimate([1.0, 2.0, 3.0], np.mean)
    assert [result.mean, result.error] == pytest.approx([2.0, 3**-0.5])
    assert estimate([5.0], np.mean) == Estimate(5.0, None)
    assert Estimate(-0.5, 0.25).above(0.0) == Estimate(0.0, 0.25)


def test_the_most_that_is_alive_is_counted_and_no_view_or_weight() -> None:
    weights = torch.zeros(100, 100)  # 40,000 bytes that were there before

    def work() -> None:
        first = weights @ torch.ones(100, 100)  # two at once
        del first
        numbers = weights.view(-1)[:10] + 1  # 40 bytes
        assert numbers.sum() == 10

    assert peak_bytes("cpu", work) == 2 * 40_000
    assert peak_bytes("cpu", lambda: weights.view(-1).unsqueeze(0)) == 0


def test_bytes_of_caches_are_those_of_each_storage_once() -> None:
    room = CacheSpec((Reach(),) * 2, 1, 4, 8, 2, torch.device("cpu"), torch.float32)
    caches = [Branch(room, "fast") for _ in range(3)]
    size = cache_bytes(caches[:1])
    assert size == 2 * 2 * 8 * 4 * 4  # layers, keys and values, columns, width, bytes
    assert [cache_bytes(caches[:count]) for count in (2, 3)] == [2 * size, 3 * size]


def test_a_difference_inside_the_noise_is_a_tie() -> None:
    rows = [np.array([0.0, 1.0, 0.9]), np.array([2.0, 1.99, 0.0])]
    target, other_turn = (Turn(0, 0, name, text, 1.0, (1.0,), (2,)) for name, text in (("a", (1, 0)), ("b", (1, 1))))
    assert first_difference((1, 0), (1, 0)) is None
    assert first_difference((1, 0), (1,)) == 1
    assert compare_turn(target, rows, other_turn, 0.01).tied
    assert not compare_turn(target, rows, other_turn, 1e-4).agrees
    assert noise_between(rows, [rows[0] + 0.5, rows[1]], 1) == pytest.approx(0.5)


def test_prompts_are_brought_to_a_length_by_those_before_them() -> None:
    assert lengthen([(1, 2, 3), (4, 5)], 4) == [(5, 1, 2, 3), (2, 3, 4, 5)]
    assert lengthen([(1, 2, 3), (4, 5)], 2) == [(2, 3), (4, 5)]
    assert lengthen([(1,)], 3) == [(1, 1, 1)]


@pytest.mark.slow
def test_a_draft_that_sees_a_window_is_a_way_and_so_is_each_length(checkpoint: Path, tmp_path: Path) -> None:
    twin = shutil.copytree(checkpoint, tmp_path / "twin")
    file, draft = tmp_path / "out.json", f"model:{twin}"
    arguments = ("--model", checkpoint, "--cases", 1, "--new-tokens", 6, "--draft", draft, "--draft-window", 1)
    assert bench(*arguments, "--prompt-length", 8, "--prompt-length", 30, "--json", file) == 0
    result = json.loads(file.read_text())
    draft_ways = [way for way in result["ways"] if way["accepted"] is not None]
    assert [way["way"].rpartition(" ")[2] for way in draft_ways][1:] == ["w1"]
    # The draft has the target's weights: with all of the context it guesses right, and with one token it does not.
    assert draft_ways[0]["accepted"]["mean"] > draft_ways[1]["accepted"]["mean"]
    assert [(cell["way"], cell["context"]) for cell in result["cells"][:2]] == [("target-only", 8), ("target-only", 30)]
    assert [(text["equal"], text["other"]) for text in result["texts"]] == [(2, [])] * len(result["texts"])


def test_a_window_of_a_draft_without_a_cache_is_refused(checkpoint: Path, capsys: pytest.CaptureFixture[str]) -> None:
    assert bench("--model", checkpoint, "--draft-window", 4) == 2
    assert "ngram keeps no keys and values" in capsys.readouterr().err
    assert bench("--model", checkpoint, "--draft", f"model:{checkpoint}", "--draft-window", 4) == 2
    assert "the draft is the target itself" in capsys.readouterr().err
