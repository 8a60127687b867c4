"""acceptance.streams-disjoint: black boxes whose draws share numbers are red, and right ones are not."""

import pickle
import random
import sys
from collections.abc import Callable, Iterator
from dataclasses import replace
from pathlib import Path
from typing import Any

import numpy as np
import pytest
import torch

from specverify.adapt import blackbox
from specverify.backends.run_draws import recording_run
from specverify.isolation.backend_spec import BackendSpec
from specverify.isolation.engine import Served
from specverify.isolation.isolated import Isolated
from specverify.properties.invariants.acceptance.streams import first_reread
from specverify.properties.strategies.draft.language_model import CHAIN
from specverify.properties.verdict.finding import Verdict
from specverify.properties.verdict.judge import judge
from specverify.reference.case import Case
from specverify.reference.draft import LanguageModel
from specverify.reference.oracle.decoder import Oracle
from specverify.reference.sampling import Sampling, Stops
from specverify.reference.trace import Draw
from specverify.reports.vocabulary import account
from specverify.setup.subjects import subject_of
from tests.corruption import BY_NAME
from tests.meta.shell.test_black_box import STRANGERS, diff
from tests.models import LLAMA
from tests.strangers import black_boxes, told_boxes
from tests.strangers.components import plain

NAME = "acceptance.streams-disjoint"
CASE = Case(
    LLAMA,
    (3, 1, 4),
    LanguageModel(replace(LLAMA, noise=0.3), CHAIN),
    sampling=Sampling(2.5, seed=3),
    stops=Stops(6),
)

PLAIN = CASE.plain_decode()


def verdict_of(factory: Callable[[], Any], case: Case = CASE) -> Verdict:
    return judge(case, (BY_NAME[NAME],), Oracle(), subject_of(factory()))


def with_seed(seed: int, case: Case = CASE) -> Case:
    return replace(case, sampling=replace(case.sampling, seed=seed))


def step_of(coin: Callable[[], float], draw: Callable[[], float]) -> float:
    """A round of speculation, as far as its random numbers go: a draw, and the coin that accepts it."""
    return draw() + coin()


def drawing(make: Callable[[int], Iterator[float]]) -> Any:
    """A black box whose tokens are the numbers of `make(seed)`, cut to the vocabulary."""

    def generate(prompt_ids: list[int], max_new_tokens: int, temperature: float, seed: int) -> list[int]:
        numbers = make(seed)
        return [int(next(numbers) * 5) for _ in range(max_new_tokens)]

    return blackbox(generate)


def two_torch_generators(seed: int, apart: int = 0) -> Iterator[float]:
    draft, verifier = (torch.Generator().manual_seed(seed + number * apart) for number in (0, 1))
    while True:
        drafted = float(torch.rand((), generator=draft))
        yield drafted * float(torch.rand((), generator=verifier))


def torch_seeded_before_each_draw(seed: int) -> Iterator[float]:
    while True:
        torch.manual_seed(seed)
        drafted = float(torch.rand(()))
        torch.manual_seed(seed)
        yield drafted * float(torch.rand(()))


def torch_seeded_for_each_token(seed: int) -> Iterator[float]:
    while True:
        torch.manual_seed(seed)
        yield float(torch.rand(()))


def two_numpy_generators(seed: int) -> Iterator[float]:
    draft, verifier = np.random.default_rng(seed), np.random.default_rng(seed)
    while True:
        drafted = draft.random()
        yield drafted * verifier.random()


def state_taken_over(seed: int) -> Iterator[float]:
    draft = torch.Generator().manual_seed(seed)
    while True:
        verifier = torch.Generator()
        verifier.set_state(draft.get_state())
        drafted = float(torch.rand(3, generator=draft)[0])
        yield drafted * float(torch.rand((), generator=verifier))


def two_random_objects(seed: int) -> Iterator[float]:
    draft, verifier = random.Random(seed), random.Random(seed)
    while True:
        drafted = draft.random()
        yield drafted * verifier.random()


def noise_again(seed: int) -> Iterator[float]:
    """The noise of a race, drawn anew from the state in which it was drawn for the draft."""
    coins = torch.Generator().manual_seed(seed)
    while True:
        state = coins.get_state()
        drafted = torch.empty(5).exponential_(generator=coins)
        coins.set_state(state)
        recovered = torch.empty(5).exponential_(generator=coins)
        yield float((drafted + recovered)[0]) / 20


