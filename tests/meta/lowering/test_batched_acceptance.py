"""Acceptance for many requests in one captured call agrees with acceptance one by one, and is captured seldom."""

import random
from dataclasses import replace

import pytest
import torch
from hypothesis import given, settings
from hypothesis import strategies as st
from torch._dynamo.utils import counters

from specverify.backends.engine.composition import SEAMS
from specverify.backends.engine.model.recording.operators import OperatorRecorder
from specverify.backends.engine.sampling.batched import BatchedVerify, kind_of, pad_questions, tensors_of
from specverify.backends.engine.sampling.coins import Coins, spent_places
from specverify.backends.engine.sampling.forest import forest
from specverify.backends.engine.sampling.question import Question
from specverify.backends.engine.sampling.recorded import RecordedVerify, pad_to_sizes
from specverify.backends.engine.sampling.rules import BATCHED, PROGRAMS
from specverify.backends.engine.sampling.verify import verify
from specverify.reference.rules import RULES, Rule
from specverify.reference.tape import stride
from specverify.reference.tree import Tree

SEAM = SEAMS.sampling
TOGETHER = BatchedVerify()
REPLAYED = RecordedVerify(recorder=OperatorRecorder())
SPREAD = (Rule("multi-round"), Rule("target-only"), Rule("target-only", threshold_single=0.6, threshold_acc=0.8))


def question(
    seed: int, rule: Rule, removed: bool, most: int = 6, vocab: int = 9, shape: tuple[int, ...] = ()
) -> Question:
    """A question about the tree `shape`, or a drawn one, with drawn laws in float64; a seed always gives the same."""
    rng, torch_rng = random.Random(seed), torch.Generator().manual_seed(seed)
    nodes = rng.randint(1, most)
    parent = [0, *(rng.randint(0, row - 1) for row in range(1, nodes))]
    if rule.name == "chain":
        parent = [max(0, row - 1) for row in range(nodes)]
    parent = [*shape] or parent
    nodes = len(parent)
    token = [rng.randrange(vocab) for _ in parent]
    tape = nodes + rng.randint(0, 3)
    law, proposal = (
        (torch.randn(1, nodes, vocab, dtype=torch.float64, generator=torch_rng) * 2).softmax(-1) for _ in range(2)
    )
    uniforms = torch.rand(1, stride(tape), dtype=torch.float64, generator=torch_rng)
    trees = forest(Tree(tuple(parent), tuple(token)), torch.tensor([token]))
    return Question(trees, law, law, proposal, Coins(uniforms, tape, True), rule, removed)


def alone(request: Question) -> tuple[list[int], int]:
    """The answer of the engine that verifies requests one by one."""
    answer = verify(
        request.trees, request.law, request.proposal, request.dice, request.rule, request.removed, SEAM, request.bonus
    )
    return [row for row in answer.path[0].tolist() if row >= 0], int(answer.bonus[0])


@settings(max_examples=5)
@given(st.sampled_from(SPREAD), st.booleans(), st.lists(st.integers(0, 10_000), min_size=1, max_size=6))
def test_a_batch_is_decided_as_each_request_alone(rule: Rule, removed: bool, seeds: list[int]) -> None:
    together, each = ([question(seed, rule, removed) for seed in seeds] for _ in range(2))
    assert TOGETHER(together, SEAM) == [alone(request) for request in each]
    assert [spent_places(request.dice, 0) for request in together] == [
        spent_places(request.dice, 0) for request in each
    ]


@pytest.mark.slow
def test_other_batches_and_trees_of_known_sizes_are_not_captured_again() -> None:
    torch._dynamo.reset()  # the graphs that tests before this one captured would be found again
    rule, fresh = Rule("target-only", threshold_acc=0.7), BatchedVerify()
    before = counters["stats"]["unique_graphs"]
    heights = set()
    for index in range(12):
        batch = [question(seed, rule, False) for seed in range(3 * index, 3 * index + 2 + index % 3)]
        heights.add(pad_questions(batch).height)
        fresh(batch, SEAM)
    # One graph for each number of levels; the rule has no loop over siblings.
    assert counters["stats"]["unique_graphs"] - before == len(heights)
    shapes = set()
    with torch.compiler.set_stance("fail_on_recompile"):
        for index in range(30):
            batch = [question(seed, rule, False) for seed in range(100 + 5 * index, 103 + 5 * index + index % 6)]
            shape = pad_questions(batch)
            if shape.height in heights:
                fresh(batch, SEAM)
                shapes.add(shape.token.shape)
    assert len(shapes) > 5  # batches of many sizes and numbers of nodes


