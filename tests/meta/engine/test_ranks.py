"""A sharded target computes what the whole one does, and ranks that part are named."""

from collections.abc import Callable
from dataclasses import replace

import numpy as np
import pytest
import torch
from torch import Tensor

from specverify.backends.base import Unsupported
from specverify.backends.compositions import open_cpu
from specverify.backends.engine.collectives import RANK_SEAMS, Group, OutOfStep
from specverify.backends.engine.ranks.threads import Meeting
from specverify.backends.engine.sampling import coins
from specverify.properties.strategies.models import GALLERY
from specverify.reference.architecture import Seeded
from specverify.reference.case import Case
from specverify.reference.draft import Scripted
from specverify.reference.malformed import Malformed
from specverify.reference.parallel import RANKS, owners, rank_part, sharding_refusal
from specverify.reference.sampling import Sampling, Stops
from specverify.reference.session import Action, Mate, Session
from specverify.reference.trace import Trace
from specverify.reference.tree import Tree
from tests.models import TINY_LLAMA

MANY = RANKS[1:]
FORK = Scripted((Tree((0, 0, 0, 1, 1), (6, 1, 2, 4, 5)), Tree((0, 0), (6, 4))))
CASE = Case(Seeded(GALLERY[6], 0), (3, 14, 15, 9, 6), FORK, stops=Stops(4), dtype="float64")


def same_on_all(ranks: int, work: Callable[[Group], Tensor]) -> Tensor:
    """What every rank makes, which must be the same."""
    values = [result.value for result in Meeting(ranks).run(work)]
    assert all(torch.equal(tensor, values[0]) for tensor in values)
    return values[0]


@pytest.mark.parametrize("ranks", MANY)
@pytest.mark.parametrize("vocab", [2, 3, 5, 6, 17])
def test_a_coin_draws_over_all_parts_what_it_draws_from_the_whole(ranks: int, vocab: int) -> None:
    rng = np.random.default_rng(vocab)
    weights = torch.tensor(rng.integers(0, 4, (400, vocab)), dtype=torch.float64) / 64
    weights[:, rng.integers(vocab)] += 0.5  # a row without any weight is no law
    coin = torch.tensor(rng.integers(0, 64, 400) / 64.0)
    true = torch.stack([tensor.double() for tensor in coins.inverse(coin, weights)])
    actual = same_on_all(
        ranks, lambda group: torch.stack([tensor.double() for tensor in RANK_SEAMS.draw(group, coin, weights)])
    )
    assert torch.equal(actual[0], true[0])
    assert torch.allclose(actual[1:], true[1:], atol=1e-15)


@pytest.mark.parametrize("ranks", MANY)
def test_of_equal_scores_the_lowest_id_wins_across_parts(ranks: int) -> None:
    scores = torch.tensor(np.random.default_rng(1).integers(0, 3, (200, 7)), dtype=torch.float32)
    expected = (scores == scores.max(-1, keepdim=True).values).long().argmax(-1)
    assert torch.equal(same_on_all(ranks, lambda group: RANK_SEAMS.argmax(group, scores)), expected)


@pytest.mark.parametrize("ranks", MANY)
def test_the_softmax_over_parts_is_that_of_the_whole(ranks: int) -> None:
    logits = torch.tensor(np.random.default_rng(2).normal(0, 9, (50, 5)))
    logits[:, 3] = -torch.inf
    actual = same_on_all(ranks, lambda group: RANK_SEAMS.softmax(group, logits))
    assert torch.allclose(actual, logits.softmax(-1), atol=1e-15)


@pytest.mark.parametrize("ranks", MANY)
def test_parts_cover_every_entry_once(ranks: int) -> None:
    for size in range(1, 40):
        ends = [rank_part(size, rank, ranks) for rank in range(ranks)]
        assert [entry for first, end in ends for entry in range(first, end)] == list(range(size))


def arrays_of(trace: Trace) -> list[np.ndarray]:
    """Logits, attention outputs and committed KV of every step."""
    arrays = []
    for step in trace.steps:
        assert step.scored is not None
        assert step.attended is not None
        assert step.committed is not None
        assert step.committed.after is not None
        arrays += [step.scored.logits, step.attended.output, step.committed.after.keys, step.committed.after.values]
    return arrays


@pytest.mark.parametrize("ranks", MANY)
@pytest.mark.parametrize("temperature", [0.0, 1.0])
def test_ranks_compute_what_one_does(ranks: int, temperature: float) -> None:
    case = replace(CASE, sampling=Sampling(temperature))
    alone, sharded = open_cpu().run(case), open_cpu().run(replace(case, ranks=ranks))
    assert sharded.output == alone.output
    for whole_array, sharded_array in zip(arrays_of(alone), arrays_of(sharded), strict=True):
        assert whole_array.shape == sharded_array.shape
        assert np.allclose(whole_array, sharded_array, atol=1e-12, equal_nan=True)
    assert sharded.ranks is not None
    assert len(sharded.ranks) == ranks
    assert len({(run.tokens, run.lengths, run.calls) for run in sharded.ranks}) == 1
    assert sharded.ranks[0].calls


