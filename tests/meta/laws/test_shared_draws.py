"""Draws of one place are one number: samplers that share a stream have the law that their seeds show."""

import inspect
import json
import math
from collections import Counter
from fractions import Fraction
from itertools import pairwise, product
from typing import Any

import numpy as np
import pytest
import torch

from specverify.backends.interception.errors import DecidesTooOften
from specverify.backends.interception.intercept import enumerate_law
from specverify.backends.interception.races import probability
from specverify.cli import main
from tests.strangers.shared_draws import SAMPLERS, noise_and_its_coin

P, Q = (0.5, 0.3, 0.2), (0.3, 0.1, 0.6)
WORLD = ("--p", "0.5,0.3,0.2", "--q", "0.3,0.1,0.6")
RIGHT = ("generators_of_two_seeds", "one_random_object", "generators_of_the_module", "gumbel_fresh", "coupled")


def table(row: tuple[float, ...]) -> Any:
    return lambda tokens=(): torch.tensor(row, dtype=torch.float64).log()


def law(*words: str) -> int:
    with pytest.raises(SystemExit) as ended:
        main(["law", *words])
    assert isinstance(ended.value.code, int)
    return ended.value.code


def line_of(name: str, text: str) -> str:
    """The place in the code of a sampler's line that holds `text`."""
    lines, first = inspect.getsourcelines(SAMPLERS[name])
    number = next(number for number, line in enumerate(lines) if text in line)
    return f"shared_draws.py:{first + number} in {name}"


@pytest.mark.parametrize("name", SAMPLERS)
def test_a_sampler_is_lossless_exactly_where_it_is_right(name: str, capfd: pytest.CaptureFixture[str]) -> None:
    code = law("--torch", f"tests.strangers.shared_draws:{name}", *WORLD, "--claims-lossless", "--json", "-")
    (record,) = json.loads(capfd.readouterr().out)["rules"]
    assert code == (0 if name in RIGHT else 1)
    assert record["verdict"] == ("LOSSLESS as declared" if name in RIGHT else "BROKEN PROMISE")
    # The wrong Gumbel noise decides once, and the coupled one twice.
    shares = (name not in RIGHT and name != "gumbel_without_a_logarithm") or name == "coupled"
    assert bool(record["decides_twice"]) == shares


BY_HAND = {
    # The draft's coin u is the acceptance coin: a token 2, drawn where u >= 0.4, is never accepted at 1/3.
    "two_generators": (0.6, 0.4, 0.0),
    "forked": (0.6, 0.4, 0.0),
    "default_rng_twice": (0.6, 0.4, 0.0),
    # Token 2 is drafted with 0.6 and refused with 2/3. Then E_2 / 0.6 is the least: of E_0 and E_1, whose residual
    # weights are equal, the first wins where E_0 < E_1 under E_0 > E_2 / 2 and E_1 > E_2 / 6.
    "noise_twice": (0.3 + 0.4 * 5 / 12, 0.1 + 0.4 * 7 / 12, 0.2),
}


@pytest.mark.parametrize("name", BY_HAND)
def test_laws_by_hand(name: str) -> None:
    enumeration = enumerate_law(lambda: SAMPLERS[name](table(P), table(Q)))
    assert [float(enumeration.law.get((token,), 0)) for token in range(3)] == pytest.approx(BY_HAND[name], abs=1e-6)


@pytest.mark.parametrize(
    ("name", "first", "second"),
    [
        ("two_generators", "generator=drafting)", "generator=verifying) <"),
        ("copied_generator", "generator=drafting)", "generator=verifying,"),
        ("reseeded", "multinomial(q, 1)", "torch.rand(())"),
        ("reseeded", "multinomial(q, 1)", "multinomial(residual"),
        ("default_rng_twice", "choice(len(q)", "verifying.random()"),
        ("noise_twice", "(q / noise)", "residual(p, q) / noise"),
        ("gumbel_twice", "(q.log() + noise)", "residual(p, q).log() + noise"),
    ],
)
def test_what_decides_twice_is_told_with_both_places(name: str, first: str, second: str) -> None:
    shared = enumerate_law(lambda: SAMPLERS[name](table(P), table(Q))).shared_numbers
    both = (line_of(name, first), line_of(name, second))
    assert any(all(place in line for place in both) for line in shared), shared


def test_what_decides_twice_and_loses_is_broken_without_a_claim(capfd: pytest.CaptureFixture[str]) -> None:
    assert law("--torch", "tests.strangers.shared_draws:noise_twice", *WORLD) == 1
    page = " ".join(capfd.readouterr().out.split())
    assert "BROKEN, nothing claimed" in page
    assert "give each purpose draws of its own" in page
    for text in ("(q / noise)", "residual(p, q) / noise"):
        assert line_of("noise_twice", text) in page
    assert law("--torch", "tests.strangers.shared_draws:gumbel_without_a_logarithm", *WORLD) == 0


