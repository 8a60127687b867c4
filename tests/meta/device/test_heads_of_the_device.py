"""Heads on the pretended device: all that they compute with lies there, and their texts are those of the CPU."""

from collections.abc import Iterator
from dataclasses import replace

import pytest

from specverify.backends.compositions import open_cpu
from specverify.backends.engine.draft.base import HEADS
from specverify.properties.strategies import cases
from specverify.properties.strategies.settings import explore, without_local_constants
from specverify.reference.case import Case
from tests.meta.engine.test_model_device import tensors_within
from tests.pretended.backends import device_and_backends, open_pretended
from tests.pretended.ledger import Ledger

DRAWN = 3
"""Cases of each kind of head."""


@pytest.fixture(scope="module")
def device() -> Iterator[Ledger]:
    with device_and_backends() as ledger:
        yield ledger


@pytest.mark.slow
@pytest.mark.parametrize("tag", sorted(HEADS))
def test_a_head_lies_on_its_device(tag: str, device: Ledger) -> None:
    subject, twin = open_pretended("cuda-eager"), open_cpu()
    drawn: dict[Case, None] = {}
    within = replace(subject.declaration, drafts=(tag,), sessions=False)
    with without_local_constants():
        explore(5, DRAWN, cases(("float32", "float64"), within=within), lambda case: drawn.setdefault(case))
    assert {case.draft.TAG for case in drawn} == {tag}
    for case in drawn:
        assert subject.run(case).output == twin.run(case).output
        head = subject.models.head(case, HEADS[tag])
        tensors = [tensor for value in vars(head).values() for tensor in tensors_within(value)]
        assert tensors
        assert {tensor.device.type for tensor in tensors} == {"cuda"}
