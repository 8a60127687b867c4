"""`bench growth` fills its grids and fits lines; no time itself is asserted."""

import json
from pathlib import Path

import pytest

from specverify.bench import growth
from specverify.bench.growth import line_through
from specverify.cli import main
from specverify.reports.pages.tables import grid
from tests.checkpoints import save_checkpoint


def test_a_line_tells_what_one_more_costs_and_how_straight_it_is() -> None:
    fit = line_through({1: 5.0, 2: 7.0, 4: 11.0})
    assert (fit["base_ms"], fit["each_ms"], fit["straight"]) == pytest.approx((3, 2, 1))
    bent = line_through({1: 1.0, 2: 4.0, 3: 1.0})
    assert bent["straight"] == pytest.approx(0)
    assert line_through({1: 5.0})["each_ms"] is None
    assert line_through({1: 5.0, 2: 5.0, 3: 5.0})["straight"] is None


def test_a_grid_leaves_out_what_was_not_measured() -> None:
    rows = [{"batch": 1, "nodes": 4, "ms": 1.0}, {"batch": 2, "nodes": 8, "ms": 2.5}]
    lines = [line.split() for line in grid("times", rows, "nodes", "batch").splitlines()]
    assert lines[-2:] == [["1", "1.0", "-"], ["2", "-", "2.5"]]


def test_every_size_is_timed(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]
) -> None:
    checkpoint, file = save_checkpoint("llama", tmp_path / "model"), tmp_path / "out.json"
    monkeypatch.setattr(growth, "Sizes", lambda nodes=(1, 4): forwards_sizes(nodes))
    with pytest.raises(SystemExit) as stopped:
        main(["bench", "growth", "--model", str(checkpoint), "--nodes", "1", "--nodes", "4", "--json", str(file)])
    assert not stopped.value.code
    assert max(map(len, capsys.readouterr().out.splitlines())) <= 80
    result = json.loads(file.read_text())
    assert [(row["nodes"], row["batch"]) for row in result["trees_by_batch"]] == [(1, 1), (4, 1), (1, 2), (4, 2)]
    assert [(row["prefix"], row["batch"]) for row in result["batches_by_prefix"]] == [(8, 1), (16, 1), (8, 2), (16, 2)]
    assert [row["vocabulary"] for row in result["vocabulary"]] == [4, 8, 16, 32]
    assert len(result["lines"]) == 2 + 2 + 2
    assert result["logits"]["ratio"] == pytest.approx(result["logits"]["all_ms"] / result["logits"]["last_ms"])


SIZES = growth.Sizes


def forwards_sizes(nodes: tuple[int, ...]) -> growth.Sizes:
    return SIZES(nodes, (1, 2), (8, 16))


def test_a_checkpoint_without_room_is_one_line(tmp_path: Path, capsys: pytest.CaptureFixture[str]) -> None:
    with pytest.raises(SystemExit) as stopped:
        main(["bench", "growth", "--model", str(save_checkpoint("llama", tmp_path / "model"))])
    assert stopped.value.code == 2
    assert "holds 256 positions, and 1060 are needed" in capsys.readouterr().err
