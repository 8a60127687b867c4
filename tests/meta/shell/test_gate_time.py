"""The estimate of the time of a gate on a large checkpoint: what each factor does, and that its page names them all."""

from dataclasses import replace

import pytest

from tests.measure.gate_time import H100, LARGE, NARROW, PARTS, Card, Count, _factor_rows, _seconds
from tests.measure.pages import gate_time_table

LONG = Count(
    True, steps=10, engine_forwards=12, engine_s=0.001, reference_passes=10, reference_rows=200, reference_s=0.001,
    head_rows=100, head_s=0.1, judge_s=0.5,
)  # fmt: skip
FACTORS = {
    "torch_layer_s": 0.4, "numpy_layer_s": 2.0, "digest_bytes_per_s": 1e9, "host_flops": 5e10, "share": 0.5,
    "accepted": 1.0, "steps": 64.0,
}  # fmt: skip


def seconds(counts: list[Count], card: Card = H100, accepted: float = 1.0, **factors: float) -> dict[str, float]:
    return _seconds(counts, {**FACTORS, **factors}, 128, accepted, card, LARGE)


def test_the_sizes_are_those_of_the_published_model() -> None:
    assert LARGE.layer_weights == pytest.approx(218.1e6, rel=1e-3)
    assert LARGE.weights == pytest.approx(8.03e9, rel=1e-3)


def test_each_part_follows_its_factor() -> None:
    parts = seconds([LONG])
    # 64 steps of 128 tokens: 6.4 times what was measured.
    assert parts["engine"] == pytest.approx(6.4 * 12 * 2 * LARGE.weights / (3.35e12 * 0.5))
    assert parts["head"] == pytest.approx(6.4 * 100 * 2 * LARGE.vocabulary * LARGE.hidden / (5e10 * 0.5))
    assert parts["judge"] == pytest.approx(6.4 * 0.5 * LARGE.vocabulary / NARROW.vocabulary)
    assert parts["certificate"] == pytest.approx(2 * 36.8 * 2.0 / 3, rel=1e-2)
    slower = seconds([LONG], replace(H100, bytes_per_s=H100.bytes_per_s / 2, float64_flops=H100.float64_flops / 2))
    for part in ("engine", "reference"):
        assert slower[part] == pytest.approx(2 * parts[part])
    assert seconds([LONG], accepted=3.0)["judge"] == pytest.approx(parts["judge"] / 2)


def test_a_close_case_does_not_grow_with_the_text_and_launches_bound_a_forward() -> None:
    close = replace(LONG, grows=False)
    assert seconds([close])["judge"] == pytest.approx(0.5 * LARGE.vocabulary / NARROW.vocabulary)
    launched = seconds([replace(close, engine_s=100.0)])
    assert launched["engine"] == pytest.approx(100.0 * LARGE.layers / NARROW.layers)


def test_the_page_names_every_part_and_factor() -> None:
    rows = _factor_rows(FACTORS, H100, LARGE)
    kinds = {"greedy": dict.fromkeys(PARTS, 1.0), "sampled": dict.fromkeys(PARTS, 2.0)}
    figures = {"card": "H100", "prompts": 50, "tokens": 128, "factors": rows, "kinds": kinds, "minutes": 15.0}
    page = gate_time_table(figures)
    for part in PARTS:
        assert part in page
    words = set(page.split())
    assert all(set(row["name"].split()) <= words for row in rows)
    assert all(row["source"] for row in rows)
