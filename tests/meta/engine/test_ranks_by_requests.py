"""Sampling split over ranks by requests: slices of a padded batch, coins of the whole batch, one law on all ranks."""

from dataclasses import replace

import numpy as np
import pytest
import torch

from specverify.backends.base import Unsupported
from specverify.backends.compositions import open_cpu, open_engine
from specverify.backends.engine.collectives import Group
from specverify.backends.engine.ranks.by_requests import REQUEST_RANKS
from specverify.backends.engine.ranks.threads import Meeting
from specverify.backends.faults import fault_named, plant
from specverify.backends.faults.serving.ranks_by_requests import BACKEND
from specverify.properties.laws import enumeration
from specverify.reference.case import Case
from specverify.reference.draft import Scripted
from specverify.reference.oracle import law
from specverify.reference.probability_world import World
from specverify.reference.rules import Rule
from specverify.reference.sampling import Sampling, Stops
from specverify.reference.session import Action, Mate, Session
from specverify.reference.tape import stride
from specverify.reference.trace import Trace
from specverify.reference.tree import Shape, Tree
from tests.models import LLAMA

PROMPTS = ((3, 1, 4), (2, 0), (1, 2), (0, 3, 2), (4, 4))


@pytest.mark.parametrize(("ranks", "requests"), [(2, 1), (2, 4), (2, 5), (4, 3), (4, 5)])
def test_the_slices_of_all_ranks_are_the_padded_batch(ranks: int, requests: int) -> None:
    rows = torch.arange(requests)[:, None] * torch.ones(1, 3, dtype=torch.long)

    def exchange(group: Group) -> tuple[torch.Tensor, torch.Tensor]:
        part = REQUEST_RANKS.share(group, rows)
        return part, REQUEST_RANKS.gather(group, part, requests)

    outcomes = Meeting(ranks).run(exchange)
    size = -(-requests // ranks)
    for outcome in outcomes:
        part, whole_batch = outcome.value
        assert part.shape == (size, 3)
        assert torch.equal(whole_batch, rows)
    together = torch.cat([outcome.value[0] for outcome in outcomes])[:, 0].tolist()
    assert together == [*range(requests), *[requests - 1] * (size * ranks - requests)]


def batch(requests: int, ranks: int) -> Case:
    """So many sampled requests that step together, each with a chain of one node and a seed of its own."""

    def draft(number: int) -> Scripted:
        return Scripted((Tree((0, 0), (PROMPTS[number][-1], number)),))

    mates = tuple(
        Mate(PROMPTS[number], draft(number), Sampling(1.0, seed=number), Stops(4)) for number in range(1, requests)
    )
    everyone = tuple(range(requests))
    actions = (*[Action("add", (number,)) for number in everyone], *[Action("step", everyone)] * 3)
    case = Case(LLAMA, PROMPTS[0], draft(0), sampling=Sampling(1.0, seed=0), stops=Stops(4), ranks=ranks)
    return replace(case, session=Session(mates, actions))


def texts(trace: Trace) -> list[tuple[int, ...]]:
    assert trace.shared is not None
    return [request.output for request in trace.shared.requests if request is not None]


@pytest.mark.parametrize(("ranks", "requests"), [(2, 1), (2, 3), (2, 4)])
def test_a_batch_gives_the_tokens_of_one_rank(ranks: int, requests: int) -> None:
    case = batch(requests, ranks)
    alone = open_cpu().run(replace(case, ranks=1))
    together = open_engine(BACKEND).run(case)
    assert texts(together) == texts(alone)
    assert together.ranks is not None
    assert len({run.calls for run in together.ranks}) == 1, "every rank enters the same collectives"


WORLD = World(
    Shape((0, 0, 0, 1)),
    np.log(np.array([[0.5, 0.3, 0.2], [0.2, 0.2, 0.6], [0.1, 0.8, 0.1], [0.4, 0.4, 0.2]])),
    np.log(np.array([[[0.3, 0.4, 0.3], [0.5, 0.25, 0.25], [0.2, 0.2, 0.6], [0.1, 0.1, 0.8]]])),
    Sampling(1.0, rule=Rule("multi-round"), draws="without-replacement"),
    dtype="float64",
)


def law_over(ranks: int, fault: str = "") -> enumeration.Law:
    """The law of WORLD on so many ranks, enumerated coin by coin."""
    backend = open_engine(BACKEND)
    if fault:
        plant(backend, fault_named(fault))
    world = replace(WORLD, ranks=ranks)
    return enumeration.law(
        lambda tape: backend.rounds(world, tape),
        stride(len(world.shape)),
        order=enumeration.decisions(world.shape),
    )


def test_the_law_over_ranks_is_that_of_one_rank() -> None:
    alone = law_over(1)
    assert law.total_variation(dict(alone.outcomes), law.target_rows(WORLD), WORLD.shape.height + 1) < 1e-10
    for ranks in (2, 4):
        together = law_over(ranks)
        assert not together.strays
        assert together.outcomes == pytest.approx(alone.outcomes, abs=1e-12)


@pytest.mark.parametrize("fault", ["rank-draws-sized-to-slice", "rank-keeps-answers-of-padding"])
def test_a_wrong_slice_is_no_law(fault: str) -> None:
    """The outcome of a tape then depends on the tapes beside it, or on another tape's coins."""
    wrong = law_over(2, fault)
    assert wrong.strays or wrong.outcomes != pytest.approx(law_over(1).outcomes, abs=1e-6)


def test_the_faults_need_ranks_that_split_by_requests() -> None:
    with pytest.raises(Unsupported, match="do not share sampling out by requests"):
        plant(open_cpu(), fault_named("rank-slice-ends-with-batch"))
