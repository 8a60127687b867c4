"""Qwen3.5 is read as published: stacked experts, fields of gates and axes, and a run of `diff` that faults turn red."""

import json
from pathlib import Path
from typing import Any

import numpy as np
import pytest
from safetensors.torch import load_file, save_file

from specverify.cli import main
from specverify.reference.files.fields import UnreadableCheckpoint
from specverify.reference.oracle.checkpoint import identify, read_checkpoint
from specverify.reference.oracle.configuration import read_architecture
from tests.checkpoints import save_checkpoint
from tests.config_files import shrunk_config
from tests.inprocess import in_this_process
from tests.published import save_model as published
from tests.tiers import first

WEIGHTS = "model.safetensors"
EXPERTS = 4


def stack_experts(folder: Path) -> None:
    """Rewrite a checkpoint as Qwen publishes it: all experts of a layer in two tensors."""
    import torch

    state = load_file(folder / WEIGHTS)
    for layer in range(2):
        prefix = f"model.layers.{layer}.mlp.experts"
        parts = [
            torch.stack([state.pop(f"{prefix}.{expert}.{part}_proj.weight") for expert in range(EXPERTS)])
            for part in ("gate", "up", "down")
        ]
        state[f"{prefix}.gate_up_proj"] = torch.cat(parts[:2], dim=1)
        state[f"{prefix}.down_proj"] = parts[2]
    save_file(state, folder / WEIGHTS, metadata={"format": "pt"})


def test_experts_in_one_tensor_are_those_of_many(tmp_path: Path) -> None:
    folder = save_checkpoint("qwen3.5-moe", tmp_path)
    _, expected = read_checkpoint(folder)
    stack_experts(folder)
    _, state = read_checkpoint(folder)
    assert state.keys() == expected.keys()
    assert all(np.array_equal(state[name], expected[name]) for name in state)
    assert identify(folder).mixes_rows


def test_a_missing_tensor_is_missed_by_its_usual_name(tmp_path: Path) -> None:
    folder = save_checkpoint("qwen3.5-moe", tmp_path)
    state = load_file(folder / WEIGHTS)
    del state["model.layers.1.mlp.experts.3.up_proj.weight"]
    save_file(state, folder / WEIGHTS, metadata={"format": "pt"})
    with pytest.raises(UnreadableCheckpoint, match=r"tensor model\.layers\.1\.mlp\.experts\.3\.up_proj\.weight is"):
        read_checkpoint(folder)


@pytest.mark.parametrize(
    ("changed", "line"),
    [
        ({"attn_output_gate": False}, "attn_output_gate is false"),
        ({"output_gate_type": "sigmoid"}, "output_gate_type is 'sigmoid'"),
        ({"layer_types": ["full_attention", "linear_attention"]}, "attention in each so many layers the last"),
    ],
    ids=lambda value: next(iter(value)) if isinstance(value, dict) else "",
)
def test_what_is_not_computed_is_refused(changed: dict[str, Any], line: str, tmp_path: Path) -> None:
    (tmp_path / "config.json").write_text(json.dumps({**shrunk_config("qwen3.5-27b"), **changed}))
    with pytest.raises(UnreadableCheckpoint, match=line):
        read_architecture(tmp_path / "config.json")


FAULTS = (
    "recurrent-state-not-rolled-back", "recurrent-window-of-last-row", "recurrent-rows-scanned-in-order",
    "delta-key-heads-tiled", "delta-error-before-decay", "norm-shifted-twice", "attention-gate-left-out",
    "kv-truncated-not-gathered",
)  # fmt: skip


@pytest.mark.parametrize("fault", first((None, *FAULTS), 0))
def test_a_run_on_a_published_config_agrees_and_each_fault_turns_it_red(
    fault: str | None, tmp_path: Path, monkeypatch: pytest.MonkeyPatch, capfd: pytest.CaptureFixture[str]
) -> None:
    monkeypatch.chdir(tmp_path)
    in_this_process(monkeypatch)
    folder = published("qwen3.5-27b", tmp_path, 1)
    words = ["diff", "--model", folder.name, "--cases", "1", "--new-tokens", "6", "--jobs", "1"]
    with pytest.raises(SystemExit) as ended:
        main([*words, *(["--fault", fault] if fault else [])])
    text = capfd.readouterr()
    assert ended.value.code == (1 if fault else 0), text
    assert ("DIFFER" if fault else "AGREE") in text.out
