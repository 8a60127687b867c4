"""Interception: a stranger's eager sampler has its exact law, its faults show, and what cannot be read is refused."""

import math
import random
from collections.abc import Callable, Hashable
from fractions import Fraction
from typing import Any

import numpy as np
import pytest
import torch

from specverify.backends.interception.intercept import NotInterceptable, TooManyRuns, exact_law
from tests.strangers.eager_sampler import FAULTS, EagerSampler
from tests.tiers import first

VOCAB = 4
BOUND = random.random
HIDDEN = [random.random]
OLDER = np.random.default_rng(8)
P = torch.tensor([0.5, 0.25, 0.25])


def models() -> tuple[tuple[torch.Tensor, ...], tuple[torch.Tensor, ...]]:
    generator = torch.Generator().manual_seed(0)
    target = tuple(1.5 * torch.randn((VOCAB,) * depth, generator=generator) for depth in (1, 2, 3))
    draft = tuple(target[depth] + torch.randn((VOCAB,) * (depth + 1), generator=generator) for depth in (0, 1))
    return target, draft


def distance(sampler: EagerSampler) -> float:
    """Total variation between the completed law of three tokens and the target's."""
    law = exact_law(sampler.round)
    assert sum(law.values()) == 1
    first, second, third = (torch.softmax(part.double() / sampler.temperature, -1).numpy() for part in sampler.target)
    joint = np.zeros((VOCAB,) * 3)
    for tokens, mass in law.items():
        if len(tokens) == 1:
            joint[tokens] += float(mass) * second[tokens][:, None] * third[tokens]
        elif len(tokens) == 2:
            joint[tokens] += float(mass) * third[tokens]
        else:
            joint[tokens] += float(mass)
    return float(np.abs(joint - first[:, None, None] * second[:, :, None] * third).sum() / 2)


@pytest.mark.parametrize("sampled", [True, False])
def test_an_unmodified_sampler_has_the_law_of_its_target(sampled: bool) -> None:
    assert distance(EagerSampler(*models(), sampled=sampled)) <= 1e-7


@pytest.mark.parametrize("fault", first(FAULTS, 1))
def test_each_fault_moves_the_law(fault: str) -> None:
    assert distance(EagerSampler(*models(), fault=fault)) > 1e-2


@pytest.mark.parametrize("fault", FAULTS[2:])
def test_faults_of_the_bonus_move_the_law_of_best_siblings_too(fault: str) -> None:
    assert distance(EagerSampler(*models(), sampled=False, fault=fault)) > 1e-2


def uniform_in_place() -> tuple[bool, ...]:
    coins = torch.empty(2)
    coins.uniform_()
    return tuple((coins[:, None] >= 0.75).flatten().tolist())


def race_in_place() -> int:
    weights = P.clone()
    weights.div_(torch.empty(3).exponential_())
    return int(weights.argmax(dim=-1))


def stale_view() -> bool:
    coins = torch.empty(2)
    view = coins.view(-1)
    coins.uniform_()
    return bool((view < 0.5).all())


def row_of_a_batch() -> int:
    """vLLM's CPU sampler fills the row of a request that has a seed."""
    noise = torch.empty(2, 3)
    noise.exponential_()
    noise[1].exponential_(generator=torch.Generator().manual_seed(7))
    return int(P.expand(2, 3).div(noise).argmax(dim=-1).view(-1)[1])


def masked_race() -> int:
    scores = P.log() - torch.empty(3).exponential_().log()
    scores[0] = float("-inf")
    return int(scores.masked_fill(torch.tensor([False, False, True]), float("-inf")).argmax())


QUARTERS = {0: Fraction(1, 2), 1: Fraction(1, 4), 2: Fraction(1, 4)}

