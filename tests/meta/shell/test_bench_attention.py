"""`bench attention`: every path that it times computes the same attention; one that is not here is said, not timed."""

import json
from dataclasses import replace
from pathlib import Path

import pytest
import torch

from specverify.bench import attention
from specverify.bench.attention import SETTINGS, _attended, measure, paths, scenes
from specverify.cli import main

SMALL = replace(SETTINGS["cpu"], prefixes=(16, 32), nodes=(5,), batches=(1, 2), dim=8)


def test_paths_compute_the_same() -> None:
    for _, scene in scenes(SMALL, "cpu"):
        outs = {name: _attended(one, scene) for name, one in paths("cpu").items() if not isinstance(one, str)}
        assert set(outs) == {"split", "sdpa", "flex"}
        for out in outs.values():
            torch.testing.assert_close(out, outs["sdpa"], atol=1e-5, rtol=1e-5)


def test_figures_are_ratios_of_one_run(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]
) -> None:
    monkeypatch.setitem(attention.SETTINGS, "cpu", SMALL)
    monkeypatch.setattr(attention, "REPETITIONS", 1)
    file = tmp_path / "out.json"
    with pytest.raises(SystemExit) as ended:
        main(["bench", "attention", "--json", str(file)])
    assert ended.value.code == 0
    out = capsys.readouterr().out
    assert "triton: not measured\n  on the CPU the kernel is only interpreted" in out
    assert max(map(len, out.splitlines())) <= 80
    figures = json.loads(file.read_text())
    places = {(row["batch"], row["prefix"], row["nodes"]) for row in figures["rows"]}
    assert places == {(batch, prefix, 5) for batch in (1, 2) for prefix in (16, 32)}
    for place in places:
        line = {row["path"]: row for row in figures["rows"] if (row["batch"], row["prefix"], row["nodes"]) == place}
        assert set(line) == {"split", "sdpa", "flex", "read"}
        for row in line.values():
            assert row["ratio"] == pytest.approx(row["us"] / line["sdpa"]["us"])
            assert row["over_read"] == pytest.approx(row["us"] / line["read"]["us"])


def test_a_device_that_is_not_here_is_one_line(capsys: pytest.CaptureFixture[str]) -> None:
    if torch.cuda.is_available():
        assert measure("cuda", 1)["rows"]
        return
    with pytest.raises(SystemExit) as ended:
        main(["bench", "attention", "--device", "cuda"])
    out, err = capsys.readouterr()
    assert (ended.value.code, out, err.count("\n")) == (3, "", 1)
    assert "bench attention --device cuda" in err
