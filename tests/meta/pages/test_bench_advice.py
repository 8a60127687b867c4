"""Each bench ends with the sentence that its own figures ask for."""

from typing import Any

import pytest

from specverify.reports.pages import bench_advice as advice


def attention_rows(ratios: dict[str, dict[int, float]]) -> dict[str, Any]:
    rows = [
        {"path": path, "prefix": prefix, "batch": 1, "nodes": 8, "ratio": ratio}
        for path, by_prefix in ratios.items()
        for prefix, ratio in by_prefix.items()
    ]
    return {"rows": rows}


def test_a_way_pays_from_the_prefix_behind_its_last_loss() -> None:
    figures = attention_rows(
        {
            "sdpa": {128: 1.0, 1024: 1.0},
            "split": {128: 0.9, 512: 1.2, 1024: 0.8},
            "words": {128: 1.5, 1024: 1.0},
        }
    )
    assert advice.attention_advice(figures) == (
        "advice: split pays from 1,024 columns; words does not pay at 1,024 columns\n"
    )


def test_the_longest_prefix_decides_between_layouts() -> None:
    row = {"page_size": 0, "accepted": 1, "commit_ratio": 1.0}
    rows = [
        {**row, "layout": "branch", "prefix": 128, "verify_us": 1.0},
        {**row, "layout": "branch", "prefix": 4096, "verify_us": 9.0, "commit_ratio": 30.0},
        {**row, "layout": "paged", "page_size": 16, "prefix": 4096, "verify_us": 8.0, "commit_ratio": 1.2},
    ]
    words = " ".join(advice.kv_advice({"rows": rows}).split())
    assert words == (
        "advice: at 4,096 columns paged with pages of 16 verifies in the least time; the commits of paged with pages of"
        " 16 grow least, to 1.2 times"
    )


@pytest.mark.parametrize(
    ("straight", "words"),
    [
        (0.01, "advice: the times lie on no line (R² below 0.9); time more steps on a quiet machine"),
        (None, "advice: the times lie on no line (R² below 0.9); time more steps on a quiet machine"),
        (0.97, "advice: one more of nodes adds 0.50 ms at batch 1, 5.0% of a forward"),
    ],
)
def test_a_slope_is_named_only_where_the_times_lie_on_a_line(straight: float | None, words: str) -> None:
    line = {"by": "nodes", "at": "batch 1", "base_ms": 10.0, "each_ms": 0.5, "straight": straight}
    assert " ".join(advice.growth_advice({"lines": [line]}).split()) == words


def way(name: str, speed_up: float, accepted: float | None, break_even: float | None) -> dict[str, Any]:
    return {
        "way": name,
        "speed_up": {"mean": speed_up},
        "accepted": None if accepted is None else {"mean": accepted},
        "break_even": break_even,
    }


def test_a_draft_pays_or_is_told_how_far_it_is_from_it() -> None:
    ways = [way("target", 1.0, None, None), way("ngram", 1.3, 1.4, 0.8), way("head", 0.7, 0.5, 1.25)]
    words = " ".join(advice.decode_advice({"ways": ways}).split())
    assert words == (
        "advice: ngram pays; head does not pay: it accepts 0.50 tokens per step, and its cost asks for 1.25"
    )
    assert advice.decode_advice({"ways": ways[:1]}) == ""


def test_throughput_and_oracle_say_where_the_time_goes() -> None:
    assert "80% of the time goes to the backend" in advice.throughput_advice({"overhead": 1.25})
    assert "60% of the time goes to drawing and judging" in advice.throughput_advice({"overhead": 2.5})
    trees = [{"nodes": 1, "ratio": 3.0}, {"nodes": 64, "ratio": 0.8}]
    assert "on 64 nodes the oracle takes less time" in advice.oracle_advice({"trees": trees})