def test_a_session_runs_on_ranks() -> None:
    session = Session((Mate((1, 2, 6), FORK),), (Action("add", (0,)), Action("add", (1,)), Action("step", (0, 1))))
    trace = open_cpu().run(replace(CASE, session=session, ranks=2))
    assert trace.shared is not None
    for request in trace.shared.requests:
        assert request is not None
        assert request.ranks is not None
        assert request.ranks[0].tokens == request.ranks[1].tokens


def test_ranks_that_enter_different_collectives_are_named() -> None:
    meeting = Meeting(2)

    def work(group: Group) -> None:
        group.all_reduce(torch.zeros(2))
        group.all_reduce(torch.zeros(2 + group.rank))

    results = meeting.run(work)
    assert all(isinstance(result.error, OutOfStep) for result in results)
    assert meeting.parted == "rank 1 is out of step: it enters all_reduce sum [3], and rank 0 enters all_reduce sum [2]"


def test_a_rank_that_ends_leaves_no_other_waiting() -> None:
    results = Meeting(4).run(lambda group: group.rank == 2 or group.all_gather(torch.zeros(1)))
    assert results[2].error is None
    assert str(results[0].error).startswith("rank 2 is out of step: it enters nothing, since it has ended")


def test_what_cannot_be_sharded_is_refused_by_name() -> None:
    assert sharding_refusal(GALLERY[0], 2) == "model of 1 heads on 2 ranks"
    latent = next(arch for arch in GALLERY if arch.family not in ("llama", "pangu", "qwen2", "qwen3", "mistral"))
    assert sharding_refusal(latent, 2) == f"model family {latent.family} on 2 ranks"
    with pytest.raises(Unsupported, match=r"^1 heads and 1 KV heads on 2 ranks: they cannot be shared out evenly$"):
        open_cpu().run(Case(TINY_LLAMA, (1,), stops=Stops(1), ranks=2))
    with pytest.raises(Malformed, match=r"^ranks: 3 is none of 1, 2, 4$"):
        replace(CASE, ranks=3)


def spread_over(ranks: int, temperature: float = 0.0) -> Case:
    """A session of five requests of unequal length, of which a twin follows its source."""
    mates = [Mate((1, 2, number, 6), FORK, stops=Stops(3 + 2 * number)) for number in range(3)]
    goes = [Action("add", (request,)) for request in range(4)]
    goes += [Action("step", (0, 1, 2, 3)), Action("fork", (1, 4)), Action("step", (1, 2)), Action("hand-over", (3,))]
    goes += [Action("step", (3, 2, 4, 0, 1))] * 4 + [Action("evict", (3,)), Action("restore", (3,))]
    goes += [Action("step", (3, 4))] * 3
    session = Session((*mates, Mate((6,), FORK, stops=Stops(5))), tuple(goes))
    return replace(CASE, session=session, sampling=Sampling(temperature, seed=5), ranks=ranks, spread=True)


@pytest.mark.parametrize("ranks", MANY)
@pytest.mark.parametrize("temperature", [0.0, 1.0])
def test_requests_spread_over_ranks_do_what_they_do_on_one(ranks: int, temperature: float) -> None:
    case = spread_over(ranks, temperature)
    there, here = open_cpu().run(case), open_cpu().run(replace(case, ranks=1, spread=False))
    assert there.shared is not None
    assert here.shared is not None
    for rank_request, request in zip(there.shared.requests, here.shared.requests, strict=True):
        assert rank_request is not None
        assert request is not None
        assert (rank_request.output, rank_request.finish) == (request.output, request.finish)
        for array, other_array in zip(arrays_of(rank_request), arrays_of(request), strict=True):
            assert np.allclose(array, other_array, atol=1e-12, equal_nan=True)
    assert there.ranks is not None
    assert len(there.ranks) == ranks
    assert len({run.calls for run in there.ranks}) == 1
    assert [account.committed for account in there.shared.accounts] == [
        account.committed for account in here.shared.accounts
    ]


@pytest.mark.parametrize("ranks", MANY)
def test_ranks_without_any_request_step_along(ranks: int) -> None:
    case = replace(CASE, ranks=ranks, spread=True)
    trace, alone = open_cpu().run(case), open_cpu().run(CASE)
    assert trace.output == alone.output
    assert trace.ranks is not None
    assert len({run.calls for run in trace.ranks}) == 1
    assert len(trace.ranks[-1].calls) > 2 * len(trace.steps)


def test_a_twin_is_on_the_rank_of_its_source() -> None:
    assert owners(spread_over(2).session, 2) == (0, 1, 0, 1, 1)
    assert owners(spread_over(4).session, 4) == (0, 1, 2, 3, 1)
    assert owners(None, 4) == (0,)


def test_what_cannot_be_spread_is_refused() -> None:
    with pytest.raises(Malformed, match=r"^spread: one rank has all requests: name more ranks$"):
        replace(CASE, spread=True)
    session = Session((), (Action("add", (0,)), Action("launch", (0,)), Action("resolve", (0,))))
    with pytest.raises(Malformed, match=r"^spread: .* or steps are launched$"):
        replace(CASE, session=session, ranks=2, spread=True)