def test_numbers_without_a_joint_law_are_broken_and_told(capfd: pytest.CaptureFixture[str], tmp_path: Any) -> None:
    with pytest.raises(DecidesTooOften):
        enumerate_law(lambda: noise_and_its_coin(table(P), table(Q)))
    html = tmp_path / "law.html"
    words = ("--torch", "tests.strangers.shared_draws:noise_and_its_coin", *WORLD, "--claims-lossless")
    assert law(*words, "--json", "-", "--html", str(html)) == 1
    out, err = capfd.readouterr()
    (record,) = json.loads(out)["rules"]
    assert (record["verdict"], record["total_variation"]) == ("BROKEN PROMISE", None)
    (line,) = record["decides_twice"]
    lines, first = inspect.getsourcelines(noise_and_its_coin)
    for text in ("(q + noise)", "if noise[0]"):
        number = first + next(number for number, source in enumerate(lines) if text in source)
        assert f"shared_draws.py:{number} in noise_and_its_coin" in line
    assert "BROKEN PROMISE" in err
    assert "noise_and_its_coin" in html.read_text()


@pytest.mark.slow
@pytest.mark.parametrize("name", SAMPLERS)
def test_the_law_is_that_of_20000_seeds(name: str) -> None:
    seeds = 20_000
    counts = Counter(SAMPLERS[name](table(P), table(Q), seed) for seed in range(seeds))
    law_of_name = enumerate_law(lambda: SAMPLERS[name](table(P), table(Q))).law
    for token in range(3):
        mass = float(law_of_name.get((token,), 0))
        spread = math.sqrt(max(mass * (1 - mass), 1e-9) / seeds)
        assert abs(counts[(token,)] / seeds - mass) < 5 * spread + 1e-9


def by_ratio(first: list[Fraction], second: list[Fraction], i: int, j: int) -> Fraction:
    """The probability that i wins the first race and j the second, by the ratio of their numbers."""
    other_indices = [k for k in range(len(first)) if k not in (i, j)]
    if i == j:
        floors = [max(first[k] / first[i], second[k] / second[i]) for k in range(len(first)) if k != i]
        return Fraction(1) / (1 + sum(floors))
    # With E_j = r E_i: r >= first_j / first_i, r <= second_j / second_i, and the density of r is 1 / g(r)^2.
    low, high = first[j] / first[i], second[j] / second[i]
    bends = sorted(first[k] / first[i] * second[j] / second[k] for k in other_indices)
    points = [low, *(bend for bend in bends if low < bend < high), high]
    total = Fraction(0)

    def g(r: Fraction) -> Fraction:
        return 1 + r + sum(max(first[k] / first[i], r * second[k] / second[j]) for k in other_indices)

    for begin, end in pairwise(points):
        if end > begin:
            total += (end - begin) / (g(begin) * g(end))
    return total


def test_two_races_have_their_closed_form() -> None:
    rng = np.random.default_rng(5)
    for size in (2, 3, 4, 5):
        first, second = ([Fraction(int(w)) for w in rng.integers(1, 30, size)] for _ in range(2))
        total = Fraction(0)
        for i, j in product(range(size), repeat=2):
            races = tuple((tuple(enumerate(weights)), winner) for weights, winner in ((first, i), (second, j)))
            assert probability(races) == by_ratio(first, second, i, j)
            total += probability(races)
        assert total == 1


def test_three_races_and_limits_are_as_simulated() -> None:
    rng = np.random.default_rng(6)
    draws = 400_000
    noise = rng.exponential(size=(draws, 3))
    weights = [[Fraction(int(w)) for w in rng.integers(1, 9, 3)] for _ in range(3)]
    wins = np.stack([(np.array([float(w) for w in row]) / noise).argmax(1) for row in weights])
    inside = (noise[:, 0] >= 0.3) & (noise[:, 0] < 1.1)
    for winners in product(range(3), repeat=3):
        races = tuple((tuple(enumerate(row)), winner) for row, winner in zip(weights, winners, strict=True))
        hits = wins == np.array(winners)[:, None]
        checks = [(hits.all(0), probability(races))]
        checks.append((hits[:2].all(0) & inside, probability(races[:2], ((0, 0.3, 1.1),))))
        for hits_of_both, mass in checks:
            spread = math.sqrt(max(float(mass), 1e-6) / draws)
            assert abs(hits_of_both.mean() - float(mass)) < 5 * spread
