"""E-values, the screen, plans, the gate and cells: valid to the letter, and strong enough to catch what is planted."""

import itertools
import math
from collections.abc import Callable, Iterator
from decimal import Decimal, localcontext

import numpy as np
import pytest
from scipy.stats import chi2, power_divergence

from specverify.properties.laws.sampled.cells import (
    IMPOSSIBLE,
    MERGED,
    Block,
    counts_of,
    judge_blocks,
    partitions,
    tally,
)
from specverify.properties.laws.sampled.evalue import CONCENTRATIONS, log_evalue
from specverify.properties.laws.sampled.gate import culprits, log_bar
from specverify.properties.laws.sampled.screen import (
    Betting,
    Outcome,
    Plan,
    g_test,
    noncentrality,
    plan,
    play,
    samples_for,
    smallest_tv,
)
from specverify.reference.trace import Array
from tests.measure.calibration import calibrate, is_red, run_is_red

UNIFORM = np.full(8, 0.125)


def tilted_law(tv: float) -> Array:
    """The law over 8 cells that lies `tv` from uniform and is hardest to see: |P - p| proportional to p."""
    return UNIFORM * (1.0 + 2.0 * tv * np.array([1, -1] * 4))


# --- the e-value -----------------------------------------------------------------------------------------------------


def one_by_one(outcomes: list[int], p: Array) -> float:
    """Log of the e-value as a bettor earns it: every outcome pays its predicted over its claimed probability."""
    total = 0.0
    for c in CONCENTRATIONS:
        wealth, counts = 1.0, np.zeros(len(p))
        for n, cell in enumerate(outcomes):
            wealth *= (c * p[cell] + counts[cell]) / (c + n) / p[cell]
            counts[cell] += 1
        total += wealth / len(CONCENTRATIONS)
    return math.log(total)


@pytest.mark.parametrize("p", [[0.5, 0.3, 0.2], [1e-12, 0.4, 0.6 - 1e-12], [0.999, 0.0005, 0.0005]])
def test_the_evalue_is_what_a_bettor_earns(p: list[float]) -> None:
    outcomes = [0, 1, 1, 2, 0, 1, 2, 2, 1]
    counts = np.bincount(outcomes, minlength=3)
    assert float(log_evalue(counts, np.array(p))) == pytest.approx(one_by_one(outcomes, np.array(p)), abs=1e-9)


def test_its_mean_is_exactly_one() -> None:
    p, n = np.array([0.62, 0.37, 0.01]), 7
    rows = np.array([x for x in itertools.product(range(n + 1), repeat=3) if sum(x) == n])
    ways = np.array([math.factorial(n) / math.prod(math.factorial(int(count)) for count in row) for row in rows])
    weight = ways * np.prod(p**rows, axis=1)
    assert float((weight * np.exp(log_evalue(rows, p))).sum()) == pytest.approx(1.0, abs=1e-8)
    # Against a law it was not made for, the mean is another.
    assert float((weight * np.exp(log_evalue(rows, np.array([0.37, 0.62, 0.01])))).sum()) > 1.05


def log_gamma(z: Decimal) -> Decimal:
    """Stirling's series to 40 digits."""
    shift = Decimal(0)
    while z < 60:
        shift, z = shift + z.ln(), z + 1
    numbers = [(1, 6), (-1, 30), (1, 42), (-1, 30), (5, 66), (-691, 2730), (7, 6)]
    tail = sum(
        (Decimal(a) / b / (2 * k * (2 * k - 1) * z ** (2 * k - 1)) for k, (a, b) in enumerate(numbers, 1)), Decimal(0)
    )
    half = Decimal("0.91893853320467274178032973640562")
    return Decimal((z - Decimal("0.5")) * z.ln() - z + half + tail - shift)


