"""`bench kv` times what it says, and its table fits; no time itself is asserted."""

import json
from typing import Any

import pytest
from torch import Tensor

from specverify.backends.engine.kv.base import KvCache
from specverify.bench import kv
from specverify.bench.kv import ACCEPTED, PREFIXES, ROWS, Cell, cells, measure
from specverify.cli import main
from specverify.reference.layout import KINDS
from specverify.reports.pages.tables import kv_table


def fixed_time(cache: KvCache, cell: Cell, keys: Tensor) -> tuple[float, float]:
    """A step that takes as many seconds as the cell has columns, or accepted rows, and leaves all as it was."""
    assert cache.length == cell.prefix
    kv._step(cache, cell, keys)
    assert (cache.length, cache.rows) == (cell.prefix, 0)
    return float(cell.prefix), float(cell.accepted)


@pytest.fixture(autouse=True)
def short(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(kv, "PREFIXES", (128, 300))


@pytest.mark.slow
def test_every_layout_is_measured_at_every_prefix_page_and_accepted_length() -> None:
    figures = measure(None, 2, fixed_time)
    names = {row["layout"] for row in figures["rows"]}
    assert names == {"branch path", "branch fast", "branch length", *set(KINDS) - {"branch"}}
    assert {row["page_size"] for row in figures["rows"] if row["layout"] == "paged"} == {1, 16, 128}
    assert {(row["prefix"], row["accepted"]) for row in figures["rows"]} == {
        (prefix, accepted) for prefix in (128, 300) for accepted in ACCEPTED
    }
    for row in figures["rows"]:
        assert row["verify_ratio"] == row["prefix"] / 128
        assert row["commit_ratio"] == 1.0
        assert row["commit_us"] == row["accepted"] * 1e6
    page = kv_table(figures)
    assert all(len(line) <= 80 for line in page.splitlines())
    assert "branch fast" in page


def test_the_cells() -> None:
    assert PREFIXES == (128, 512, 2048, 8192)
    assert all(cell.layout.kind == "static" for cell in cells("static"))
    assert len(list(cells("paged"))) == 3 * 2 * 3
    assert max(ACCEPTED) < ROWS


def test_the_command(capfd: pytest.CaptureFixture[str], monkeypatch: pytest.MonkeyPatch) -> None:
    def ended(*arguments: str) -> Any:
        with pytest.raises(SystemExit) as end:
            main(["bench", *arguments])
        return end.value.code, *capfd.readouterr()

    monkeypatch.setattr(kv, "REPETITIONS", 1)
    code, out, err = ended("kv", "--layout", "static", "--json", "-")
    assert code == 0
    assert {row["layout"] for row in json.loads(out)["rows"]} == {"static"}
    assert "bench kv: " in err
    assert ended("kv", "--layout", "nope")[:2] == (2, "")
    assert ended("throughput", "--layout", "static") == (2, "", "specverify: --layout is for bench kv and decode\n")
