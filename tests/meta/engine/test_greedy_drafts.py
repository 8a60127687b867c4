"""A draft that names its best tokens computes no law of its own: temperature, top-k, top-p and min-p are skipped."""

from dataclasses import replace

import pytest
from torch import Tensor

from specverify.backends.compositions import open_cpu
from specverify.backends.engine.sampling import processing
from specverify.backends.faults import fault_named, plant
from specverify.reference.case import Case
from specverify.reference.draft import LanguageModel
from specverify.reference.draft_trees import Expansion
from specverify.reference.sampling import Sampling, Stops
from specverify.reference.tree import RankTree
from tests.models import LLAMA, OTHER_LLAMA

NUCLEUS = Sampling(0.8, top_p=0.7, min_p=0.05, draws="top-k", seed=3)
STATIC = Case(
    LLAMA, (3, 1, 4), LanguageModel(OTHER_LLAMA, RankTree((0, 0, 0, 1), (0, 0, 1, 0))), sampling=NUCLEUS, stops=Stops(6)
)
DYNAMIC = replace(STATIC, draft=LanguageModel(OTHER_LLAMA, Expansion(2, 2, 4)))


@pytest.fixture
def truncated(monkeypatch: pytest.MonkeyPatch) -> list[tuple[int, ...]]:
    """The shape [1, nodes, V] of every tensor of logits that is cut to a nucleus, in order."""
    shapes = list[tuple[int, ...]]()
    truncate = processing.truncate

    def watch_truncate(logits: Tensor, *arguments: object) -> Tensor:
        shapes.append(tuple(logits.shape))
        return truncate(logits, *arguments)  # type: ignore[arg-type]

    monkeypatch.setattr(processing, "truncate", watch_truncate)
    return shapes


@pytest.mark.parametrize("case", [STATIC, DYNAMIC], ids=["static", "dynamic"])
def test_a_greedy_draft_skips_the_nucleus(case: Case, truncated: list[tuple[int, ...]]) -> None:
    trace = open_cpu().run(case)
    assert len(truncated) == len(trace.steps), "one law for each verification, the target's"


def test_a_drawn_draft_cuts_the_nucleus_of_each_node_with_children(truncated: list[tuple[int, ...]]) -> None:
    drawn = replace(STATIC, sampling=replace(NUCLEUS, draws="without-replacement"))
    trace = open_cpu().run(drawn)
    nodes_with_children = 2
    assert len(truncated) == len(trace.steps) * (1 + nodes_with_children)


def test_the_fault_that_hands_over_the_law_still_computes_it(truncated: list[tuple[int, ...]]) -> None:
    backend = open_cpu()
    plant(backend, fault_named("soft-law-for-ranked-tokens"))
    trace = backend.run(STATIC)
    assert len(truncated) > len(trace.steps)