def test_it_keeps_its_digits_at_a_hundred_million_samples() -> None:
    p = [1e-12, 1e-6, 0.3, 0.7 - 1e-6 - 1e-12]
    x = [2, 130, 30_003_000, 69_996_868]
    with localcontext() as context:
        context.prec = 40
        exact = [Decimal(probability) for probability in p]
        total = sum(exact, Decimal(0))
        exact = [probability / total for probability in exact]
        n, logs = Decimal(sum(x)), []
        for c in (Decimal(float(c)) for c in CONCENTRATIONS):
            each = [log_gamma(c * q + k) - log_gamma(c * q) - k * q.ln() for q, k in zip(exact, x, strict=True)]
            logs.append(log_gamma(c) - log_gamma(c + n) + sum(each, Decimal(0)))
        top = max(logs)
        expected = float(top + (sum(((log - top).exp() for log in logs), Decimal(0)) / len(logs)).ln())
    assert float(log_evalue(np.array(x), np.array(p))) == pytest.approx(expected, abs=2e-5)


def test_what_cannot_happen_is_infinite_evidence_at_once() -> None:
    p = np.array([[0.5, 0.5, 0.0], [0.5, 0.5, 0.0]])
    values = log_evalue(np.array([[500, 499, 1], [500, 500, 0]]), p)
    assert values[0] == np.inf
    assert values[1] < 0.5
    assert list(g_test(np.array([[500, 499, 1], [500, 500, 0]]), p)) == [0.0, 1.0]


@pytest.mark.parametrize("p", [[0.5, 0.6], [-0.1, 1.1], [math.nan, 1.0]])
def test_laws_that_are_none_are_refused(p: list[float]) -> None:
    with pytest.raises(ValueError, match="probabilit"):
        log_evalue(np.array([1, 1]), np.array(p))
    with pytest.raises(ValueError, match="count"):
        log_evalue(np.array([1.5, -1]), np.array([0.5, 0.5]))
    with pytest.raises(ValueError, match="cells"):
        log_evalue(np.array([1, 1, 1]), np.array([0.5, 0.5]))


def test_correct_samplers_earn_nothing() -> None:
    rng = np.random.default_rng(1)
    p = rng.dirichlet(np.ones(8), 2000)
    es = np.exp(log_evalue(rng.multinomial(3000, p), p))
    assert es.mean() <= 1.0 + 4.0 * es.std() / math.sqrt(len(es))
    assert (es >= 20).mean() <= 0.05
    assert (es >= 100).mean() <= 0.01


def test_looking_forty_times_breaks_a_p_value_and_not_an_e_value() -> None:
    rng = np.random.default_rng(2)
    counts = np.cumsum(rng.multinomial(100, UNIFORM, (1500, 40)), axis=1)
    rejected_by_p = (g_test(counts, UNIFORM) <= 0.01).any(axis=1).mean()
    rejected_by_e = (log_evalue(counts, UNIFORM) >= math.log(100)).any(axis=1).mean()
    assert rejected_by_p > 0.05
    assert rejected_by_e <= 0.01


# --- the screen ------------------------------------------------------------------------------------------------------


def test_the_screen_is_the_g_test() -> None:
    counts, p = np.array([130, 95, 75, 200]), np.array([0.25, 0.2, 0.15, 0.4])
    n = counts.sum()
    statistic = power_divergence(counts, n * p, lambda_="log-likelihood").statistic
    williams = 1.0 + ((1.0 / p).sum() - 1.0) / (6.0 * n * 3)
    assert float(g_test(counts, p)) == pytest.approx(float(chi2.sf(statistic / williams, 3)), rel=1e-10)


def test_the_screen_holds_its_level_where_cells_are_sparse() -> None:
    rng = np.random.default_rng(3)
    p = np.sort(rng.dirichlet(np.full(64, 0.3), 8000), axis=1)
    counts = rng.multinomial(400, p)
    pooled, raw = g_test(counts, p), g_test(counts, p, least=0.0)
    for alpha in (0.5, 0.05, 0.01):
        assert abs((pooled <= alpha).mean() - alpha) < 5.0 * math.sqrt(alpha / len(p)) + 0.15 * alpha
    # Without pooling the chi-square limit is off, which is why there is pooling.
    assert abs((raw <= 0.5).mean() - 0.5) > 0.1


def test_the_screen_of_nothing_passes() -> None:
    assert float(g_test(np.zeros(8), UNIFORM)) == 1.0
    assert float(g_test(np.array([5, 0]), np.array([1.0, 0.0]))) == 1.0


# --- plans -----------------------------------------------------------------------------------------------------------

