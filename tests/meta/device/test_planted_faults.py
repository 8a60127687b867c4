"""Faults that only a device shows: the pretended one shows each, and a sound engine none."""

from collections.abc import Iterator
from dataclasses import replace

import numpy as np
import pytest
import torch

from specverify.backends.compositions import open_cpu
from specverify.backends.engine.backend import EngineBackend
from specverify.backends.engine.overlap_server import CudaStream
from specverify.properties.strategies.draft.head import LAYERS
from specverify.reference.architecture import Seeded
from specverify.reference.case import Case
from specverify.reference.draft import LanguageModel, Ngram
from specverify.reference.draft.eagle1 import Eagle1
from specverify.reference.draft.hidden import HiddenStates
from specverify.reference.layout import KvLayout
from specverify.reference.sampling import Sampling, Stops
from specverify.reference.session import Action, Mate, Session
from specverify.reference.trace import Trace
from specverify.reference.tree import RankTree
from tests.drawn_families import draw_architecture
from tests.models import LLAMA
from tests.pretended.backends import device_and_backends, open_pretended
from tests.pretended.ledger import SYNCS, Ledger
from tests.pretended.planted import FAULTS, DeviceFault, Unawaited, Unordered
from tests.pretended.tensor import Race
from tests.tiers import each

SHAPE = RankTree((0, 0, 0, 1), (0, 1, 0, 0))
TREE = Case(LLAMA, (1, 2, 1, 2, 1), Ngram(SHAPE, 2), stops=Stops(max_new_tokens=6))
STATIC = replace(TREE, layout=KvLayout(kind="static"))
HEAD = Eagle1(SHAPE, HiddenStates(place="normed", shift=1), LAYERS[0], seed=1)

AHEAD = (("add", 0), ("add", 1), ("launch", 0), ("launch", 1), ("resolve", 0), ("step", 0), ("resolve", 1))
TOGETHER = (("add", 0), ("add", 1), ("step", 0), ("step", 1), ("step", 0), ("step", 1))
GOES = (("add", 0), ("step", 0), ("hand-over", 0), ("step", 0), ("step", 0))


def session(case: Case, actions: tuple[tuple[str, int], ...], mates: int) -> Case:
    mate = Mate((2, 9, 4), case.draft, stops=Stops(5))
    return replace(case, session=Session((mate,) * mates, tuple(Action(kind, (number,)) for kind, number in actions)))


CASES = {
    "tree": TREE,
    "static": STATIC,
    "two": session(STATIC, TOGETHER, 1),
    "sampled": replace(STATIC, sampling=Sampling(temperature=1.0, seed=3)),
    "float64": replace(TREE, dtype="float64"),
    "experts": replace(TREE, model=Seeded(draw_architecture("glm4_moe", 0), 0), prompt=(1, 2, 1, 2), dtype="float64"),
    "hand-over": session(replace(TREE, draft=HEAD), GOES, 0),
    "ahead": session(replace(TREE, draft=LanguageModel(LLAMA, SHAPE)), AHEAD, 1),
}


@pytest.fixture
def device() -> Iterator[Ledger]:
    with device_and_backends() as ledger:
        yield ledger


def bits(trace: Trace) -> list[object]:
    """The tokens, the logits of draft and target and the keys of every step, as values that compare."""
    values: list[object] = [trace.output]
    for step in trace.steps:
        proposed = None if step.drafted is None else step.drafted.logits
        values.append(None if proposed is None else np.asarray(proposed).tobytes())
        values.append(None if step.scored is None else np.asarray(step.scored.logits).tobytes())
        after = None if step.committed is None else step.committed.after
        values.append(None if after is None else np.asarray(after.keys).tobytes())
    if trace.shared is not None:
        values += [None if request is None else request.output for request in trace.shared.requests]
    return values


def sight(backend: EngineBackend, case: Case, ledger: Ledger) -> tuple[str, list[object], int]:
    """What a run shows: how it was refused or fell back, its numbers, and its waits."""
    ledger.clear()
    try:
        trace = backend.run(case)
    except Exception as error:
        causes = []
        cause: BaseException | None = error
        while cause is not None:
            causes.append(f"{type(cause).__name__}: {cause}")
            cause = cause.__cause__ or cause.__context__
        return " < ".join(causes), [], 0
    return " ".join(trace.fallbacks or {}), bits(trace), ledger.count(*SYNCS)


@pytest.mark.parametrize("fault", each(FAULTS, 4), ids=lambda fault: fault.name)
def test_a_fault_of_the_device_shows(fault: DeviceFault, device: Ledger) -> None:
    case = CASES[fault.case]
    sound = sight(open_pretended(fault.backend), case, device)
    assert "Error" not in sound[0]
    with pytest.MonkeyPatch.context() as patch:
        backend = open_pretended(fault.backend)
        fault.plant(patch, backend)
        planted = sight(backend, case, device)
    if fault.shown == "other numbers":
        assert planted[1]
        assert planted[1] != sound[1]
    elif fault.shown == "more waits":
        assert planted[1] == sound[1]
        assert planted[2] > sound[2]
    else:
        assert fault.shown in planted[0]
        assert fault.shown not in sound[0]


@pytest.mark.parametrize("row", ["cuda-eager", "cuda-fused-sdpa", "cuda-fused-graphs"])
def test_a_sound_engine_shows_the_numbers_of_the_cpu(row: str, device: Ledger) -> None:
    subject = open_pretended(row)
    for name in ("tree", "static", "sampled", "ahead"):
        device.clear()
        trace, twin = subject.run(CASES[name]), open_cpu().run(CASES[name])
        assert trace.output == twin.output
        for step, twin_step in zip(trace.steps, twin.steps, strict=True):
            assert step.scored is not None
            assert twin_step.scored is not None
            np.testing.assert_allclose(step.scored.logits, twin_step.scored.logits, atol=1e-4)
        assert device.count(*SYNCS) > 0


def test_launches_ahead_are_ordered_and_two_faulty_streams_are_not(device: Ledger) -> None:
    """In a whole session the waits of the host stand between its launches, and hide these two."""

    def run(kind: type[CudaStream]) -> None:
        tensor = torch.zeros(2, device="cuda")
        stream = kind(torch.device("cuda"))
        shifted, arrived = stream.launch(lambda: tensor + 1)
        tensor.add_(shifted)
        arrived()
        assert tensor.tolist() == [1, 1]

    run(CudaStream)
    for kind in (Unordered, Unawaited):
        with pytest.raises(Race):
            run(kind)


def test_no_fault_shows_on_the_cpu_alone() -> None:
    """Five of them, planted where nothing is asked of a device, change no bit: CPU runs do not find them."""
    case = CASES["tree"]
    sound = bits(open_cpu().run(case))
    for fault in FAULTS[:5]:
        with pytest.MonkeyPatch.context() as patch:
            backend = open_cpu()
            fault.plant(patch, backend)
            assert bits(backend.run(case)) == sound, fault.name


def test_there_are_twenty_faults_and_more_of_five_kinds() -> None:
    assert len({fault.name for fault in FAULTS}) == len(FAULTS) > 20
