"""`bench heads` trains each shape alike and says what each came to; `train --online` learns from the same texts."""

import json
from pathlib import Path

import pytest
import torch
from safetensors.torch import load_file

from specverify.bench.heads import HeadShape, shapes
from specverify.reference.draft_trees import Expansion
from specverify.reports.html.training import points
from specverify.training import data, loop, run
from specverify.training.data import prepare_data
from specverify.training.online import ROUND, OnlineOrder
from specverify.training.plan import TrainingPlan
from specverify.training.run import train
from specverify.training.states import StateCache
from specverify.training.target import Target, states_of
from specverify.training.texts import read_texts
from tests.inprocess import exit_code_of
from tests.meta.training import targets

pytestmark = pytest.mark.filterwarnings("ignore::DeprecationWarning")


@pytest.fixture(scope="module")
def folder(tmp_path_factory: pytest.TempPathFactory) -> Path:
    return targets.make_folder(tmp_path_factory.mktemp("heads"))


@pytest.fixture(autouse=True)
def _small(monkeypatch: pytest.MonkeyPatch) -> None:
    """Float32 on every machine, and small trees."""
    for module in (data, loop):
        monkeypatch.setattr(module, "quicker_dtype", lambda device: torch.float32)
    monkeypatch.setattr(data, "JUDGED_TOKENS", 16)
    for module in (loop, run):
        monkeypatch.setattr(module, "TREE", Expansion(3, 3, 7))


def test_the_grid_leaves_out_what_one_layer_has_not() -> None:
    grid = list(shapes((1, 3), ("dense", "experts"), ("rope", "irope")))
    assert len(grid) == 6
    assert HeadShape(1, "dense", "irope") not in grid
    assert [shape.name for shape in grid][:2] == ["1 layer, dense, rope", "1 layer, experts, rope"]


@pytest.mark.slow
def test_every_shape_is_trained_alike_and_found_again(
    folder: Path, tmp_path: Path, monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]
) -> None:
    monkeypatch.chdir(tmp_path)
    arguments = ["--model", folder / "model", "--text", folder / "prompts.jsonl", "--out", "grid", "--generate", "12"]
    arguments += ["--steps", "4", "--measures", "2", "--layers", "2", "--feed-forward", "dense", "--threads", "1"]
    assert exit_code_of("bench", "heads", *arguments, "--json", "out.json", "--html", "out.html") == 0
    out = capsys.readouterr().out
    assert max(map(len, out.splitlines())) <= 80
    figures = json.loads(Path("out.json").read_text())
    assert [(row["layers"], row["feed_forward"], row["irope"]) for row in figures["heads"]] == [
        (2, "dense", False),
        (2, "dense", True),
    ]
    for row in figures["heads"]:
        assert row["finished"]
        assert [line["step"] for line in row["curve"]] == [0, 2, 4]
        assert points(row["curve"], "tree")[-1] == (4, 1 + row["curve"][-1]["tree"])
    rope, irope = figures["heads"]
    assert rope["weights"] == irope["weights"]
    assert rope["curve"][0]["loss"] is None
    # The heads begin alike, since a later layer begins as the identity; what they learn differs.
    assert rope["curve"][0]["tree"] == irope["curve"][0]["tree"]
    rotated, unrotated = (load_file(f"grid/2-dense-{name}/training/state.safetensors") for name in ("rope", "irope"))
    weight = "head/layers.1.self_attn.o_proj.weight"
    assert not torch.equal(rotated[weight], unrotated[weight])
    config = json.loads(Path("grid/2-dense-irope/config.json").read_text())
    assert config["no_rope_layers"] == [1, 0]
    assert "tokens per call over the training" in Path("out.html").read_text()
    assert exit_code_of("bench", "heads", *arguments, "--json", "again.json") == 0
    again = json.loads(Path("again.json").read_text())
    assert [row["tree_tokens_per_call"] for row in again["heads"]] == [
        row["tree_tokens_per_call"] for row in figures["heads"]
    ]


def test_a_head_of_one_layer_has_no_irope(folder: Path, tmp_path: Path, capsys: pytest.CaptureFixture[str]) -> None:
    arguments = ["--model", folder / "model", "--text", folder / "prompts.jsonl", "--out", tmp_path / "grid"]
    assert exit_code_of("bench", "heads", *arguments, "--layers", "1", "--positions", "irope") == 2
    assert "a head of one layer has none; ask for --layers 2 or 3" in capsys.readouterr().err


def online_order(folder: Path, tmp_path: Path) -> OnlineOrder:
    target = Target(str(folder / "model"))
    plan = TrainingPlan(
        "eagle1", str(folder / "model"), (str(folder / "prompts.jsonl"),), 1, tmp_path, generated=6, online=True
    )
    reads = states_of("eagle1", target.layers)
    cache = StateCache(tmp_path / "cache", "a" * 64, reads)
    texts = read_texts(plan.texts)
    prepared = prepare_data(
        cache, plan, target, texts, goes_on=lambda: True, stopped=lambda: False, say=lambda line: None
    )
    assert cache.shards == 0, "no state is stored"
    return OnlineOrder(target, prepared.learned, reads, plan.generated, 4, 0, lambda: False)


def test_online_states_are_those_of_the_target_on_its_own_texts(folder: Path, tmp_path: Path) -> None:
    order = online_order(folder, tmp_path)
    batch = next(order.batches())
    (number,) = order.continued_texts
    prompts = order.prompts[number * ROUND :][:ROUND]
    texts = order.continued_texts[number]
    assert all(text[: len(prompt)] == prompt for text, prompt in zip(texts, prompts, strict=True))
    assert all(len(text) == len(prompt) + 6 for text, prompt in zip(texts, prompts, strict=True))
    tokens = batch.tokens[0, : batch.lengths[0]].tolist()
    assert tokens in texts
    (plain,) = order.target.continue_prompts([tokens], 0, order.reads)
    torch.testing.assert_close(batch.last[0, : len(tokens)], plain.last, rtol=1e-4, atol=1e-4)
    assert int(batch.firsts[0]) == (len(tokens) - 6) // 2


def test_batches_that_are_skipped_cost_no_target_and_change_none(folder: Path, tmp_path: Path) -> None:
    order = online_order(folder, tmp_path)
    batches = order.batches()
    batch_tokens = [next(batches).tokens for _ in range(7)]
    fresh = online_order(folder, tmp_path)
    per_round = -(-ROUND // 4)
    later = fresh.batches(per_round)
    assert torch.equal(next(later).tokens, batch_tokens[per_round])
    assert len(fresh.continued_texts) == 1


def test_an_online_training_goes_on_where_it_ended(folder: Path, tmp_path: Path) -> None:
    options = {"online": True, "generated": 6}
    whole_run = train(targets.plan(folder, "eagle1", tmp_path / "whole", most_steps=6, **options), quiet=True)
    train(targets.plan(folder, "eagle1", tmp_path / "cut", most_steps=3, **options), quiet=True)
    resumed = train(targets.plan(folder, "eagle1", tmp_path / "cut", most_steps=6, **options), quiet=True)
    assert resumed["steps"] == whole_run["steps"] == 6
    assert resumed["learned"] == whole_run["learned"]
    assert resumed["online"]