TABLE = {
    1e-3: (31.5, 37.9, 45.4, 55.2, 68.5, 87.0, 149, 272),
    1e-6: (52.1, 59.5, 68.5, 80.8, 97.9, 122, 203, 364),
    1e-9: (71.2, 79.1, 89.2, 103, 123, 151, 246, 435),
    1e-12: (89.4, 97.8, 109, 124, 146, 177, 283, 495),
}


@pytest.mark.parametrize("alpha", TABLE)
def test_the_table_of_noncentralities(alpha: float) -> None:
    for df, table_value in zip((1, 3, 7, 15, 31, 63, 255, 1023), TABLE[alpha], strict=True):
        assert noncentrality(df, alpha, 0.99) == pytest.approx(table_value, abs=0.05 if table_value < 100 else 0.6)


@pytest.mark.parametrize(
    ("cells", "tv", "unit"),
    [(8, 0.1, 2230), (8, 0.05, 8920), (8, 0.02, 55745), (8, 0.01, 222977), (64, 0.05, 15065), (64, 0.01, 376605)],
)
def test_samples_and_total_variation_are_inverse(cells: int, tv: float, unit: int) -> None:
    n = samples_for(cells, tv, 1e-9)
    assert n == pytest.approx(1.25 * unit, abs=2)
    assert smallest_tv(cells, n, 1e-9) == pytest.approx(tv, rel=3e-4)
    assert smallest_tv(cells, 2, 1e-9) == 1.0
    assert smallest_tv(1, samples_for(1, tv, 1e-9), 1e-9) == pytest.approx(tv, rel=0.01)


def test_plans_that_show_nothing_are_refused() -> None:
    for broken in (lambda: plan(8, 0.0, 10), lambda: samples_for(8, 1.5, 1e-9), lambda: noncentrality(0, 1e-9)):
        with pytest.raises(ValueError, match=r"variation|degrees"):
            broken()


