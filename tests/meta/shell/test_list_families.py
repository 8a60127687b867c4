"""`specverify list families`: it names what a family reads and refuses, and where it runs."""

import json
from pathlib import Path

import pytest

from specverify.cli import main
from specverify.commands.families import families
from specverify.reference.family import FAMILIES
from specverify.reference.files.fields import UnreadableCheckpoint
from specverify.reference.oracle.configuration import read_architecture
from specverify.reference.oracle.family.unread import UNREAD


def test_every_family_says_what_it_reads_and_where_it_runs() -> None:
    rows = {row["name"]: row for row in families()}
    assert {*FAMILIES, *(f"model_type {kind}" for kind in UNREAD)} <= set(rows)
    assert rows["llama"]["tried"] == "builtin:smollm2"
    assert {"first_k_dense_replace", "partial_rotary_factor", "n_group"} <= set(rows["glm4_moe"]["honoured"])
    assert rows["gemma3"]["refused"]["attn_logit_softcapping"] == "null"
    assert rows["mistral"]["refused"]["partial_rotary_factor"] == "1"
    assert "sliding_window" in rows["qwen3"]["honoured"]
    assert {"cpu-eager", "cpu-split"} <= set(rows["gpt_oss"]["backends"])
    assert "cpu-fused" not in rows["gpt_oss"]["backends"]
    assert rows["model_type cohere"]["state"] == "not read"
    assert rows["model_type qwen3_5"]["state"] == "text model read"


def test_a_type_that_is_not_read_is_refused_with_its_reason(tmp_path: Path) -> None:
    (tmp_path / "config.json").write_text(json.dumps({"model_type": "cohere"}))
    with pytest.raises(UnreadableCheckpoint, match=r"'cohere', since its norms subtract the mean .* side by side"):
        read_architecture(tmp_path / "config.json")


@pytest.mark.parametrize("words", [["list", "families"], ["list", "families", "--json"]])
def test_the_command_prints_it(words: list[str], capsys: pytest.CaptureFixture[str]) -> None:
    with pytest.raises(SystemExit):
        main(words)
    text = capsys.readouterr().out
    assert "gpt_oss" in text
    assert "hunyuan_v1_dense" in text
