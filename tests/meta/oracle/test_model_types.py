"""Plain transformers judges a model type or declines it in one line: never an internal error, for any type."""

from pathlib import Path

import pytest
import transformers
from transformers.models.auto.modeling_auto import MODEL_FOR_CAUSAL_LM_MAPPING_NAMES

from specverify.cli import main
from specverify.commands.families import TYPES_FILE, families
from specverify.reference.files.fields import read_json
from tests.inprocess import in_this_process
from tests.measure.model_types import answer, save_tiny_model
from tests.tiers import first

TABLE = read_json(TYPES_FILE)
NEW = (
    "gemma4_text", "gemma4", "gemma3n_text", "qwen3_5_text", "deepseek_v32", "glm_moe_dsa", "nemotron_h",
    "kimi_linear", "minimax_m2", "ernie4_5_moe", "mimo_v2_flash",
)  # fmt: skip
"""Types of which an earlier reference failed in other ways, or which are much asked for."""

KINDS = [*NEW, *(kind for kind, why in TABLE["types"].items() if kind not in NEW and why is not None)]


@pytest.mark.parametrize("kind", first(KINDS, len(NEW)))
def test_the_reference_judges_a_type_or_declines_it_with_its_reason(kind: str, tmp_path: Path) -> None:
    assert save_tiny_model(kind, tmp_path)
    assert answer(tmp_path) == TABLE["types"][kind]


def test_every_type_of_transformers_is_listed() -> None:
    if transformers.__version__ != TABLE["transformers"]:
        pytest.skip(f"the table is that of transformers {TABLE['transformers']}")
    assert set(TABLE["types"]) == set(MODEL_FOR_CAUSAL_LM_MAPPING_NAMES)
    listed = {kind for row in families() for kind in row["model_types"]}
    assert set(TABLE["types"]) <= listed


def test_the_list_says_what_judges_a_type_that_is_not_read() -> None:
    rows = {row["name"]: row["sentence"] for row in families()}
    assert rows["model_type cohere"].endswith("--against transformers judges it.")
    assert "--against transformers declines it: its layers do not call attention" in rows["model_type mamba"]
    assert "knows no such type" not in "".join(rows.values())


@pytest.mark.parametrize(
    ("kind", "code"), first([("gemma4_text", 0), ("mamba", 3), ("gemma3n_text", 0), ("minimax_m2", 0)], 2)
)
def test_the_command_ends_in_one_line_or_a_verdict(
    kind: str, code: int, tmp_path: Path, monkeypatch: pytest.MonkeyPatch, capfd: pytest.CaptureFixture[str]
) -> None:
    monkeypatch.chdir(tmp_path)
    in_this_process(monkeypatch)
    assert save_tiny_model(kind, tmp_path / "model")
    with pytest.raises(SystemExit) as ended:
        main(["diff", "--model", "model", "--against", "transformers", "--cases", "2", "--new-tokens", "3"])
    text = capfd.readouterr()
    assert ended.value.code == code, text
    lines = [line for line in text.err.splitlines() if line.startswith("specverify: ")]
    assert len(lines) == 1
    assert ("call attention" in lines[0]) == (code == 3)