def test_a_bias_is_caught_by_the_samples_that_the_plan_states() -> None:
    rng = np.random.default_rng(4)
    n = samples_for(8, 0.05, 1e-9)
    caught = log_evalue(rng.multinomial(n, tilted_law(0.05), 200), UNIFORM) >= math.log(1e9)
    assert caught.mean() >= 0.97
    missed = log_evalue(rng.multinomial(n // 3, tilted_law(0.05), 200), UNIFORM) >= math.log(1e9)
    assert missed.mean() < 0.1


# --- screen, then bet ------------------------------------------------------------------------------------------------


def sampler(seed: int, p: Array) -> Callable[[int], Array]:
    rng = np.random.default_rng(seed)
    return lambda n: rng.multinomial(n, p)


def screen_then_bet(draw: Callable[[int], Array], p: Array, plan: Plan) -> Outcome:
    """Test one law: `draw(n)` gives the counts [cells] of n more samples."""
    return play([Betting(p, plan)], lambda n: [draw(n)])[0]


def test_screen_then_bet_catches_passes_and_suspects() -> None:
    how = plan(8, 0.05, tests=1000)
    clean = [screen_then_bet(sampler(seed, UNIFORM), UNIFORM, how) for seed in range(200)]
    assert {outcome.verdict for outcome in clean} <= {"pass", "suspect"}
    assert sum(outcome.verdict == "pass" for outcome in clean) >= 197
    assert {outcome.n for outcome in clean if outcome.verdict == "pass"} == {how.first}
    assert clean[0].smallest_tv == pytest.approx(0.05, rel=0.02)
    biased = [screen_then_bet(sampler(seed, tilted_law(0.05)), UNIFORM, how) for seed in range(100)]
    assert sum(outcome.verdict == "fail" for outcome in biased) >= 97
    assert all(outcome.log_e >= how.log_bar for outcome in biased if outcome.verdict == "fail")
    halved = [screen_then_bet(sampler(seed, tilted_law(0.025)), UNIFORM, how) for seed in range(100)]
    given_up = [outcome for outcome in halved if outcome.verdict == "suspect"]
    assert given_up
    assert all(how.most <= outcome.n < how.most + how.chunk and outcome.log_e < how.log_bar for outcome in given_up)


def test_an_impossible_outcome_fails_in_the_first_chunk() -> None:
    p = np.append(UNIFORM, 0.0)
    ended = screen_then_bet(sampler(0, np.append(UNIFORM * 0.999, 0.001)), p, plan(8, 0.05, tests=1000))
    assert (ended.verdict, ended.log_e) == ("fail", np.inf)
    assert math.isnan(ended.p_screen)


def test_a_test_that_stopped_takes_no_more() -> None:
    how = plan(8, 0.05, tests=10)
    bet = Betting(UNIFORM, how)
    with pytest.raises(ValueError, match="goes on"):
        bet.outcome()
    assert bet.add(np.full(8, how.first // 16)) is None
    assert bet.add(np.full(8, how.first // 16 + 1)) == "pass"
    assert bet.wants == 0
    with pytest.raises(ValueError, match="stopped"):
        bet.add(np.ones(8))


def test_too_few_trials_are_said_to_show_little() -> None:
    rare = Betting(UNIFORM, plan(8, 0.05, tests=10), share=0.01)
    rng = np.random.default_rng(5)
    (ended,) = play([rare], lambda n: [rng.multinomial(rng.binomial(n, 0.01), UNIFORM)], most=10_000)
    assert ended.verdict == "pass"
    assert 50 < ended.n < 150
    # The bet would have had no more than these either, so it is the bet that sets what they show.
    assert ended.smallest_tv == pytest.approx(smallest_tv(8, 100, 1e-7, 0.995), rel=0.1)
    assert ended.smallest_tv > 0.4


# --- the gate --------------------------------------------------------------------------------------------------------


def test_one_test_alone_makes_a_run_red_whatever_the_others_say() -> None:
    bar = log_bar(100, 1e-6)
    assert bar == pytest.approx(math.log(1e8 / 0.9))
    # Tests without any evidence ruin the player who stakes on all of them, so that the mean alone decides.
    ruinous = np.full(99, -np.inf)
    assert is_red(np.append(ruinous, bar + 1e-9), 1e-6)
    assert not is_red(np.append(ruinous, bar - 0.01), 1e-6)
    assert is_red(np.append(ruinous, np.inf))
    assert not is_red(np.zeros(100), 1e-6)
    assert not is_red(np.array([]))
    assert not is_red(np.full(3, -np.inf))


def test_little_evidence_in_every_test_makes_a_run_red() -> None:
    small = np.full(40, math.log(2.0))
    assert is_red(small), "a player who stakes on each doubles the money nearly forty times"
    assert not is_red(small[:20])
    assert not is_red(np.concatenate([small, np.full(40, math.log(0.4))])), "half of them say the reverse"


def test_a_run_over_a_correct_backend_is_red_as_seldom_as_it_promises() -> None:
    rng = np.random.default_rng(5)
    # Log-normal e-values of mean 1: some tests have power and some have little.
    spread = rng.choice([0.3, 1.0, 2.0], size=(5_000, 25))
    log_es = rng.normal(-(spread**2) / 2, spread)
    assert np.mean([is_red(log_e, 0.01) for log_e in log_es]) <= 0.01


def test_the_gate_refuses_what_is_no_evidence() -> None:
    with pytest.raises(ValueError, match="NaN"):
        is_red(np.array([0.0, np.nan]))
    with pytest.raises(ValueError, match="planned"):
        is_red(np.zeros(3), tests=2)
    with pytest.raises(ValueError, match="no bar"):
        log_bar(0)


def test_culprits_are_named_the_strongest_first() -> None:
    log_es = np.array([0.0, math.log(4e7), -3.0, np.inf, math.log(1e6)])
    assert culprits(log_es, 1e-6) == (3, 1)
    assert culprits(np.zeros(5)) == ()
    assert culprits(np.full(4, math.log(1e6)), 1e-6) == (0, 1, 2, 3)


# --- cells -----------------------------------------------------------------------------------------------------------


def chain_law(p: dict[Block, Array], q: dict[Block, Array], fault: str = "") -> dict[Block, float]:
    """The law of one round of chain speculation over two drafted tokens, correct or with `fault`."""
    wide = len(p[()])

    def residual(block: Block) -> Array:
        weights = p[block] if fault == "bonus" else np.maximum(p[block] - q[block], 0.0)
        return weights / weights.sum() if weights.sum() > 0 else p[block]

    law: dict[Block, float] = {}

    def emit(block: Block, weight: float) -> None:
        law[block] = law.get(block, 0.0) + weight

    for a in range(wide):
        first = min(1.0, p[()][a] / q[()][a])
        for y in range(wide):
            emit((y,), q[()][a] * (1 - first) * residual(())[y])
        for b in range(wide):
            second = min(1.0, p[(a,)][b] / q[(a,)][b])
            both = min(first, second) if fault == "reused coin" else first * second
            for y in range(wide):
                emit((a, y), q[()][a] * q[(a,)][b] * (first - both) * residual((a,))[y])
                emit((a, b, y), q[()][a] * q[(a,)][b] * both * p[(a, b)][y])
    return law


def world(seed: int, wide: int = 4) -> Iterator[dict[Block, Array]]:
    rng = np.random.default_rng(seed)
    contexts = [context for depth in range(3) for context in itertools.product(range(wide), repeat=depth)]
    yield {context: rng.dirichlet(np.full(wide, 0.8)) for context in contexts}
    yield {context: rng.dirichlet(np.full(wide, 0.8)) for context in contexts}


def rounds(seed: int, law: dict[Block, float]) -> Callable[[int], Array]:
    rng = np.random.default_rng(seed)
    rows = np.array([[*block, *[-1] * (3 - len(block))] for block in law])
    weights = np.maximum(np.array(list(law.values())), 0.0)
    return lambda n: rows[rng.choice(len(rows), n, p=weights / weights.sum())]


def test_partitions_are_the_law_seen_from_several_sides() -> None:
    p, q = world(0)
    law = chain_law(p, q)
    assert sum(law.values()) == pytest.approx(1.0)
    split = {partition.name: partition for partition in partitions(law, 2)}
    assert list(split) == [
        "support",
        "first token",
        "first two tokens",
        "whole blocks",
        "number of tokens",
        "tokens given rejection at depth 1",
        "tokens given rejection at depth 2",
        "tokens given full acceptance",
    ]
    blocks = rounds(0, law)(40_000)
    for partition in split.values():
        counts = counts_of(blocks, partition)
        assert partition.p.sum() == pytest.approx(1.0)
        assert partition.labels[-1] == IMPOSSIBLE
        assert counts[-1] == 0
        assert partition.cells <= 64
        num_blocks = len(blocks) if not partition.length else int(((blocks >= 0).sum(axis=1) == partition.length).sum())
        assert counts.sum() == num_blocks
        assert num_blocks / len(blocks) == pytest.approx(partition.share, abs=0.01)
        assert np.abs(counts / num_blocks - partition.p).max() < 0.03
    # A lossless rule's first token is the target's; of two tokens, so is each second one given that there is one.
    first = split["first token"]
    assert [first.p[first.labels.index((token,))] for token in range(4)] == pytest.approx(list(p[()]))
    two = next(partition for partition in partitions(law, 2, least=0.0) if partition.name == "first two tokens")
    assert MERGED not in two.labels
    from_3 = np.array([two.p[two.labels.index((3, y))] for y in range(4)])
    assert from_3 / from_3.sum() == pytest.approx(p[(3,)])


def test_rare_blocks_are_merged_and_none_is_lost() -> None:
    rng = np.random.default_rng(6)
    weights = rng.dirichlet(np.full(1000, 0.05))
    law: dict[Block, float] = {
        (index // 100, index // 10 % 10, index % 10): float(weight) for index, weight in enumerate(weights)
    }
    whole_blocks = next(partition for partition in partitions(law, 2) if partition.name == "whole blocks")
    assert whole_blocks.cells <= 64
    assert whole_blocks.p.sum() == pytest.approx(1.0)
    assert sorted(whole_blocks.cell_of) == sorted(block for block, weight in law.items() if weight > 0)
    again = np.zeros(len(whole_blocks.p))
    for block, cell in whole_blocks.cell_of.items():
        again[cell] += law[block]
    assert again == pytest.approx(whole_blocks.p)
    alone = [label for label in whole_blocks.labels if label in law]
    assert len(alone) > 10
    assert min(law[label] for label in alone) >= 0.002


@pytest.mark.parametrize("law", [{(0,): 0.5}, {(0,): 1.5, (1,): -0.5}, {(0, 1, 1): 1.0}, {(): 1.0}, {(0,): math.nan}])
def test_blocks_without_a_law_are_refused(law: dict[Block, float]) -> None:
    with pytest.raises(ValueError, match="block"):
        partitions(law, 1)


def test_blocks_are_tallied_as_they_stand() -> None:
    rows = np.array([[3, -1, -1], [3, 1, -1], [3, -1, -1], [-1, -1, -1], [3, -1, 2], [0, 0, 0]])
    expected_counts = {(3,): 2, (3, 1): 1, (): 1, (3, -1, 2): 1, (0, 0, 0): 1}
    assert tally(rows) == expected_counts
    # Ids too large for one number a row go another way, to the same end.
    assert tally(np.where(rows == 3, 2**40, rows)) == {
        tuple(2**40 if token == 3 else token for token in block): times for block, times in expected_counts.items()
    }
    assert tally(np.zeros((0, 3), dtype=np.int64)) == {}


@pytest.mark.parametrize("seed", range(4))
def test_a_correct_black_box_is_quiet(seed: int) -> None:
    p, q = world(seed)
    law = chain_law(p, q)
    judged = judge_blocks(rounds(seed, law), law, 2, tests=1000)
    assert not run_is_red(judged, tests=1000)
    assert all(judgement.outcome.verdict != "fail" for judgement in judged)
    support = judged[0].outcome
    assert (support.verdict, support.log_e) == ("pass", 0.0)
    # It costs nothing to listen to what the others draw.
    assert support.n > max(judgement.outcome.n for judgement in judged[1:])
    assert support.smallest_tv < 1e-3


def test_a_bonus_from_the_wrong_law_is_red() -> None:
    p, q = world(0)
    judged = judge_blocks(rounds(1, chain_law(p, q, "bonus")), chain_law(p, q), 2, tests=1000)
    assert run_is_red(judged, tests=1000)
    failed = {judgement.partition.name for judgement in judged if judgement.outcome.verdict == "fail"}
    assert "tokens given rejection at depth 1" in failed


def test_a_reused_coin_shows_in_joint_and_conditional_cells_alone() -> None:
    p, q = world(1)
    judged = judge_blocks(rounds(2, chain_law(p, q, "reused coin")), chain_law(p, q), 2, tests=1000)
    failed = {judgement.partition.name for judgement in judged if judgement.outcome.verdict == "fail"}
    assert {"first two tokens", "whole blocks"} <= failed
    assert "first token" not in failed
    assert run_is_red(judged, tests=1000)


def test_an_impossible_block_is_red_in_its_first_chunk() -> None:
    p, q = world(0)
    law = chain_law(p, q)
    sound = rounds(3, law)

    def draw(n: int) -> Array:
        rows: Array = sound(n)
        rows[0] = [-1, -1, -1]
        return rows

    judged = judge_blocks(draw, law, 2, tests=10**6)
    support = judged[0]
    assert support.partition.name == "support"
    assert support.outcome.verdict == "fail"
    assert run_is_red(judged, tests=10**6)


# --- calibration -----------------------------------------------------------------------------------------------------


def test_calibration_of_correct_samplers() -> None:
    calibration = calibrate(2000, seed=7)
    assert calibration["mean_e"] <= 1.0 + 4.0 * calibration["standard_error"]
    assert all(tail["share"] <= tail["markov"] for tail in calibration["tails"])
    assert calibration["screen_ks"]["p_value"] > 1e-3
    assert not calibration["red"]
    assert calibration["failed"] == calibration["culprits"] == 0
    assert calibration["flagged"] <= 12
    assert {**calibration, "seconds": 0} == {**calibrate(2000, seed=7), "seconds": 0}


def test_calibration_shows_a_sampler_that_is_off() -> None:
    calibration = calibrate(200, seed=7, bias=0.05)
    assert calibration["red"]
    assert calibration["failed"] >= 195
    assert calibration["screen_ks"]["p_value"] < 1e-9
    with pytest.raises(ValueError, match="calibration"):
        calibrate(0)
