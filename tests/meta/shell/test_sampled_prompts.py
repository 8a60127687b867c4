"""Prompts that are sampled: options that make no sense are one line, and each prompt is drafted in three ways."""

import json
from pathlib import Path
from typing import Any

import click
import numpy as np
import pytest
import torch
from safetensors.torch import save_file

from specverify.checkpoints.cases import prepare
from specverify.commands.sampling_options import NAMES, sampling_of
from specverify.plan import Plan
from specverify.properties.verdict.finding import Verdict
from specverify.properties.verdict.judge import judge
from specverify.reference.architecture import Architecture
from specverify.reference.draft import LanguageModel, Ngram, Scripted
from specverify.reference.oracle.decoder import Oracle
from specverify.reference.rules import Rule
from specverify.reference.sampling import Sampling
from specverify.reference.weights import shapes
from specverify.setup.selection import invariants_matching
from specverify.setup.subjects import open_planted, subject_of
from tests.tiers import first

NONE: dict[str, Any] = dict.fromkeys(NAMES)


def test_options_become_settings() -> None:
    assert sampling_of(None, NONE) == sampling_of("m", NONE) == Sampling()
    options = NONE | {"temperature": 0.8, "top_k": 5, "top_p": 0.9, "rule": "specinfer"}
    assert sampling_of("m", options) == Sampling(
        0.8, top_k=5, top_p=0.9, rule=Rule("specinfer"), draws="with-replacement"
    )
    assert sampling_of("m", NONE | {"temperature": 1.0}).draws == "without-replacement"
    assert sampling_of("m", NONE | {"temperature": 1.0, "draws": "top-k"}).draws == "top-k"
    lossy = NONE | {"temperature": 1.0, "rule": "target-only", "draws": "with-replacement", "lossy": True}
    assert sampling_of("m", lossy).rule == Rule("target-only")
    assert sampling_of("m", NONE | {"temperature": 1.0, "rule": "typical"}).rule == Rule("typical")


@pytest.mark.parametrize(
    ("model", "options", "line"),
    [
        (None, {"temperature": 1.0}, "--temperature needs --model"),
        (None, {"draws": "top-k"}, "--draws needs --model"),
        ("m", {"top_k": 3}, "--top-k needs --temperature"),
        ("m", {"temperature": float("inf")}, "is not a temperature"),
        (
            "m",
            {"temperature": 1.0, "rule": "target-only", "draws": "with-replacement"},
            "is lossy for siblings drawn with-replacement: use --draws top-k or without-replacement, or --lossy",
        ),
        (
            "m",
            {"temperature": 1.0, "rule": "specinfer", "draws": "without-replacement"},
            "rule specinfer is lossy for siblings drawn without-replacement: use --draws top-k or with-replacement",
        ),
    ],
)
def test_what_makes_no_sense_is_one_line(model: str | None, options: dict[str, Any], line: str) -> None:
    with pytest.raises(click.UsageError, match=line):
        sampling_of(model, NONE | options)


def checkpoint(root: Path) -> str:
    """A tiny model as a checkpoint directory."""
    arch = Architecture("llama", 31, 8, 12, 2, 1, 4, (0, 0), max_positions=256)
    rng = np.random.default_rng(5)
    state = {name: torch.tensor(rng.normal(size=shape), dtype=torch.float32) for name, shape in shapes(arch).items()}
    config = {
        "model_type": "llama",
        "vocab_size": 31,
        "hidden_size": 8,
        "intermediate_size": 12,
        "num_hidden_layers": 2,
        "num_attention_heads": 2,
        "num_key_value_heads": 1,
        "max_position_embeddings": 256,
        "rms_norm_eps": 1e-5,
    }
    (root / "config.json").write_text(json.dumps(config))
    save_file(state, root / "model.safetensors", metadata={"format": "pt"})
    return str(root)


def verdicts_of(
    root: Path, fault: str | None, rule: str = "multi-round", draws: str = "without-replacement"
) -> list[Verdict]:
    """One prompt, 120 tokens, in three ways."""
    sampling = Sampling(2.0, rule=Rule(rule), draws=draws)
    plan = Plan(model=checkpoint(root), cases=1, new_tokens=120, sampling=sampling, dtypes=("float32",), seed=4)
    subject, oracle = subject_of(open_planted("cpu-eager", fault)), Oracle()
    agenda = prepare(plan, subject, invariants_matching(("lossless.distribution", "acceptance.sampled-walk")))
    assert agenda.total == 3
    return [judge(case, invariants, oracle, subject) for case, invariants in agenda.cases(oracle)]


@pytest.mark.parametrize("rule", first(["multi-round", "chain"], 1))
def test_a_prompt_is_sampled_in_three_ways(tmp_path: Path, rule: str) -> None:
    verdicts = verdicts_of(tmp_path, None, rule)
    assert [type(verdict.case.draft) for verdict in verdicts] == [Ngram, Scripted, LanguageModel]
    assert len({verdict.case.sampling.seed for verdict in verdicts}) == 3
    for verdict in verdicts:
        assert verdict.agreed
        assert set(verdict.outcomes.values()) == {"checked"}
        assert len(verdict.evidence) == 1
        assert verdict.evidence[0].rounds >= 120
    last_verdict = verdicts[-1]
    assert np.mean([length < 3 for length in last_verdict.accept_lengths]) > 0, "what it may not name is rejected"


@pytest.mark.parametrize(
    ("fault", "draws"),
    first(
        [
            ("soft-law-for-ranked-tokens", "top-k"),
            ("bonus-from-whole-law", "without-replacement"),
            ("residual-through-softmax", "without-replacement"),
        ],
        1,
    ),
)
def test_a_fault_is_seen_in_one_of_them(tmp_path: Path, fault: str, draws: str) -> None:
    verdicts = verdicts_of(tmp_path, fault, draws=draws)
    assert any(verdict.outcomes["lossless.distribution"] == "failed" for verdict in verdicts)
