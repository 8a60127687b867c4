"""The forwards of every family are captured on the pretended device: none copies from the host, none waits."""

from collections.abc import Iterator

import numpy as np
import pytest

from specverify.backends.base import Unsupported
from specverify.backends.compositions import open_cpu
from specverify.properties.strategies.models import GALLERY
from specverify.reference.architecture import Seeded
from specverify.reference.case import Case
from specverify.reference.draft import Ngram
from specverify.reference.family import FAMILIES
from specverify.reference.layout import KvLayout
from specverify.reference.sampling import Stops
from specverify.reference.tree import RankTree
from tests.drawn_families import RARE, draw_architecture
from tests.pretended.backends import device_and_backends, open_pretended
from tests.pretended.ledger import Ledger
from tests.tiers import gated

ARCHITECTURES = {architecture.family: architecture for architecture in GALLERY} | {
    family: draw_architecture(family, 0) for family in RARE
}

PAIRS = [(family, dtype) for family in sorted(FAMILIES) for dtype in ("float32", "float64")]

QUICK = {("mixtral", "float32"), ("glm4_moe", "float64"), ("qwen2_vl", "float64")}
"""Experts, a router with a bias, rotary embedding of three axes, with float64 forms of norms."""


@pytest.fixture(scope="module")
def device() -> Iterator[Ledger]:
    with device_and_backends() as ledger:
        yield ledger


@pytest.mark.parametrize(("family", "dtype"), gated(PAIRS, lambda number: PAIRS[number] in QUICK))
def test_a_forward_of_the_family_is_captured(device: Ledger, family: str, dtype: str) -> None:
    model = Seeded(ARCHITECTURES[family], 0)
    draft = Ngram(RankTree((0, 0, 0, 1), (0, 1, 0, 0)), 2)
    case = Case(model, (1, 2, 1, 2, 1), draft, KvLayout(kind="static"), stops=Stops(5), dtype=dtype)
    subject = open_pretended("cuda-fused-graphs")
    device.clear()
    try:
        trace = subject.run(case)
    except (Unsupported, ValueError) as why:  # soft caps and sinks are beyond SDPA
        pytest.skip(f"{family} in {dtype}: {why}")
    refused = {why: count for why, count in trace.fallbacks.items() if "stream is capturing" in why}
    assert refused == {}
    assert device.count("aborted capture") == 0
    twin = open_cpu().run(case)
    assert trace.output == twin.output
    for step, twin_step in zip(trace.steps, twin.steps, strict=True):
        assert step.scored is not None
        assert twin_step.scored is not None
        np.testing.assert_allclose(step.scored.logits, twin_step.scored.logits, atol=1e-4)
