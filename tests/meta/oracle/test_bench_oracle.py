"""`bench oracle` times two computations of the same numbers, and says so if they are not the same."""

import json
from pathlib import Path

import pytest

from specverify.bench import oracle
from specverify.cli import main
from specverify.reference.tree import Tree


def test_both_sides_compute_the_same_trees(tmp_path: Path, capsys: pytest.CaptureFixture[str]) -> None:
    file = tmp_path / "out.json"
    with pytest.raises(SystemExit) as stopped:
        main(["bench", "oracle", "--nodes", "1", "--nodes", "9", "--json", str(file)])
    assert not stopped.value.code
    result = json.loads(file.read_text())
    assert [row["nodes"] for row in result["trees"]] == [1, 9]
    assert all(0 <= row["apart"] < 1e-4 for row in result["trees"])
    assert max(map(len, capsys.readouterr().out.splitlines())) <= 80


def test_another_tree_is_told(monkeypatch: pytest.MonkeyPatch) -> None:
    built = oracle._inputs

    def flat(tokens: tuple[int, ...], tree: Tree) -> dict[str, object]:
        inputs = built(tokens, tree)
        return inputs | {"position_ids": inputs["position_ids"] * 0}

    monkeypatch.setattr(oracle, "_inputs", flat)
    assert not oracle.measure(None, (9,), rounds=1)["same"]
