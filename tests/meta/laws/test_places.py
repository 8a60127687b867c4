"""Places of draws: one stream, offset and size for every generator, and the line of code of each draw."""

import copy
import pickle
import random
from collections.abc import Callable
from typing import Any

import numpy as np
import pytest
import torch

from specverify.backends.randomness.places import Draw
from specverify.backends.randomness.positions import Positions, next_block
from specverify.backends.randomness.recorder import Recorder, overlaps

# Functions of NumPy are looked up when they are called: hooks take the place of names.
SEEDED: dict[str, tuple[Callable[[int], Any], Callable[[Any], Any]]] = {
    "torch": (lambda seed: torch.Generator().manual_seed(seed), lambda generator: torch.rand(3, generator=generator)),
    "default_rng": (lambda seed: np.random.default_rng(seed), lambda generator: generator.random(3)),
    "PCG64DXSM": (lambda seed: np.random.Generator(np.random.PCG64DXSM(seed)), lambda generator: generator.random(3)),
    "Philox": (lambda seed: np.random.Generator(np.random.Philox(seed)), lambda generator: generator.random(3)),
    "SFC64": (lambda seed: np.random.Generator(np.random.SFC64(seed)), lambda generator: generator.random(3)),
    "MT19937": (lambda seed: np.random.Generator(np.random.MT19937(seed)), lambda generator: generator.random(3)),
    "SeedSequence": (
        lambda seed: np.random.default_rng(np.random.SeedSequence(seed)),
        lambda generator: generator.random(3),
    ),
    "RandomState": (lambda seed: np.random.RandomState(seed), lambda generator: generator.random_sample(3)),
    "Random": (random.Random, lambda generator: [generator.random() for _ in range(3)]),
}


def record_draws(run: Callable[[], Any]) -> list[Draw]:
    with Recorder() as recorder:
        run()
    return recorder.draws


@pytest.mark.parametrize("kind", SEEDED)
def test_generators_of_one_seed_read_one_place_and_of_two_seeds_two(kind: str) -> None:
    make, draw = SEEDED[kind]
    first_draws, second_draws = record_draws(lambda: draw(make(5))), record_draws(lambda: draw(make(5)))
    together = record_draws(lambda: (draw(make(5)), draw(make(5))))
    assert [part.place.offset for part in first_draws] == [part.place.offset for part in second_draws] != []
    assert len(overlaps(together)) == len(first_draws)
    assert overlaps(record_draws(lambda: (draw(make(5)), draw(make(6))))) == []


@pytest.mark.parametrize("kind", SEEDED)
def test_a_generator_never_reads_a_word_twice(kind: str) -> None:
    make, draw = SEEDED[kind]

    def run() -> None:
        generator = make(5)
        for _ in range(300):  # through several blocks of MT19937
            draw(generator)

    draws = record_draws(run)
    assert len(draws) >= 300
    assert overlaps(draws) == []
    assert len({part.place.stream for part in draws}) == 1


@pytest.mark.parametrize("kind", SEEDED)
def test_a_second_generator_meets_the_part_of_a_draw_that_it_reads(kind: str) -> None:
    make, draw = SEEDED[kind]

    def run() -> None:
        first, second = make(5), make(5)
        draw(first)
        draw(first)
        draw(second)

    draws = record_draws(run)
    assert len(overlaps(draws)) == len(draws) // 3 > 0


def test_copies_of_a_generator_read_its_place() -> None:
    def run() -> None:
        first = torch.Generator().manual_seed(5)
        torch.rand(7, generator=first)
        second, third = torch.Generator(), first.clone_state()
        second.set_state(first.get_state())
        for generator in (first, second, third):
            torch.rand(1, generator=generator)

    assert len(overlaps(record_draws(run))) == 3


def test_default_generators_are_followed_through_seeds_and_forks() -> None:
    def run() -> None:
        torch.manual_seed(1)
        torch.rand(2)
        with torch.random.fork_rng(devices=[]):
            torch.rand(2)
        torch.rand(2)
        torch.manual_seed(1)
        torch.multinomial(torch.ones(3), 1)

    state = torch.get_rng_state()
    draws = record_draws(run)
    torch.set_rng_state(state)
    assert [(draws.index(first_draw), draws.index(second_draw)) for first_draw, second_draw in overlaps(draws)] == [
        (0, 3),
        (1, 2),
        (1, 3),
        (2, 3),
    ]


def test_a_draw_is_followed_through_many_blocks() -> None:
    def run() -> None:
        generator = torch.Generator().manual_seed(5)
        torch.rand(100_000, generator=generator)
        torch.rand(1, generator=generator)

    large, small = (draw.place for draw in record_draws(run))
    assert (large.offset, large.size, small.offset) == (0, 100_000, 100_000)


def test_blocks_follow_as_the_generator_itself_makes_them() -> None:
    generator = np.random.MT19937(3)
    generator.random_raw(1)
    first = generator.state["state"]["key"].copy()
    generator.random_raw(624)
    assert (next_block(first) == generator.state["state"]["key"]).all()


def test_hooked_generators_of_numpy_are_like_those_without() -> None:
    generators: list[Any] = []
    plain = np.random.default_rng(3)

    def run() -> None:
        generator = np.random.default_rng(3)
        generators.extend(
            (generator, copy.deepcopy(generator), pickle.loads(pickle.dumps(generator)), np.random.RandomState(3))
        )
        assert isinstance(plain, np.random.Generator)
        assert generator.choice(4, p=[0.25] * 4) == plain.choice(4, p=[0.25] * 4)

    assert len(record_draws(run)) == 1
    assert generators[0].normal() == plain.normal()
    assert generators[1].random() == generators[2].random() == np.random.default_rng(3).random()
    assert isinstance(generators[0], np.random.Generator)
    assert isinstance(generators[3], np.random.RandomState)


def test_a_draw_has_its_line_of_code() -> None:
    def draft() -> int:
        return int(torch.multinomial(torch.ones(3), 1, generator=torch.Generator().manual_seed(5)))

    def run() -> None:
        draft()
        random.Random(4).choices([1, 2], weights=[1, 2])
        np.random.default_rng(3).integers(4)

    draws = record_draws(run)
    assert [draw.site.function for draw in draws] == ["draft", "run", "run"]
    assert draws[0].stack[1].function == "run"
    assert str(draws[0]).startswith("torch.multinomial at test_places.py:")
    assert "a torch.Generator seeded 5, words 0 to 5 of mt19937" in str(draws[0])


def test_streams_of_two_libraries_may_be_one() -> None:
    # Both libraries begin MT19937 from an integer in the same way.
    torch_draw, numpy_draw = record_draws(
        lambda: (torch.rand(1, generator=torch.Generator().manual_seed(5)), np.random.RandomState(5).random_sample())
    )
    assert torch_draw.place.overlaps(numpy_draw.place)


def test_recording_leaves_every_name_as_it_was() -> None:
    names: list[tuple[Any, str]] = [(random, "random"), (random.Random, "random"), (random.Random, "_randbelow")]
    names += [(np.random, name) for name in ("default_rng", "Generator", "RandomState", "random", "choice")]
    before = [getattr(*name) for name in names]
    attribute_names = set(vars(random.Random))
    record_draws(lambda: random.random())
    assert [getattr(*name) for name in names] == before
    assert set(vars(random.Random)) == attribute_names


def test_positions_need_no_recorder() -> None:
    positions = Positions()
    generator = torch.Generator().manual_seed(9)
    before = positions.position(generator)
    torch.rand(4, generator=generator)
    assert positions.place(before, generator).size == 4
