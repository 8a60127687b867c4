"""Recorded verify forwards: what is replayed from a graph of operators is what the model computes, step after step."""

import gc
from collections.abc import Callable
from dataclasses import replace
from typing import Any

import numpy as np
import pytest
import torch
from hypothesis import given, settings
from hypothesis import strategies as st
from torch import Tensor
from torch.fx.experimental.proxy_tensor import make_fx

from specverify.backends.compositions import open_cpu, open_engine
from specverify.backends.engine.attention.eager import eager
from specverify.backends.engine.backend import EngineBackend
from specverify.backends.engine.columns import AttentionInputs
from specverify.backends.engine.composition import SEAMS
from specverify.backends.engine.model.graphs import HOOKED
from specverify.backends.engine.model.models import ModelCache
from specverify.backends.engine.model.recording.operators import OperatorRecorder
from specverify.backends.engine.sampling.recorded import RecordedVerify
from specverify.properties.strategies.draft.head import LAYERS
from specverify.properties.strategies.models import GALLERY
from specverify.reference.architecture import Seeded
from specverify.reference.case import Case
from specverify.reference.draft import LanguageModel, Ngram, Scripted
from specverify.reference.draft.eagle1 import Eagle1
from specverify.reference.draft.hidden import HiddenStates
from specverify.reference.layout import KvLayout
from specverify.reference.sampling import Sampling, Stops
from specverify.reference.trace import Trace
from specverify.reference.tree import RankTree, Tree
from tests.tiers import first


class OperatorGraphs:
    """Records as a CUDA graph does, operators and addresses and no Python, but on the CPU: by tracing to aten."""

    def __init__(self, fails: str | None = None) -> None:
        self.recorded = self.replayed = 0
        self.fails = fails

    def record(self, run: Callable[[], list[Tensor]]) -> tuple[list[Tensor], Callable[[], None]]:
        if self.fails is not None:
            raise RuntimeError(self.fails)
        graph: Any = make_fx(run)()
        results: list[Tensor] = [tensor.clone() for tensor in graph()]
        self.recorded += 1

        def replay() -> None:
            self.replayed += 1
            for result, new in zip(results, graph(), strict=True):
                result.copy_(new)

        return results, replay


SHAPE = RankTree((0, 0, 0, 1), (0, 1, 0, 0))
CASE = Case(
    Seeded(GALLERY[0], 3),
    (1, 2, 1, 2, 1),
    Ngram(SHAPE, 2),
    KvLayout(kind="static"),
    stops=Stops(max_new_tokens=9),
)


def run(case: Case, recorder: OperatorGraphs) -> Trace:
    return EngineBackend("cpu-recorded", "cpu", recorder=recorder).run(case)


def assert_same_output(trace: Trace, plain_trace: Trace) -> None:
    assert trace.output == plain_trace.output
    for step, twin in zip(trace.steps, plain_trace.steps, strict=True):
        assert step.scored is not None
        assert twin.scored is not None
        assert step.attended is not None
        assert twin.attended is not None
        assert step.committed is not None
        assert twin.committed is not None
        assert np.array_equal(step.scored.logits, twin.scored.logits)
        assert np.array_equal(step.attended.output, twin.attended.output)
        assert step.committed.after is not None
        assert twin.committed.after is not None
        assert np.array_equal(step.committed.after.keys, twin.committed.after.keys)
        assert np.array_equal(step.committed.after.values, twin.committed.after.values)


@pytest.mark.parametrize("index", [0, 3, 7, 22])
def test_a_replayed_forward_is_the_forward(index: int) -> None:
    case = replace(CASE, model=Seeded(GALLERY[index], 3))
    recorder = OperatorGraphs()
    replayed = run(case, recorder)
    assert_same_output(replayed, open_cpu().run(case))
    sizes = {len(step.drafted.tree) for step in replayed.steps if step.drafted is not None}
    assert recorder.recorded == len(sizes) < len(replayed.steps)
    assert recorder.replayed == len(replayed.steps) > 2
    assert replayed.fallbacks == {}