SHARING = [
    two_torch_generators, torch_seeded_before_each_draw, torch_seeded_for_each_token, two_numpy_generators,
    state_taken_over, two_random_objects, noise_again,
]  # fmt: skip


@pytest.mark.parametrize("make", SHARING, ids=lambda make: make.__name__)
def test_numbers_read_twice_are_a_finding(make: Callable[[int], Iterator[float]]) -> None:
    (finding,) = verdict_of(drawing(make), PLAIN).findings
    assert finding.invariant == NAME
    assert [line for line in finding.said if f"in {make.__name__}: " in line]


def one_random_object(seed: int) -> Iterator[float]:
    coins = random.Random(seed)
    while True:
        yield step_of(coins.random, coins.random) / 2


def generators_apart(seed: int) -> Iterator[float]:
    return two_torch_generators(seed, 1)


def all_libraries_on_one_seed(seed: int) -> Iterator[float]:
    torch.manual_seed(seed)
    np.random.seed(seed)  # noqa: NPY002
    random.seed(seed)
    while True:
        drafted = float(torch.rand(()))
        yield drafted * np.random.rand() * random.random()  # noqa: NPY002


def keyed_by_position(seed: int) -> Iterator[float]:
    """Three numbers a step, each by its position; one is used, the others are read again for the next step."""
    for position in range(10**6):
        ahead = [torch.Generator().manual_seed(1000 * seed + position + depth) for depth in range(3)]
        numbers = [float(torch.rand((), generator=coins)) for coins in ahead]
        yield numbers[0]


def offsets_keyed_by_position(seed: int) -> Iterator[float]:
    """The same from one stream, in which the numbers of a step begin one further than those of the step before."""
    for position in range(10**6):
        coins = np.random.PCG64(seed).advance(position)
        yield float(np.random.Generator(coins).random(3)[0])


def new_seed_for_each_step(seed: int) -> Iterator[float]:
    for step in range(10**6):
        draft, verifier = np.random.default_rng([seed, step, 0]), np.random.default_rng([seed, step, 1])
        yield step_of(verifier.random, draft.random) / 2


def weights_of_a_new_model(seed: int) -> Iterator[float]:
    """A draft that is made within the call, on the seed of the request; its weights decide no token."""
    with torch.random.fork_rng(devices=[]):
        torch.manual_seed(seed)
        torch.nn.Linear(4, 4)
        torch.randn(3)
    torch.manual_seed(seed)
    while True:
        yield float(torch.rand(()))


def empty_draws(seed: int) -> Iterator[float]:
    coins = torch.Generator().manual_seed(seed)
    while True:
        torch.rand(0, generator=coins)
        yield float(torch.rand((), generator=coins))


APART = [
    one_random_object, generators_apart, all_libraries_on_one_seed, keyed_by_position, offsets_keyed_by_position,
    new_seed_for_each_step, weights_of_a_new_model, empty_draws,
]  # fmt: skip


@pytest.mark.parametrize("seed", [0, 3])
@pytest.mark.parametrize("make", APART, ids=lambda make: make.__name__)
def test_numbers_read_once_are_none(make: Callable[[int], Iterator[float]], seed: int) -> None:
    verdict = verdict_of(drawing(make), with_seed(seed, PLAIN))
    assert verdict.findings == ()
    assert verdict.outcomes == {NAME: "checked"}
    assert verdict.compared[NAME] >= 5


def test_speculation_whose_generators_have_one_seed_is_told_with_both_places() -> None:
    (finding,) = verdict_of(black_boxes.shared).findings
    first, again = (line for line in finding.said if line.startswith("torch."))
    assert first == "torch.multinomial by a torch.Generator seeded 3, read first in"
    assert again == "torch.rand by a torch.Generator seeded 3, again in"
    assert any("in drawn: return int(torch.multinomial(weights" in line for line in finding.said)
    assert any("in chain: if float(torch.rand((), generator=coins))" in line for line in finding.said)
    text = account(finding)
    assert text.startswith("Two draws for different purposes read the same random numbers (drawn, then chain): ")
    assert "same_seed" in text


@pytest.mark.parametrize("name", ["right", "apart", "open_assisted"])
def test_right_speculation_is_checked(name: str) -> None:
    for seed in (0, 1):
        assert verdict_of(getattr(black_boxes, name), with_seed(seed)).outcomes == {NAME: "checked"}


