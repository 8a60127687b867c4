"""A training learns, goes on after a kill as if there had been none, and leaves a whole head in its layout."""

import json
import os
import signal
import subprocess
import sys
import time
from pathlib import Path
from typing import Any

import numpy as np
import pytest
import torch
from safetensors import safe_open
from safetensors.torch import load_file

from specverify.reference.draft.eagle1 import Eagle1
from specverify.reference.draft_files import open_head
from specverify.reference.draft_trees import Expansion
from specverify.reference.oracle.checkpoint import identify
from specverify.training import acceptance, data, loop, run
from specverify.training.heads.base import at_rows
from specverify.training.heads.eagle1 import Eagle1Module
from specverify.training.heads.eagle3 import Eagle3Module
from specverify.training.heads.make import make_head
from specverify.training.run import train
from specverify.training.states import batch_of
from specverify.training.target import Target
from tests.meta.training import targets

pytestmark = pytest.mark.filterwarnings("ignore::DeprecationWarning")


class Killed(Exception):
    """Stands for a kill."""


@pytest.fixture(scope="module")
def folder(tmp_path_factory: pytest.TempPathFactory) -> Path:
    return targets.make_folder(tmp_path_factory.mktemp("training"))


@pytest.fixture(autouse=True)
def _same_arithmetic(monkeypatch: pytest.MonkeyPatch) -> None:
    """Float32 on every machine, small trees, and a state at every step."""
    for module in (data, loop):
        monkeypatch.setattr(module, "quicker_dtype", lambda device: torch.float32)
    monkeypatch.setattr(data, "JUDGED_TOKENS", 24)
    monkeypatch.setattr(loop, "MEASURED", 0.0)
    for module in (loop, run):
        monkeypatch.setattr(module, "TREE", Expansion(3, 3, 7))
    monkeypatch.setattr(loop, "WRITE_EVERY_S", -1.0)


def losses(out: Path) -> list[float]:
    lines = [json.loads(line) for line in (out / "training" / "curve.jsonl").read_text().splitlines()]
    return [line["loss"] for line in lines if line["loss"] is not None]


def test_an_eagle1_head_begins_with_the_state_that_it_reads(folder: Path, tmp_path: Path) -> None:
    """Also where the target's last layer writes far more than the last norm leaves of it, as in SmolLM2."""
    target = Target(str(folder / "model"))
    for projection in (target.last_layer.self_attn.o_proj, target.last_layer.mlp.down_proj):
        projection.weight.data.mul_(1000)
    head = make_head(targets.plan(folder, "eagle1", tmp_path / "out"), target, None)
    assert isinstance(head, Eagle1Module)
    batch = batch_of(target.continue_prompts([[1, 2, 3, 4]], 8, head.reads), True)
    outputs, rows, _ = next(head.run(batch, 1))
    states = at_rows(batch.states, rows)
    assert (outputs - states).norm() < 0.2 * states.norm()


@pytest.mark.slow
def test_a_trained_head_accepts_more_than_an_untrained_one(folder: Path, tmp_path: Path) -> None:
    before = train(targets.plan(folder, "eagle3", tmp_path / "before", most_steps=1, rate=1e-9), quiet=True)
    after = train(targets.plan(folder, "eagle3", tmp_path / "after", most_steps=80, rate=1e-2), quiet=True)
    assert after["steps"] == 80
    assert after["tree"]["accepted"] > before["tree"]["accepted"] + 0.3
    assert after["chain"]["accepted"] > before["chain"]["accepted"] + 0.3
    assert losses(tmp_path / "after")