def test_each_size_of_tree_is_recorded_once() -> None:
    trees = (Tree((0, 0, 0), (1, 2, 0)), Tree((0, 0), (0, 2)), Tree((0, 0, 1), (0, 1, 2)))
    case = replace(CASE, draft=Scripted(trees), steps=3)
    case = replace(case, draft=Scripted((trees[0].with_root(1), *trees[1:])))
    recorder = OperatorGraphs()
    assert_same_output(run(case, recorder), open_cpu().run(case))
    assert (recorder.recorded, recorder.replayed) == (2, 3)


@pytest.mark.parametrize("kind", ["branch", "overwrite", "scratch"])
def test_other_layouts_say_why_they_are_not_recorded(kind: str) -> None:
    case = replace(CASE, layout=KvLayout(kind=kind))
    recorder = OperatorGraphs()
    trace = run(case, recorder)
    assert_same_output(trace, open_cpu().run(case))
    layers = len(ModelCache("cpu").open(case.model, case.dtype).reaches)
    why = "not captured: only static buffers and pages of one pool, without left padding, keep their addresses"
    assert trace.fallbacks == {why: layers * len(trace.steps)}
    assert recorder.recorded == 0


def test_what_cannot_be_recorded_runs_as_it_is_and_says_why() -> None:
    recorder = OperatorGraphs(fails="operation not permitted\n when stream is capturing")
    trace = run(CASE, recorder)
    assert_same_output(trace, open_cpu().run(CASE))
    (why,) = trace.fallbacks
    assert why == "not captured: operation not permitted when stream is capturing"


def test_a_replay_counts_the_fallbacks_of_what_was_recorded() -> None:
    def reluctant(query: Tensor, columns: AttentionInputs, scaling: float) -> Tensor:
        columns.announce("nothing suits it")
        return eager(query, columns, scaling)

    seams = replace(SEAMS, attend=reluctant, draft_attend=reluctant)
    recorder = OperatorGraphs()
    replayed = EngineBackend("cpu-recorded", "cpu", seams, recorder=recorder).run(CASE)
    assert replayed.fallbacks == EngineBackend("cpu-eager", "cpu", seams).run(CASE).fallbacks != {}
    assert recorder.replayed > recorder.recorded


@pytest.mark.parametrize("head", [False, True], ids=["ngram", "eagle1"])
def test_what_a_prefill_or_a_head_left_to_a_slower_path_counts_as_a_call(head: bool) -> None:
    """Neither is recorded, and its other calls are not counted: so no reason has more layers than there were calls."""
    draft = Eagle1(SHAPE, HiddenStates(place="normed", shift=1), LAYERS[0], seed=1) if head else CASE.draft
    case = replace(CASE, draft=draft, prompt=CASE.prompt * 3, layout=replace(CASE.layout, prefill_chunk=2), steps=1)

    def reluctant(query: Tensor, columns: AttentionInputs, scaling: float) -> Tensor:
        columns.announce("nothing suits it")
        return eager(query, columns, scaling)

    seams = replace(SEAMS, attend=reluctant, draft_attend=reluctant)
    recorded = EngineBackend("cpu-recorded", "cpu", seams, recorder=OperatorGraphs()).run(case)
    plain = EngineBackend("cpu-eager", "cpu", seams).run(case)
    reasons = {"nothing suits it", HOOKED} if head else {"nothing suits it"}
    assert set(recorded.fallbacks) == reasons
    assert recorded.fallbacks["nothing suits it"] == plain.fallbacks["nothing suits it"] == plain.attention_calls
    assert recorded.attention_calls == plain.attention_calls


