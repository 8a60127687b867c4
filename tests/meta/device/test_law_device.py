"""A device without float64: laws are computed on the host, no float64 reaches the device, and cases agree."""

from collections.abc import Iterator
from dataclasses import replace

import numpy as np
import pytest
import torch
from torch import Tensor

from specverify.backends.compositions import open_cpu
from specverify.backends.engine import law_device as asked
from specverify.backends.engine.law_device import law_device, why_no_float64
from specverify.backends.engine.sampling import step as sampled_step
from specverify.conformance.drawn import judge_all
from specverify.pytest_plugin import BackendUnderTest
from specverify.reference.case import Case
from specverify.reference.probability_world import World
from specverify.reference.sampling import Sampling
from specverify.reference.tape import stride
from specverify.reference.tree import RankTree
from tests.meta.device.test_host_waits import PATHS
from tests.pretended.backends import device_and_backends, open_pretended
from tests.pretended.install import pretended_device
from tests.pretended.ledger import Ledger
from tests.pretended.tensor import NoFloat64
from tests.tiers import each

HOST = torch.device("cpu")
DEVICE = torch.device("cuda", 0)


@pytest.fixture
def device() -> Iterator[Ledger]:
    with device_and_backends(float64=False) as ledger:
        yield ledger


def test_a_device_is_asked_once_and_keeps_its_laws_if_it_computes_them() -> None:
    with pretended_device():
        assert why_no_float64(DEVICE) is None
        assert law_device(DEVICE) == DEVICE
    with pretended_device(float64=False):
        assert "not implemented for DT_DOUBLE" in str(why_no_float64(DEVICE))
        assert law_device(DEVICE) == HOST
        with pytest.raises(NoFloat64):
            torch.zeros(1, device="cuda").double()
    assert why_no_float64(HOST) is None


def test_a_device_that_rounds_float64_in_silence_declines_it(monkeypatch: pytest.MonkeyPatch) -> None:
    right = asked.laws_of

    def round_laws(logits: Tensor) -> list[Tensor]:
        laws = right(logits)
        return [law.float().to(law.dtype) for law in laws] if logits.is_cuda else laws

    with pretended_device():
        monkeypatch.setattr(asked, "laws_of", round_laws)
        assert why_no_float64(DEVICE) == "float64: the device's numbers are not those of float64"


PROCESSED = Sampling(temperature=0.7, top_k=5, top_p=0.9, repetition_penalty=1.2, bad_words=((3,),), seed=5)


@pytest.mark.parametrize(
    "case",
    each(
        [
            PATHS["sampled"],
            PATHS["sampled model"],
            replace(PATHS["model"], sampling=PROCESSED),
            replace(PATHS["ngram"], sampling=replace(PROCESSED, temperature=0.0, top_k=0, top_p=1.0)),
            PATHS["head"],
        ],
        2,
    ),
    ids=["sampled", "sampled-model", "processed-model", "processed-greedy", "head"],
)
def test_generations_are_those_of_the_cpu(case: Case, device: Ledger) -> None:
    subject = open_pretended("cuda-eager")
    assert subject.declaration.dtypes == ("float32", "bfloat16", "float16")
    trace, twin = subject.run(case), open_cpu().run(case)
    assert trace.output == twin.output
    for step, twin_step in zip(trace.steps, twin.steps, strict=True):
        assert step.accepted is not None
        assert twin_step.accepted is not None
        assert step.accepted.coins == twin_step.accepted.coins


def test_laws_on_the_device_itself_would_be_refused(device: Ledger, monkeypatch: pytest.MonkeyPatch) -> None:
    subject = open_pretended("cuda-eager")
    monkeypatch.setattr(sampled_step, "law_device", lambda device: device)
    with pytest.raises(Exception, match="not implemented for DT_DOUBLE"):
        subject.run(PATHS["sampled"])


def test_exact_laws_are_those_of_the_cpu(device: Ledger) -> None:
    shape = RankTree((0, 0, 0, 1), (0, 1, 0, 0))
    generator = np.random.default_rng(1)
    world = World(
        shape,
        generator.normal(size=(5, 5)),
        generator.normal(size=(1, 5, 5)),
        Sampling(temperature=1.0),
        dtype="float64",
    )
    tape = generator.random((40, stride(len(shape))))
    observed, expected = open_pretended("cuda-eager").rounds(world, tape), open_cpu().rounds(world, tape)
    for name in ("path", "tokens", "low", "high"):
        np.testing.assert_array_equal(getattr(observed, name), getattr(expected, name))


@pytest.mark.slow
def test_drawn_cases_agree_on_a_device_without_float64() -> None:
    subject = BackendUnderTest("tests.pretended.backends:cuda_eager_without_float64")
    try:
        assert "float64" not in subject.declaration.dtypes
        judge_all(subject, 60, seed=64)
    finally:
        subject.close()