def test_the_loss_falls(folder: Path, tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(loop.Training, "measure", lambda self, losses, say: all_losses.extend(losses))
    monkeypatch.setattr(loop.Training, "write_state", lambda self, shards: None)
    monkeypatch.setattr(run, "figures", lambda training, data: {})
    all_losses: list[float] = []
    train(targets.plan(folder, "eagle3", tmp_path / "head", most_steps=30, steps=1, rate=1e-2), quiet=True)
    assert len(all_losses) == 30
    assert sum(all_losses[-5:]) < 0.8 * sum(all_losses[:5])


@pytest.mark.parametrize(
    "kind", [*(pytest.param(kind, marks=pytest.mark.slow) for kind in ("eagle3", "eagle1")), "medusa"]
)
def test_a_killed_training_goes_on_as_if_it_had_not_been(
    kind: str, folder: Path, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    whole_run = train(targets.plan(folder, kind, tmp_path / "whole", most_steps=8), quiet=True)
    original = loop.Training.write_state

    def kill_at_step(self: Any, shards: int) -> None:
        original(self, shards)
        if self.step == 5:
            raise Killed

    with monkeypatch.context() as patch:
        patch.setattr(loop.Training, "write_state", kill_at_step)
        with pytest.raises(Killed):
            train(targets.plan(folder, kind, tmp_path / "cut", most_steps=8), quiet=True)
    resumed = train(targets.plan(folder, kind, tmp_path / "cut", most_steps=8), quiet=True)
    assert (
        (resumed["steps"], resumed["learned"])
        == (whole_run["steps"], whole_run["learned"])
        == (8, whole_run["learned"])
    )
    resumed_state, whole_state = (
        load_file(tmp_path / name / "training" / "state.safetensors") for name in ("cut", "whole")
    )
    assert set(resumed_state) == set(whole_state)
    for name, tensor in resumed_state.items():
        assert torch.equal(tensor, whole_state[name]), name


@pytest.mark.parametrize("kind", ["eagle3", pytest.param("eagle1", marks=pytest.mark.slow), "medusa"])
def test_the_head_has_the_published_layout(kind: str, folder: Path, tmp_path: Path) -> None:
    train(targets.plan(folder, kind, tmp_path / "head", most_steps=2), quiet=True)
    tensors = load_file(tmp_path / "head" / "model.safetensors")
    config = json.loads((tmp_path / "head" / "config.json").read_text())
    hidden, vocabulary = targets.MODEL.architecture.hidden_size, targets.MODEL.vocab_size
    assert config["hidden_size"] == hidden
    assert config["vocab_size"] == vocabulary
    assert all(torch.isfinite(tensor).all() for tensor in tensors.values())
    if kind == "eagle3":
        named = torch.nonzero(tensors["t2d"])[:, 0]
        assert torch.equal(named, tensors["d2t"] + torch.arange(80))
        assert tensors["fc.weight"].shape == (hidden, 3 * hidden)
        assert tensors["midlayer.self_attn.q_proj.weight"].shape[1] == 2 * hidden
        assert config["draft_vocab_size"] == 80
        assert config["eagle_aux_hidden_state_layer_ids"] == [-1, 1, 2]
    elif kind == "eagle1":
        assert config["bias"] is True
        assert {"fc.weight", "fc.bias", "layers.0.post_attention_layernorm.weight"} <= set(tensors)
        assert "lm_head.weight" not in tensors
    else:
        assert config["medusa_num_heads"] == 4
        assert tensors["medusa_head.3.1.weight"].shape == (vocabulary, hidden)


@pytest.mark.parametrize(
    ("kind", "options"),
    [
        ("medusa", {}),
        ("medusa", {"heads": 1}),
        ("eagle3", {"layers": 2}),
        ("eagle1", {"layers": 3, "irope": True, "experts": 3, "experts_per_token": 2}),
        ("eagle1", {"layers": 2, "online": True}),
        pytest.param("eagle3", {}, marks=pytest.mark.slow),
        pytest.param("eagle1", {}, marks=pytest.mark.slow),
    ],
    ids=["medusa", "one-head", "two-layers", "experts-irope", "online", "eagle3", "eagle1"],
)
def test_a_head_is_measured_on_the_trees_that_a_user_has_and_opens_as_a_draft(
    kind: str, options: dict[str, Any], folder: Path, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    for module in (loop, run):
        monkeypatch.setattr(module, "TREE", acceptance.TREE)
    cache = tmp_path / "cache"  # heads of several layers read other states
    figures = train(targets.plan(folder, kind, tmp_path / "head", most_steps=1, cache=cache, **options), quiet=True)
    assert figures["tree"]["steps"] > 0
    words = open_head(str(tmp_path / "head"), identify(folder / "model")).words
    assert kind == words.TAG
    if isinstance(words, Eagle1):
        unrotated = (1,) if "irope" in options else ()
        assert (words.layers, words.unrotated) == (options.get("layers", 1), unrotated)
        assert (words.experts, words.experts_per_token) == (
            options.get("experts", 0),
            options.get("experts_per_token", 1),
        )


def test_the_end_that_a_user_asks_for_leaves_the_best_head(
    folder: Path, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    original = Eagle3Module.forward

    def interrupt_batch(self: Eagle3Module, batch: Any, steps: int) -> torch.Tensor:
        signal.raise_signal(signal.SIGINT)
        return original(self, batch, steps)

    monkeypatch.setattr(run, "rehearse", lambda plan, target: None)
    monkeypatch.setattr(Eagle3Module, "forward", interrupt_batch)
    result = train(targets.plan(folder, "eagle3", tmp_path / "head"), quiet=True)
    assert result["steps"] == 1
    assert (tmp_path / "head" / "model.safetensors").exists()
    assert np.isfinite(result["tree"]["accepted"])


@pytest.mark.slow
def test_a_training_that_is_killed_for_real_goes_on(folder: Path, tmp_path: Path) -> None:
    out = tmp_path / "head"
    command = [sys.executable, "-m", "specverify", "train", "eagle3", "--model", str(folder / "model")]
    command += ["--text", str(folder / "prompts.jsonl"), "--minutes", "60", "--out", str(out), "--generate", "20"]
    command += ["--vocabulary", "80", "--cache", str(tmp_path / "cache"), "--most-steps"]
    started = subprocess.Popen([*command, "1000000"], stderr=subprocess.DEVNULL)
    state = out / "training" / "state.safetensors"
    until = time.monotonic() + 240
    while not state.exists() and time.monotonic() < until:
        time.sleep(0.5)
    started.kill()
    started.wait()
    with safe_open(state, "pt") as content:
        steps = json.loads(content.metadata()["facts"])["step"]
    assert steps > 0
    assert load_file(out / "model.safetensors")
    ended = subprocess.run([*command, str(steps + 5)], capture_output=True, text=True, timeout=240)
    assert ended.returncode == 0, ended.stderr
    assert f"resumed at step {steps}" in ended.stderr
    assert f"{steps + 5} steps" in ended.stdout


@pytest.mark.slow
def test_two_processes_train_one_head(folder: Path, tmp_path: Path) -> None:
    out = tmp_path / "head"
    command = [sys.executable, "-m", "torch.distributed.run", "--nproc-per-node", "2", "-m", "specverify", "train"]
    command += ["eagle3", "--model", str(folder / "model"), "--text", str(folder / "prompts.jsonl"), "--minutes", "60"]
    command += ["--out", str(out), "--generate", "20", "--vocabulary", "80", "--cache", str(tmp_path / "cache")]
    ended = subprocess.run(
        [*command, "--most-steps", "6", "--threads", "1"],
        capture_output=True,
        text=True,
        timeout=400,
        env=dict(os.environ),
    )
    assert ended.returncode == 0, ended.stderr[-2000:]
    assert ended.stdout.count("eagle3 head in") == 1
    assert load_file(out / "model.safetensors")
