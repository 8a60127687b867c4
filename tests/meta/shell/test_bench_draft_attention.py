"""`bench draft-attention` counts where rows that draft look, by distances worked out by hand."""

import json
from pathlib import Path

import pytest
import torch

from specverify.backends.engine.attention.eager import eager
from specverify.backends.engine.columns import AttentionInputs
from specverify.bench.draft_attention import (
    FIRST,
    Buckets,
    WatchedAttention,
    distances_of,
    rows_that_draft,
)
from tests.checkpoints import readable
from tests.inprocess import exit_code_of

FAR = torch.iinfo(torch.int64).max

TREE_MASK = torch.tensor([
    [1, 1, 1, 1, 0, 0, 0],
    [1, 1, 1, 0, 1, 0, 0],
    [1, 1, 1, 1, 0, 1, 0],
    [1, 1, 1, 0, 1, 0, 1],
], dtype=torch.bool)  # fmt: skip
"""Three committed tokens; two nodes of one level, and a child of each."""


def test_a_row_stands_behind_its_ancestors_and_a_column_where_its_token_is() -> None:
    assert distances_of(TREE_MASK, 3).tolist() == [
        [3, 2, 1, 0, FAR, FAR, FAR],
        [3, 2, 1, FAR, 0, FAR, FAR],
        [4, 3, 2, 1, FAR, 0, FAR],
        [4, 3, 2, FAR, 1, FAR, 0],
    ]
    # A window hides the first tokens; the others stay where they are.
    narrow = TREE_MASK.clone()
    narrow[:, 0] = False
    assert distances_of(narrow, 3)[2].tolist() == [FAR, 3, 2, 1, FAR, 0, FAR]


def test_committed_tokens_are_drafted_from_the_last_of_them_alone() -> None:
    appended = torch.ones(3, 5, dtype=torch.bool).tril(2)
    assert rows_that_draft(appended, 2) == [2]
    assert rows_that_draft(TREE_MASK[:2, :5], 3) == [0, 1]  # a first level
    assert rows_that_draft(TREE_MASK[2:], 3) == [0, 1]  # a level below another
    assert rows_that_draft(torch.ones(1, 4, dtype=torch.bool), 3) == [0]


def attention(weights: list[float]) -> tuple[torch.Tensor, AttentionInputs]:
    """One row and one head whose weights over the columns are these."""
    columns = len(weights)
    key = torch.tensor(weights).log().view(1, 1, columns, 1)
    visible = torch.ones(1, 1, 1, columns, dtype=torch.bool)
    prefix = torch.tensor([columns - 1])
    inputs = AttentionInputs(key, torch.ones_like(key), visible, prefix, None, lambda reason: None)
    return torch.ones(1, 1, 1, 1), inputs


def test_largest_and_all_weights_fall_into_the_bucket_of_their_distance() -> None:
    # Columns 0 to 5; the row is column 5. Distances 5 (the first token), 4, 3, 2, 1, 0.
    query, inputs = attention([0.3, 0.1, 0.35, 0.05, 0.1, 0.1])
    watched = WatchedAttention(eager, Buckets.empty((2, 4)))
    assert torch.equal(watched(query, inputs, 1.0), eager(query, inputs, 1.0))  # the draft itself is not changed
    figures = {row["bucket"]: row for row in watched.buckets.figures()}
    assert list(figures) == ["0-1", "2-3", "4 and more", FIRST]
    assert [figures[name]["mass"] for name in figures] == pytest.approx([0.2, 0.4, 0.1, 0.3])
    assert [figures[name]["top1"] for name in figures] == [0, 1, 0, 0]
    assert [figures[name]["columns"] for name in figures] == pytest.approx([2 / 6, 2 / 6, 1 / 6, 1 / 6])
    query, inputs = attention([0.1, 0.5, 0.1, 0.1, 0.1, 0.1])
    watched(query, inputs, 1.0)
    assert [row["top1"] for row in watched.buckets.figures()] == [0, 0.5, 0.5, 0]


def test_a_draft_is_measured_as_a_user_measures_it(tmp_path: Path, capsys: pytest.CaptureFixture[str]) -> None:
    checkpoint = readable("llama", tmp_path)
    file, page = tmp_path / "out.json", tmp_path / "out.html"
    arguments = ("--model", checkpoint, "--draft", f"model:{checkpoint}", "--new-tokens", 4, "--cases", 2)
    options = ("--prompt-length", "12,40", "--buckets", "4,16", "--threads", 1, "--json", file, "--html", page)
    assert exit_code_of("bench", "draft-attention", *arguments, *options) == 0
    out = capsys.readouterr().out
    assert max(map(len, out.splitlines())) <= 80
    result = json.loads(file.read_text())
    assert [(row["length"], row["bucket"]) for row in result["rows"]] == [
        (length, bucket) for length in (12, 40) for bucket in ("0-3", "4-15", "16 and more", FIRST)
    ]
    for length in (12, 40):
        rows = [row for row in result["rows"] if row["length"] == length]
        assert all(sum(row[name] for row in rows) == pytest.approx(1) for name in ("top1", "mass", "columns"))
    # After 12 tokens hardly any column lies so far back; after 40 most do.
    far = {row["length"]: row["columns"] for row in result["rows"] if row["bucket"] == "16 and more"}
    assert far[12] < 0.2 < 0.4 < far[40]
    assert page.read_text().count("<svg") >= 2


WRONG = {
    ("--draft", "ngram"): "ngram attends to nothing",
    ("--draft", "model:nowhere"): "nowhere",
    ("--draft", "ngram", "--buckets", "9,3"): "numbers from 1 on, ascending",
}


@pytest.mark.parametrize("options", WRONG, ids=" ".join)
def test_wrong_options_are_one_line(
    options: tuple[str, ...], tmp_path: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    assert exit_code_of("bench", "draft-attention", "--model", readable("llama", tmp_path), *options) == 2
    assert WRONG[options] in " ".join(capsys.readouterr().err.split())