KNOWN_DRAWS: dict[str, tuple[Callable[[], Hashable], dict[Any, Fraction]]] = {
    "inverse CDF of a tensor coin": (lambda: int((P.cumsum(0) <= torch.rand(1)).sum()), QUARTERS),
    "multinomial": (lambda: int(P.multinomial(1)), QUARTERS),
    "with replacement": (
        lambda: tuple(torch.multinomial(P[:2], 2, True).tolist()),
        {(i, j): Fraction(2 - i, 3) * Fraction(2 - j, 3) for i in (0, 1) for j in (0, 1)},
    ),
    "without replacement": (
        lambda: tuple(torch.multinomial(P, 2).tolist()),
        {(i, j): QUARTERS[i] * QUARTERS[j] / (1 - QUARTERS[i]) for i in QUARTERS for j in QUARTERS if i != j},
    ),
    "exponential race": (lambda: int((P / torch.empty_like(P).exponential_()).argmax(-1)), QUARTERS),
    "exponential race in place": (race_in_place, QUARTERS),
    "a race filled row by row": (row_of_a_batch, QUARTERS),
    "a masked race": (masked_race, {1: Fraction(1)}),
    "the smallest of noise over weights": (lambda: int((torch.empty(3).exponential_() / P).argmin()), QUARTERS),
    "the largest power of coins": (lambda: int((torch.rand(3) ** (1 / P)).argmax()), QUARTERS),
    "the best two of a race": (
        lambda: tuple((P / torch.empty(3).exponential_()).topk(2).indices.tolist()),
        {(i, j): QUARTERS[i] * QUARTERS[j] / (1 - QUARTERS[i]) for i in QUARTERS for j in QUARTERS if i != j},
    ),
    "a race in NumPy": (lambda: int(np.argmax(P.numpy() / np.random.default_rng(3).exponential(size=3))), QUARTERS),
    "an older view": (stale_view, {True: Fraction(1, 4), False: Fraction(3, 4)}),
    "product of a coin": (lambda: random.random() * 2 < 1, {True: Fraction(1, 2)}),
    "1 minus a coin": (lambda: 1 - random.random() < 0.25, {True: Fraction(1, 4)}),
    "sum in torch": (lambda: bool((1 - torch.rand(1) * 2 < 0.5).all()), {True: Fraction(3, 4)}),
    "copied": (lambda: bool(torch.zeros(2).copy_(torch.rand(2))[1] < 0.25), {True: Fraction(1, 4)}),
    "searchsorted": (lambda: int(torch.searchsorted(P.cumsum(0), torch.rand(1), right=True)), QUARTERS),
    "integers of torch": (lambda: int(torch.randint(2, 5, (2,))[1]), dict.fromkeys((2, 3, 4), Fraction(1, 3))),
    "bernoulli": (lambda: bool(torch.bernoulli(P)[1]), {True: Fraction(1, 4), False: Fraction(3, 4)}),
    "a shuffled list": (
        lambda: tuple(random.Random(0).sample("ab", 2)),
        {("a", "b"): Fraction(1, 2), ("b", "a"): Fraction(1, 2)},
    ),
    "choices": (lambda: random.Random(0).choices((0, 1, 2), weights=P.tolist())[0], QUARTERS),
    "a name imported before": (lambda: BOUND() < 0.25, {True: Fraction(1, 4), False: Fraction(3, 4)}),
    "a generator of the module": (lambda: OLDER.random() < 0.25, {True: Fraction(1, 4), False: Fraction(3, 4)}),
    "floor of a coin": (lambda: int(random.random() * 4), dict.fromkeys(range(4), Fraction(1, 4))),
    "numpy's choice": (lambda: int(np.random.choice(3, p=[0.5, 0.25, 0.25])), QUARTERS),  # noqa: NPY002
    "uniform_": (
        uniform_in_place,
        {
            (i, j): Fraction(1 + 2 * (not i), 4) * Fraction(1 + 2 * (not j), 4)
            for i in (False, True)
            for j in (False, True)
        },
    ),
    "item of a moved coin": (
        lambda: torch.rand(3).reshape(3, 1)[1].squeeze().item() < 0.25,
        {True: Fraction(1, 4), False: Fraction(3, 4)},
    ),
    "a threshold on the left": (lambda: bool(P[1] >= torch.rand(())), {True: Fraction(2**22 + 1, 2**24)}),
    "numpy's threshold": (
        lambda: bool(np.float64(0.25) > np.random.default_rng().random()),
        {True: Fraction(1, 4)},
    ),
    # A zero-probability token is accepted by a coin of exactly 0, and by no other.
    "less or equal 0": (lambda: bool(random.random() <= torch.tensor(0.0)), {True: Fraction(1, 2**53)}),
    # A Python float is rounded to float32 before torch compares it, so coins close to 1 are no longer below it.
    "below 1 in float32": (
        lambda: bool(random.random() < torch.tensor(1.0)),
        {False: Fraction(1, 2**25)},
    ),
}


@pytest.mark.parametrize("name", KNOWN_DRAWS)
def test_known_draws_have_exact_weights(name: str) -> None:
    fn, expected_law = KNOWN_DRAWS[name]
    law = exact_law(fn)
    assert sum(law.values()) == 1
    if sum(expected_law.values()) == 1:
        assert law == expected_law
    else:
        assert {key: law[key] for key in expected_law} == expected_law