@pytest.mark.parametrize("rule", SPREAD[:2], ids=lambda rule: rule.name)
def test_all_sizes_of_a_batch_are_captured_once(rule: Rule) -> None:
    """As many requests as siblings, rows or tokens are no special size, though torch takes equal sizes for one."""
    torch._dynamo.reset()
    fresh, siblings, before = BatchedVerify(), (0, 0, 0, 0, 0), counters["stats"]["unique_graphs"]
    for size in (4, 5, 16, 1, *range(2, 16)):
        batch = [question(seed, rule, False, vocab=16, shape=siblings) for seed in range(size)]
        shape = pad_questions(batch)
        assert (shape.children.shape[2], shape.law.shape[1:]) == (4, (5, 16))
        assert fresh(batch, SEAM) == [
            alone(question(seed, rule, False, vocab=16, shape=siblings)) for seed in range(size)
        ]
        # arXiv 2508.08192, section 3.2, has two at most: a batch of one request may have a graph of its own.
        assert counters["stats"]["unique_graphs"] - before == 1


def test_only_rules_of_programs_that_were_compared_are_asked_together() -> None:
    assert {*PROGRAMS} == {*RULES}
    assert {*BATCHED} <= {*PROGRAMS.values()}
    typical_request = question(3, Rule("typical"), False)
    assert kind_of(typical_request) is None
    chain_request = replace(typical_request, rule=Rule("chain"))
    assert kind_of(chain_request) is not None
    assert kind_of(replace(chain_request, by_program=False)) is None


@settings(max_examples=25)
@given(st.sampled_from(SPREAD), st.booleans(), st.lists(st.integers(0, 10_000), min_size=1, max_size=6))
def test_a_replay_decides_as_each_request_alone(rule: Rule, removed: bool, seeds: list[int]) -> None:
    """Recordings of earlier examples are replayed; answers handed out before are still what they were."""
    together, each = ([question(seed, rule, removed) for seed in seeds] for _ in range(2))
    other_requests = [question(seed + 1, rule, removed) for seed in seeds]
    answers = REPLAYED(together, SEAM)
    spent = [spent_places(request.dice, 0) for request in together]
    REPLAYED(other_requests, SEAM)
    assert answers == [alone(request) for request in each]
    assert (
        spent
        == [spent_places(request.dice, 0) for request in together]
        == [spent_places(request.dice, 0) for request in each]
    )


def test_batches_of_known_sizes_are_replayed() -> None:
    rule, fresh = Rule("target-only", threshold_acc=0.7), RecordedVerify(recorder=OperatorRecorder())
    sizes = set()
    for index in range(40):
        batch = [question(seed, rule, False) for seed in range(5 * index, 5 * index + 1 + index % 5)]
        shape = pad_to_sizes(batch)
        sizes.add((shape.height, *(tensor.shape for tensor in tensors_of(shape))))
        assert fresh(batch, SEAM) == [
            alone(question(seed, rule, False)) for seed in range(5 * index, 5 * index + 1 + index % 5)
        ]
    assert len(fresh.recordings) == len(sizes) < 30  # of 40 batches


@pytest.mark.slow
@pytest.mark.filterwarnings("ignore::DeprecationWarning")  # of torch's own, while inductor is imported
def test_inductor_decides_as_the_eager_backend_does() -> None:
    compiled = BatchedVerify("inductor")
    for rule in SPREAD[:2]:
        for index in range(10):
            seeds = range(index * 10, index * 10 + 1 + index % 4)
            batch = [question(seed, rule, False, most=4) for seed in seeds]
            assert compiled(batch, SEAM) == [alone(question(seed, rule, False, most=4)) for seed in seeds]
