"""A layer that reads the columns of another keeps none: Ascend's paged caches write nothing for it."""

from dataclasses import replace
from pathlib import Path

import pytest

from specverify.backends.registry import open_backend
from specverify.properties.invariants import ALL
from specverify.properties.verdict.judge import judge
from specverify.reference.oracle.decoder import Oracle
from specverify.reports import bundle
from specverify.setup.subjects import subject_of

CASE = bundle.load(
    Path(__file__).resolve().parents[2] / "corpus" / "clean" / "layer-without-columns-on-pages.json"
).case


@pytest.mark.parametrize(
    ("name", "dtype"), [("ascend-fused-emulated", "float32"), ("ascend-fused-atb-emulated", "float16")]
)
def test_a_layer_without_columns_is_written_nothing(name: str, dtype: str) -> None:
    verdict = judge(replace(CASE, dtype=dtype), ALL, Oracle(), subject_of(open_backend(name)))
    assert verdict.unsupported is None
    assert not verdict.findings
    assert verdict.outcomes["attention.context-exact"] == "checked"
