"""The HTML pages of benches: plots in SVG, words for each, and nothing but our own markup."""

from html.parser import HTMLParser
from typing import Any

import pytest

from specverify.reports.html.bench import bench_page
from specverify.reports.html.pictures.plot import BOTTOM, plot, stacked_bars


class Elements(HTMLParser):
    """The elements of a page, in order; it fails on a wrong nesting."""

    def __init__(self, page: bytes) -> None:
        super().__init__()
        self.tags: list[tuple[str, dict[str, str | None]]] = []
        self.open: list[str] = []
        self.feed(page.decode())
        assert self.open == []

    def handle_starttag(self, tag: str, attrs: list[tuple[str, str | None]]) -> None:
        self.tags.append((tag, dict(attrs)))
        self.open += [] if tag in ("meta", "br") else [tag]

    def handle_startendtag(self, tag: str, attrs: list[tuple[str, str | None]]) -> None:
        self.tags.append((tag, dict(attrs)))

    def handle_endtag(self, tag: str) -> None:
        assert self.open.pop() == tag

    def all(self, tag: str) -> list[dict[str, str | None]]:
        return [attributes for name, attributes in self.tags if name == tag]


def way(name: str, drafted: bool) -> dict[str, Any]:
    return {
        "way": name, "speed_up": {"mean": 1.5}, "accepted": {"mean": 0.5} if drafted else None,
        "by_depth": [0.5, 0.25] if drafted else [], "stages": {"verify": 0.75, "host": 0.25},
    }  # fmt: skip


CELLS = [
    {"nodes": nodes, "depth": depth, "speed_up": nodes / depth, "accepted": 0.5, "way": f"{nodes}x{depth}"}
    for depth in (1, 2)
    for nodes in (2, 4)
]
DECODED = {
    "facts": {"device": "cpu"},
    "ways": [way("target-only", False), way("<script>alert(1)</script>", True)],
    "grids": [{"draft": "<b>", "nodes": [2, 4], "depths": [1, 2], "cells": CELLS, "best": CELLS[1]}],
    "texts": [], "missing": ["shard 1 of 2 is missing"],
}  # fmt: skip
GROWN = {
    "facts": {},
    "trees_by_batch": [{"nodes": nodes, "prefix": 8, "batch": 1, "ms": 2.0 * nodes} for nodes in (1, 8)],
    "batches_by_prefix": [{"nodes": 4, "prefix": prefix, "batch": 2, "ms": 3.0} for prefix in (8, 16)],
    "vocabulary": [{"rows": 4, "vocabulary": 32, "ms": 1.0}],
}  # fmt: skip


@pytest.mark.parametrize(("what", "figures", "pictures"), [("decode", DECODED, 5), ("growth", GROWN, 3)])
def test_a_page_holds_plots_and_loads_nothing(what: str, figures: dict[str, Any], pictures: int) -> None:
    page = bench_page(what, figures, "0")
    read = Elements(page)
    drawn = read.all("svg")
    assert len(drawn) == pictures
    assert all(attributes["role"] == "img" and attributes["aria-labelledby"] for attributes in drawn)
    assert {"script", "link", "img", "iframe", "object", "b"} & {name for name, _ in read.tags} == set()
    assert not any(key.startswith("on") or key in ("src", "href") for _, attrs in read.tags for key in attrs)
    policy = next(meta for meta in read.all("meta") if meta.get("http-equiv") == "Content-Security-Policy")
    assert "default-src 'none'" in str(policy["content"])
    ids = [attrs["id"] for _, attrs in read.tags if "id" in attrs]
    assert len(set(ids)) == len(ids)


def test_the_best_budget_and_a_missing_shard_stand_on_the_page() -> None:
    page = bench_page("decode", DECODED, "0").decode()
    assert "4 nodes in 1 level, 4.00 times the target alone" in page
    assert "shard 1 of 2 is missing" in page


def test_points_lie_where_their_numbers_say() -> None:
    drawn_plot = plot("t", "x", "y", {"a": [(2, 4.0), (1, 0.0)], "b": []}, level=2.0)
    assert drawn_plot is not None
    (line,) = drawn_plot.lines
    (left_x, low, _), (right_x, high, words) = line.points
    assert (low, left_x < right_x, words) == (BOTTOM, True, "a: 4 at 2")
    assert drawn_plot.level == pytest.approx((low + high) / 2, abs=0.1)
    assert [text for _, text in drawn_plot.marks_y][:2] == ["0", "2"]
    assert plot("t", "x", "y", {"a": []}) is None


def test_parts_of_a_whole_fill_their_shares() -> None:
    (bar,) = stacked_bars({"way": {"verify": 0.75, "host": 0.25}})
    assert [(part.x, part.width) for part in bar.parts] == [(0, 225), (225, 75)]
