"""Cases on which a right engine was blamed, or broke, once: all invariants hold on them now."""

from pathlib import Path

import pytest

from specverify.backends.compositions import open_cpu
from specverify.properties.verdict.judge import judge
from specverify.reports import bundle
from specverify.setup.subjects import subject_of
from tests.corruption import BY_NAME, ORACLE

CASES = sorted((Path(__file__).resolve().parents[2] / "corpus" / "clean").glob("*.json"))


@pytest.mark.parametrize("file", CASES, ids=lambda file: file.stem)
def test_a_right_engine_is_right(file: Path) -> None:
    verdict = judge(bundle.load(file).case, tuple(BY_NAME.values()), ORACLE, subject_of(open_cpu()))
    assert not verdict.findings
    assert not verdict.internal
    assert "checked" in verdict.outcomes.values()
