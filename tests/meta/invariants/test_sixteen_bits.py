"""16 bits: drawn by default, single entries bounded, and plain decode held to its dtype over a run."""

from collections.abc import Callable
from dataclasses import replace
from functools import cache
from itertools import islice

import numpy as np
import pytest
from hypothesis import strategies as st

from specverify.backends.compositions import open_cpu
from specverify.backends.shipped import ROWS
from specverify.campaign.case_stream import Stream
from specverify.plan import default_dtypes
from specverify.properties import run_statistics
from specverify.properties.run_statistics import DEVIATION, MEAN, exactness, excess_error
from specverify.properties.strategies.cases import HALVES, working_dtypes
from specverify.properties.strategies.models import GALLERY
from specverify.properties.strategies.settings import explore
from specverify.properties.tally import Tally
from specverify.properties.tolerance.bounds import FEWEST, UNIT, entries_beyond, largest, rotation_error
from specverify.properties.verdict.finding import ControlError
from specverify.properties.verdict.judge import judge
from specverify.properties.verdict.subject import Subject
from specverify.reference.architecture import Seeded
from specverify.reference.case import Case
from specverify.reference.draft import Scripted
from specverify.reference.sampling import Stops
from specverify.reference.trace import Array, Step, Trace
from specverify.reference.tree import Tree
from specverify.reports.pages.summary import summary_page
from specverify.reports.record import summary
from specverify.setup.subjects import subject_of
from tests.corruption import BY_NAME, ORACLE
from tests.tiers import first

CLOSE = (BY_NAME["attention.context-exact"],)

FAMILIES = ("llama", "qwen2", "qwen3", "mistral", "pangu")
SINGLE = tuple(arch for arch in GALLERY if arch.family in FAMILIES and arch.vocab_size >= 16)
"""Architectures whose rows of logits are long enough that the largest error has a bound."""


def test_every_shipped_backend_draws_16_bits_by_default() -> None:
    assert all(set(HALVES) <= set(default_dtypes(row.name)) for row in ROWS)


@pytest.mark.parametrize("dtypes", [default_dtypes("cpu-eager"), ("float32", *HALVES)])
def test_no_dtype_is_absent(dtypes: tuple[str, ...]) -> None:
    drawn = set()
    explore(3, 200, st.tuples(working_dtypes(dtypes), st.integers()), lambda pair: drawn.add(pair[0]))
    assert drawn == set(dtypes)


def test_a_run_of_the_default_backend_judges_16_bits() -> None:
    drawn = islice(Stream(5, default_dtypes("cpu-eager")), 20)
    assert {case.dtype for case in drawn} & set(HALVES)