def test_shared_numbers_are_declared_by_the_promise_that_needs_them() -> None:
    assert verdict_of(told_boxes.coupled(shifted=False)).outcomes == {NAME: "not_applicable"}
    assert verdict_of(told_boxes.coupled(shifted=False, promised=False)).outcomes == {NAME: "failed"}


def test_without_a_draw_that_can_be_seen_it_is_unobserved() -> None:
    def generate(prompt_ids: list[int], max_new_tokens: int, temperature: float) -> list[int]:
        return [1] * max_new_tokens

    assert verdict_of(blackbox(generate), PLAIN).outcomes == {NAME: "unobserved"}


def test_a_run_that_breaks_where_it_is_watched_is_unobserved() -> None:
    def generate(prompt_ids: list[int], max_new_tokens: int, temperature: float) -> list[int]:
        if np.random.Generator.__module__ != "numpy.random._generator":
            raise RuntimeError
        return [1] * max_new_tokens

    assert verdict_of(blackbox(generate), PLAIN).outcomes == {NAME: "unobserved"}


def test_a_sampler_in_our_engine_has_draws_of_its_own() -> None:
    case = replace(CASE, sampling=Sampling(2.5, draws="with-replacement", seed=3))
    assert verdict_of(plain.open_sampler, case).outcomes == {NAME: "checked"}


def test_recording_leaves_nothing_behind_and_changes_no_token() -> None:
    box, draws = black_boxes.right(), list[Draw]()
    before = (np.random.default_rng, np.random.Generator, random.Random.random, torch.rand)
    assert recording_run(box.run, draws)(CASE) == box.run(CASE)
    assert draws
    assert before == (np.random.default_rng, np.random.Generator, random.Random.random, torch.rand)


def test_the_engines_process_answers_with_the_record(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(sys, "path", [*sys.path, str(STRANGERS)])
    served = Served({"backend": "black_boxes:shared", "fault": None, "mode": None, "threads": 0})
    kind, trace, is_changed, *_ = served.answer(("watch", CASE))
    assert (kind, is_changed) == ("told", False)
    assert trace.draws
    assert pickle.loads(pickle.dumps(trace)).draws == trace.draws
    assert served.answer(("run", CASE))[1].draws is None


@pytest.mark.slow
def test_the_record_crosses_from_the_engines_process(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(sys, "path", [*sys.path, str(STRANGERS)])
    with Isolated(BackendSpec("black_boxes:shared")) as apart:
        verdict = judge(CASE, (BY_NAME[NAME],), Oracle(), apart.subject())
    assert verdict.outcomes == {NAME: "failed"}


def test_a_run_of_sampled_cases_is_red(monkeypatch: pytest.MonkeyPatch, tmp_path: Path) -> None:
    code, result = diff(monkeypatch, tmp_path, "shared", 0, "--focus", "distribution", "--invariant", NAME)
    assert code == 1
    assert NAME in {finding["invariant"] for finding in result["findings"]}


def draw(offset: int, size: int = 1, site: str = "here", stream: str = "s") -> Draw:
    return Draw(stream, offset, size, (site,))


@pytest.mark.parametrize(
    ("draws", "pair"),
    [
        ([(0, 3, "a"), (3, 1, "b")], None),
        ([(0, 3, "a"), (2, 1, "b")], (0, 1)),
        ([(2, 1, "a"), (9, 1, "b"), (0, 3, "b")], (0, 2)),
        ([(0, 100, "a"), (200, 1, "a"), (99, 1, "b")], (0, 2)),
        ([(0, 3, "a"), (0, 0, "b")], None),
        ([(0, 1, "a"), (0, 1, "a")], (0, 1)),
        ([(0, 3, "a"), (1, 3, "a"), (3, 3, "a")], None),
        ([(0, 1, "a"), (1, 1, "a"), (1, 1, "a"), (2, 1, "a"), (2, 1, "a")], None),
        ([(0, 1, "a"), (1, 1, "a"), (1, 1, "a"), (1, 1, "a")], (1, 3)),
        ([(0, 1, "a"), (1, 1, "a"), (0, 1, "a")], (0, 2)),
    ],
)
def test_places(draws: list[tuple[int, int, str]], pair: tuple[int, int] | None) -> None:
    record = tuple(draw(*arguments) for arguments in draws)
    reread = first_reread(record)
    assert reread == (None if pair is None else (record[pair[0]], record[pair[1]]))


def test_equal_offsets_of_other_streams_are_other_numbers() -> None:
    assert first_reread((draw(0, site="a"), draw(0, site="b", stream="t"))) is None
