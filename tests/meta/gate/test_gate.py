"""The gate on the sample repository: green, red on a planted fault, and every reason for exit codes 2 and 3."""

from tests.meta.gate.conftest import Sample


def test_an_engine_without_a_fault_is_green(sample: Sample) -> None:
    assert sample("gate") == 0
    (run,) = sample.result()["runs"]
    assert (run["cases"], run["judged"], run["outcome"]) == (12, 12, "agree")
    assert run["invariants"]["lossless.greedy-match"]["checked"] > 0
    assert "AGREE  specverify gate" in sample.out


def test_a_planted_fault_is_red(sample: Sample) -> None:
    sample.plant("unverified")
    assert sample("gate") == 1
    assert "DIFFER" in sample.out
    assert sample.bundles()