@cache
def case_on(number: int, dtype: str = "bfloat16") -> Case:
    """A case on an architecture of SINGLE, with a tree in its first step."""
    model = Seeded(SINGLE[number % len(SINGLE)], number // len(SINGLE))
    draw = np.random.default_rng(number)
    prompt = tuple(int(token) for token in draw.integers(0, model.vocab_size, 9))
    drafted = (int(token) for token in draw.integers(0, model.vocab_size, 3))
    return Case(model, prompt, Scripted((Tree((0, 0, 0, 1), (prompt[-1], *drafted)),)), stops=Stops(4), dtype=dtype)


def rewrite_steps(change: Callable[[Step], Step]) -> Subject:
    """Our engine with each step of each run changed by `change`."""
    clean = open_cpu()

    def run(case: Case) -> Trace:
        trace = clean.run(case)
        return replace(trace, steps=tuple(change(step) for step in trace.steps))

    return Subject("rewritten", run, subject_of(clean).reveals)


def with_logits(change: Callable[[Array], Array], trees_alone: bool) -> Subject:
    """Our engine with the logits of each step changed; of steps with a tree if `trees_alone`."""

    def change_step(step: Step) -> Step:
        bare = step.drafted is not None and len(step.drafted.tree) == 1
        if step.scored is None or (trees_alone and bare):
            return step
        return replace(step, scored=replace(step.scored, logits=change(step.scored.logits)))

    return rewrite_steps(change_step)


def lower_entries(logits: Array) -> Array:
    """One entry of each row, lowered by a quarter of the row's rms."""
    changed: Array = logits.copy()
    token = logits.shape[1] // 2
    changed[:, token] -= 0.25 * np.sqrt(np.mean(np.square(logits), axis=1))
    return changed


def of_five_bits(logits: Array) -> Array:
    """The logits rounded to 5 significant bits."""
    mantissa, exponent = np.frexp(logits)
    rounded: Array = np.ldexp(np.round(mantissa * 32) / 32, exponent)
    return rounded


@pytest.mark.parametrize("dtype", first(HALVES, 1))
def test_one_lowered_entry_of_a_row_is_found(dtype: str) -> None:
    wrong, clean = with_logits(lower_entries, trees_alone=True), subject_of(open_cpu())
    finding_lists = [judge(case_on(number, dtype), CLOSE, ORACLE, wrong).findings for number in range(len(SINGLE))]
    assert not any(judge(case_on(number, dtype), CLOSE, ORACLE, clean).findings for number in range(len(SINGLE)))
    # The rms of a row alone would find none of them: the quarter lies at the limit of a row of some ten entries.
    assert all(finding_lists)
    assert {finding.where["token"] for findings in finding_lists for finding in findings} <= {
        arch.vocab_size // 2 for arch in SINGLE
    }


def run_of(subject: Subject, count: int, dtype: str) -> Tally:
    """The tally of the first `count` cases."""
    tally = Tally("cpu-eager", opened=True, wanted=count)
    for number in range(count):
        tally.add(judge(case_on(number, dtype), CLOSE, ORACLE, subject))
    tally.excess_error = excess_error(tally.control_errors)
    return tally


def test_scores_of_five_significant_bits_make_a_run_red() -> None:
    tally = run_of(with_logits(of_five_bits, trees_alone=False), 20, "bfloat16")
    assert not tally.failures
    assert tally.excess_error is not None
    assert tally.excess_error.startswith("plain decode in bfloat16 is less exact than its dtype")
    assert tally.exit_code == 1
    assert "less exact than its" in summary_page(tally, verbose=True)
    assert summary(tally)["excess_error"] == tally.excess_error


@pytest.mark.parametrize("dtype", list(MEAN))
def test_the_right_engine_is_as_exact_as_its_dtype(dtype: str) -> None:
    tally = run_of(subject_of(open_cpu()), 12, dtype)
    assert tally.exit_code == 0, tally.excess_error
    by_quantity = {exactness_row.quantity: exactness_row for exactness_row in exactness(tally.control_errors)}
    assert set(by_quantity) == {"logits", "attended"}
    for exactness_row in by_quantity.values():
        assert 0.5 < exactness_row.times < 1.7
        assert exactness_row.prompts == 12
        assert exactness_row.targets == len(SINGLE[:12])
    assert "exactness" in summary_page(tally, verbose=True)


def errors(mean: float, targets: int, prompts: int = 3, seed: int = 0) -> list[ControlError]:
    draw = np.random.default_rng(seed)
    return [
        ControlError("bfloat16", str(target), "logits", float(np.exp(draw.normal(mean, DEVIATION))))
        for target in range(targets)
        for _ in range(prompts)
    ]


def test_the_usual_error_condemns_no_run_and_twice_that_does() -> None:
    usual = MEAN["bfloat16"]
    for seed in range(200):
        assert excess_error(errors(usual, 20, seed=seed)) is None
    assert excess_error(errors(usual + np.log(2), 20)) is not None
    assert excess_error([]) is None


def test_a_run_of_many_targets_knows_the_usual_error_no_better_than_a_short_one(
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    usual = MEAN["bfloat16"]
    of_a_machine = errors(usual + np.log(1.15), 400)
    assert excess_error(of_a_machine) is None
    assert excess_error(errors(usual + np.log(1.5), 400)) is not None
    monkeypatch.setattr(run_statistics, "KNOWN_WITHIN", 1.0)
    assert excess_error(of_a_machine) is not None


@pytest.mark.parametrize("ratio", [1e6, float("inf"), float("nan")])
def test_two_targets_alone_condemn_no_run(ratio: float) -> None:
    far = [ControlError("float16", str(target), "logits", ratio) for target in range(3)]
    assert excess_error(far[:2]) is None
    assert excess_error(far) is not None
    # Error of zero is no evidence of anything but exactness.
    assert excess_error([replace(control_error, ratio=0.0) for control_error in far]) is None


def test_normal_rows_have_no_entry_beyond_its_bound() -> None:
    draw = np.random.default_rng(2)
    for count in (8, 16, 64, 1000):
        true = draw.normal(0, 1, (400, count))
        noise = draw.normal(0, 0.01, true.shape) * draw.lognormal(0, 1, (400, 1))
        assert not list(entries_beyond(true + noise, true, 0.01))


@pytest.mark.parametrize("count", [16, 64, 1000])
def test_one_entry_is_found_and_named(count: int) -> None:
    draw = np.random.default_rng(3)
    true = draw.normal(0, 1, (5, count))
    rows = true + draw.normal(0, 0.01, true.shape)
    column = int(np.abs(true[3]).argmin())
    rows[3, column] -= 1.2 * largest(count) * 0.01 * np.sqrt(2)
    ((place, measure),) = entries_beyond(rows, true, 0.01)
    assert place == (3, column)
    assert 1 < measure < 3


def test_an_entry_that_outweighs_its_row_is_rounded_in_proportion() -> None:
    draw = np.random.default_rng(4)
    true = draw.normal(0, 1, (6, 64))
    true[:, 7] *= 60
    rows = true * (1 + 0.005 * draw.normal(0, 1, true.shape))
    assert not list(entries_beyond(rows, true, 0.005))
    rows[2, 8] += 0.4 * np.sqrt(np.mean(np.square(true[2])))
    assert [place for place, _ in entries_beyond(rows, true, 0.005)] == [(2, 8)]


def rotate_keys(keys: Array, positions: Array, dtype: type) -> Array:
    """Keys [positions, 64] turned by angles of this dtype, pair (i, i + 32) at frequency 100,000^(-i / 32)."""
    frequencies: Array = (100_000.0 ** (-np.arange(32) / 32)).astype(dtype)
    angles: Array = positions.astype(dtype)[:, None] * frequencies
    cosine, sine = (turn(angles.astype(np.float64)) for turn in (np.cos, np.sin))
    first, second = keys[:, :32], keys[:, 32:]
    return np.concatenate([first * cosine - second * sine, second * cosine + first * sine], axis=1)


def test_a_key_turned_by_rounded_angles_is_within_what_is_granted_and_a_wrong_entry_is_not() -> None:
    """SmolLM2's first layer has keys of 8 in one channel, beside which the rms of others says little."""
    draw = np.random.default_rng(6)
    positions = np.arange(2000)
    keys = draw.normal(0, 1, (2000, 64))
    keys[:, 1] += 8
    true, rows = rotate_keys(keys, positions, np.float64), rotate_keys(keys, positions, np.float32)
    sigma = 4 * UNIT["float32"]
    assert list(entries_beyond(rows, true, sigma)), "the noise alone does not explain rounded angles"
    granted = rotation_error(true, 0, "float32")
    assert np.all(np.abs(rows - true) <= granted + 1e-12)
    assert not list(entries_beyond(rows, true, sigma, granted))
    rows[40, 33] += 1e-3
    assert [place for place, _ in entries_beyond(rows, true, sigma, granted)] == [(40, 33)]
    assert rotation_error(true, 7, "float64").max() < 1e-10


def test_short_rows_and_broken_rows_are_left_to_the_rms() -> None:
    true = np.zeros((2, FEWEST - 1))
    assert not list(entries_beyond(true + np.eye(2, FEWEST - 1), true, 1e-3))
    broken = np.zeros((1, 64))
    broken[0, 0] = np.nan
    assert not list(entries_beyond(broken, np.zeros((1, 64)), 1e-3))
