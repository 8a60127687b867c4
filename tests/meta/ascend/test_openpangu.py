"""openPangu-Embedded, from a checkpoint directory of its own architecture: oracle, engine and the Ascend backends."""

import json
import re
from pathlib import Path
from typing import Any

import numpy as np
import pytest
import torch
from safetensors.torch import save_file

from specverify.checkpoints.cases import prepare
from specverify.cli import main
from specverify.plan import Plan
from specverify.properties.invariants import ALL
from specverify.properties.verdict.finding import Verdict
from specverify.properties.verdict.judge import judge
from specverify.reference.architecture import Architecture, Rope
from specverify.reference.oracle.decoder import Oracle
from specverify.reference.weights import shapes
from specverify.setup.subjects import open_planted, subject_of

VOCABULARY = 61
ARCH = Architecture(
    "pangu", VOCABULARY, 64, 48, 4, 2, 16, (0, 0), Rope(theta=16e6), max_positions=256, qkv_bias=True, output_bias=True
)
CONFIG: dict[str, Any] = {
    "architectures": ["PanguEmbeddedForCausalLM"],
    "auto_map": {"AutoModelForCausalLM": "modeling_openpangu_dense.PanguEmbeddedForCausalLM"},
    "model_type": "PanguEmbedded",
    "bias": True,
    "bos_token_id": 1,
    "eos_token_id": 60,
    "pad_token_id": 0,
    "hidden_act": "silu",
    "hidden_size": 64,
    "intermediate_size": 48,
    "num_hidden_layers": 2,
    "num_attention_heads": 4,
    "num_key_value_heads": 2,
    "head_dim": 16,
    "max_position_embeddings": 256,
    "rms_norm_eps": 1e-5,
    "rope_theta": 16000000.0,
    "tie_word_embeddings": False,
    "torch_dtype": "bfloat16",
    "use_cache": True,
    "vocab_size": VOCABULARY,
}
"""The fields of the published 7B config.json, the sizes of a toy; attention as it is there: two queries per KV head."""


def checkpoint(root: Path, **changes: Any) -> str:
    """A directory with config.json, weights in bfloat16, and code that must never run."""
    rng = np.random.default_rng(3)
    state = {
        name: torch.tensor(1.0 + 0.1 * rng.normal(size=shape) if "norm" in name else 0.125 * rng.normal(size=shape)).to(
            torch.bfloat16
        )
        for name, shape in shapes(ARCH).items()
    }
    config = {name: value for name, value in {**CONFIG, **changes}.items() if value is not None}
    (root / "config.json").write_text(json.dumps(config))
    (root / "modeling_openpangu_dense.py").write_text("raise SystemExit('code of a checkpoint was run')\n")
    save_file(state, root / "model.safetensors", metadata={"format": "pt"})
    return str(root)


def verdicts_of(model: str, backend: str, dtype: str) -> list[Verdict]:
    """One prompt of drawn tokens, in three ways."""
    plan = Plan(backend=backend, model=model, cases=1, new_tokens=8, dtypes=(dtype,), seed=1)
    oracle, subject = Oracle(), subject_of(open_planted(backend, None))
    return [judge(case, invariants, oracle, subject) for case, invariants in prepare(plan, subject, ALL).cases(oracle)]


def test_the_weights_have_the_architectures_names(tmp_path: Path) -> None:
    names = {name.split(".", 3)[-1] for name in shapes(ARCH) if name.startswith("model.layers.0.")}
    assert {f"self_attn.{letter}_proj.bias" for letter in "qkvo"} <= names
    assert not any(re.match(r"mlp\..*bias", name) for name in names)


@pytest.mark.parametrize(
    ("name", "dtype"),
    [
        ("cpu-eager", "float32"),
        ("ascend-eager-emulated", "float32"),
        ("ascend-eager-emulated", "bfloat16"),
        ("ascend-fused-emulated", "float32"),
        ("ascend-fused-emulated", "bfloat16"),
        ("ascend-fused-atb-emulated", "bfloat16"),
    ],
)
def test_it_is_verified_end_to_end(tmp_path: Path, name: str, dtype: str) -> None:
    verdicts = verdicts_of(checkpoint(tmp_path), name, dtype)
    assert len(verdicts) == 3
    assert [(verdict.first.invariant, verdict.first) for verdict in verdicts if verdict.first is not None] == []
    assert all("checked" in verdict.outcomes.values() for verdict in verdicts)


@pytest.mark.parametrize("left_out", ["rope_theta", "rms_norm_eps", "bias"])
def test_what_its_config_leaves_out_means_the_same_to_oracle_and_engine(tmp_path: Path, left_out: str) -> None:
    (first, *_) = verdicts_of(checkpoint(tmp_path, **{left_out: None}), "cpu-eager", "float32")
    assert first.agreed


def test_biases_are_used(tmp_path: Path) -> None:
    """Without them the very weights give another output: nothing of the above would notice a bias that nobody adds."""
    outputs = set()
    for bias in (True, False):
        root = tmp_path / str(bias)
        root.mkdir()
        model = checkpoint(root, bias=bias)
        if not bias:
            state = {name: value for name, value in _weights(root).items() if not name.endswith("_proj.bias")}
            save_file(state, root / "model.safetensors", metadata={"format": "pt"})
        (first, *_) = verdicts_of(model, "cpu-eager", "float32")
        assert first.agreed
        assert first.trace is not None
        outputs.add(first.trace.output)
    assert len(outputs) == 2


def _weights(root: Path) -> dict[str, torch.Tensor]:
    from safetensors.torch import load_file

    return load_file(root / "model.safetensors")


@pytest.mark.slow
def test_diff_runs_it_and_says_emulated(tmp_path: Path, capfd: pytest.CaptureFixture[str]) -> None:
    model = checkpoint(tmp_path)
    command = ["diff", "--backend", "ascend-fused-emulated", "--model", model, "--cases", "1", "--new-tokens", "6"]
    with pytest.raises(SystemExit) as ended:
        main([*command, "--report", str(tmp_path / "r"), "--json", str(tmp_path / "j.json")])
    assert ended.value.code == 0
    result = json.loads((tmp_path / "j.json").read_text())
    assert result["emulated"] is True
    assert result["environment"]["mode"] == "performance"
    assert "EMULATED, no hardware was judged" in capfd.readouterr().out