def test_acceptance_that_cannot_be_recorded_runs_as_it_is_and_counts() -> None:
    verify = RecordedVerify(recorder=OperatorGraphs(fails="no such operator\n in a graph"))
    seams = replace(SEAMS, sampling=replace(SEAMS.sampling, batched=verify))
    case = replace(CASE, sampling=Sampling(temperature=1.0, seed=3))
    trace = EngineBackend("cpu-recorded", "cpu", seams).run(case)
    assert trace.output == open_cpu().run(case).output
    assert trace.fallbacks == {"not captured: acceptance: no such operator in a graph": len(trace.steps)}


def test_a_recording_that_forgot_an_input_would_show() -> None:
    """The stand-in for CUDA's graphs bakes in what is not refilled, as they do."""
    number = torch.tensor([1.0])
    (result,), replay = OperatorGraphs().record(lambda: [number + float(number)])
    number.fill_(5.0)
    replay()
    assert result.item() == 6.0


@settings(max_examples=12, deadline=None)
@given(st.integers(0, 17), st.integers(0, 99), st.integers(1, 3), st.sampled_from(("float64", "float32")))
def test_the_shipped_recorder_gives_the_bits_of_eager(index: int, seed: int, spread: int, dtype: str) -> None:
    shape = RankTree((0, *range(spread), 0), (0, *([0] * spread), spread if spread > 1 else 1))
    case = replace(CASE, model=Seeded(GALLERY[index], seed), draft=Ngram(shape, 2), dtype=dtype)
    backend = open_engine("cpu-recorded")
    assert_same_output(backend.run(case), open_cpu().run(case))
    # Recordings go with the caches whose addresses they hold.
    gc.collect()
    graphs = backend.models.open(case.model, case.dtype).graphs
    assert graphs is not None
    assert not graphs.recordings


@pytest.mark.parametrize("index", first([0, 3, 7], 2))
def test_levels_of_a_draft_are_replayed(index: int) -> None:
    """Levels of one size are recorded once over a draft's buffers, and every later one gives the bits of eager."""
    target, drafting = Seeded(GALLERY[index], 3), Seeded(GALLERY[index], 5)
    draft = LanguageModel(drafting, RankTree((0, 0, 0, 1, 2, 3, 4), (0, 0, 1, 0, 0, 0, 0)))
    for sampling in (Sampling(), Sampling(1.0, seed=4)):
        case = replace(CASE, model=target, draft=draft, sampling=sampling, steps=4)
        recorder = OperatorGraphs()
        replayed, eager = run(case, recorder), open_cpu().run(case)
        assert_same_output(replayed, eager)
        for step, twin in zip(replayed.steps, eager.steps, strict=True):
            assert step.drafted is not None
            assert twin.drafted is not None
            assert step.drafted.tree == twin.drafted.tree
        # One recording is of the tree; the other is of both levels of two nodes, at other columns. A level that has no
        # children is not run.
        assert recorder.recorded == 2
        assert recorder.replayed == 3 * len(replayed.steps)
        assert replayed.fallbacks == {}


def test_a_number_read_by_the_host_is_refused() -> None:
    row = torch.tensor([1.0, -1.0])
    for read in (lambda: [row * float(row[0])], lambda: [row[row > 0]]):
        with pytest.raises(RuntimeError, match="hands numbers back to the host"):
            OperatorRecorder().record(read)


@pytest.mark.parametrize(("kind", "fell"), [("static", False), ("branch", True)])
@pytest.mark.parametrize("head", [False, True], ids=["ngram", "eagle1"])
def test_a_run_without_a_replay_counts_every_call_as_fallen_back(kind: str, fell: bool, head: bool) -> None:
    """So that a campaign in which nothing was replayed is no pass (`specverify.properties.tally.nothing_fused`)."""
    draft = Eagle1(SHAPE, HiddenStates(place="normed", shift=1), LAYERS[0], seed=1) if head else CASE.draft
    trace = open_engine("cpu-recorded").run(replace(CASE, layout=KvLayout(kind=kind), draft=draft))
    assert trace.attention_calls
    # A head takes the target's hidden states by a hook, which no replay runs.
    assert (sum(trace.fallbacks.values()) == trace.attention_calls) is (fell or head)