def test_a_coin_compared_again_remembers() -> None:
    def fn() -> tuple[bool, bool]:
        coin = random.random()
        return coin < 0.5, coin < 0.25

    quarter = Fraction(1, 4)
    assert exact_law(fn) == {(True, True): quarter, (True, False): quarter, (False, False): 2 * quarter}


REFUSED: dict[str, tuple[Callable[[], Any], str]] = {
    "floor division": (lambda: random.random() // 0.5, "floordiv"),
    "equality": (lambda: random.random() == 0.0, "eq"),
    "truth": (lambda: bool(random.random()), "bool"),
    "math": (lambda: math.log(random.random()), "float"),
    "copied into a tensor": (lambda: bool(torch.tensor(random.random()) < 0.5), "torch's tensor"),
    "sum of two": (lambda: bool(torch.rand(3).sum() < 1), "sum"),
    "torch's own truth": (lambda: bool(torch.rand(1)), "bool"),
    "torch's float": (lambda: float(torch.rand(())) < 0.5, r"float\(\) on a random number: read it with .item"),
    "through NumPy": (lambda: float(torch.rand(2).numpy()[0]), "numpy"),
    "two coins": (lambda: random.random() < random.random(), "two random numbers"),
    "two tensors of coins": (lambda: bool(torch.rand(1) < torch.rand(1)), "two random numbers"),
    "arithmetic of two": (lambda: bool(torch.rand(1) + torch.rand(1) < 1), "arithmetic of two"),
    "normal": (lambda: bool(torch.randn(1) < 0), "randn"),
    "numpy's normal": (lambda: bool(np.random.normal() < 0), "numpy.random.normal"),  # noqa: NPY002
    "many integers": (lambda: int(torch.randint(0, 2**30, ())), "randint of 1073741824 outcomes"),
    "many bits": (lambda: random.getrandbits(64), "getrandbits"),
    "more than there are": (lambda: torch.multinomial(torch.tensor([1.0, 0.0]), 2).tolist(), "fewer|invalid"),
    "a function kept before": (lambda: HIDDEN[0]() < 0.5, "not watched"),
    "an array's sum": (lambda: np.random.default_rng(1).random(3).sum() < 1, "NumPy function"),
}


@pytest.mark.parametrize("name", REFUSED)
def test_what_cannot_be_read_is_refused_by_name(name: str) -> None:
    fn, word = REFUSED[name]
    with pytest.raises(NotInterceptable, match=word):
        exact_law(fn)


def test_memory_between_runs_is_noticed() -> None:
    calls: list[int] = []

    def fn() -> bool:
        calls.append(1)
        return random.random() < 1 / (1 + len(calls))

    with pytest.raises(NotInterceptable, match="replayed"):
        exact_law(fn)


@pytest.mark.parametrize("first", [True, False])
def test_loops_that_end_by_chance_alone_are_stopped(first: bool) -> None:
    def fn() -> int:
        count = 0
        while (random.random() < 0.5) == first:
            count += 1
        return count

    with pytest.raises(TooManyRuns):
        exact_law(fn, most_runs=50, most_draws=100)


def test_an_outcome_must_be_a_value() -> None:
    for fn in (lambda: torch.rand(1), lambda: [1], lambda: random.random()):
        with pytest.raises(TypeError, match="tuple of token ids"):
            exact_law(fn)


@pytest.mark.parametrize("breaks", [True, False])
def test_everything_is_left_as_found(breaks: bool) -> None:
    names: list[tuple[Any, str]] = [(random, "random"), (random, "seed"), (random, "shuffle"), (torch, "manual_seed")]
    names += [(np.random, "choice"), (np.random, "default_rng"), (torch, "multinomial")]
    before = [getattr(*name) for name in names]
    states = random.getstate(), torch.get_rng_state(), np.random.get_state()[1].tolist()  # type: ignore[index]  # noqa: NPY002

    def fn() -> bool:
        random.seed(1)
        torch.manual_seed(1)
        np.random.seed(1)  # noqa: NPY002
        answer = random.random() < 0.5 and bool(torch.rand(1) < 0.5)
        if breaks:
            raise KeyError("its own error")
        return answer

    if breaks:
        with pytest.raises(KeyError, match="its own error"):
            exact_law(fn)
    else:
        assert exact_law(fn) == {True: Fraction(1, 4), False: Fraction(3, 4)}
    assert [getattr(*name) for name in names] == before
    assert random.getstate() == states[0]
    assert torch.equal(torch.get_rng_state(), states[1])
    assert np.random.get_state()[1].tolist() == states[2]  # type: ignore[index]  # noqa: NPY002
    assert isinstance(random.random(), float)
    assert not torch.rand(3).isnan().any()
