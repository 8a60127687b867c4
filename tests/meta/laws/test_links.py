"""Links: at most one on average under every law in the band, after any history, and quick to see a planted fault."""

import itertools
import math
from copy import deepcopy
from dataclasses import replace

import numpy as np
import pytest

from specverify.properties.laws.sampled.links import LINKS, Links, Trial, describe_bet, residual_band
from specverify.reference.trace import Array
from tests.tiers import first

Weighted = list[tuple[float, Trial]]


def softmax(logits: Array) -> Array:
    raised = np.exp(logits - logits.max())
    return np.asarray(raised / raised.sum())


def outcomes(p: Array, engine: Array, q: Array | None, noise: float, drafted: int | None = None) -> Weighted:
    """Every trial that an engine of law `engine` can make, with its probability; the oracle knows `p` alone."""
    weighted_trials: Weighted = []
    if q is None and drafted is None:
        return [(float(engine[y]), Trial(p, replacement=y, noise=noise)) for y in range(len(p))]
    for x in range(len(p)) if q is not None else [drafted]:
        assert x is not None
        proposed = 1.0 if q is None else float(q[x])
        accept = min(1.0, engine[x] / proposed)
        weighted_trials.append((proposed * accept, Trial(p, q, x, True, noise=noise)))
        residual = np.maximum(engine - (np.where(np.arange(len(p)) == x, np.inf, 0.0) if q is None else q), 0.0)
        residual = residual / residual.sum() if residual.sum() > 0 else residual
        weighted_trials += [
            (proposed * (1 - accept) * float(residual[y]), Trial(p, q, x, False, y, noise))
            for y in range(len(p))
            if residual[y]
        ]
    return weighted_trials


def worlds(seed: int, count: int, wide: int) -> list[tuple[Array, Array]]:
    rng = np.random.default_rng(seed)
    return [(softmax(rng.normal(0, 1.5, wide)), softmax(rng.normal(0, 1.5, wide))) for _ in range(count)]


def growth_of(after: Links, trials: Weighted) -> dict[str, float]:
    """The mean over `trials` of each link's e-value, over its value before."""
    before, mean = after.log_es, dict.fromkeys(LINKS, 0.0)
    for weight, trial in trials:
        grown_links = deepcopy(after)
        grown_links.add(trial)
        for link, value in grown_links.log_es.items():
            mean[link] += weight * math.exp(value - before[link]) if weight else 0.0
    return mean


def history(seed: int, count: int, wide: int) -> Links:
    """The links after some random trials, so that their roles and tilts have unequal weight."""
    rng, links = np.random.default_rng(seed), Links()
    for p, q in worlds(seed, count, wide):
        choices = outcomes(p, p, q, 0.0)
        weights = np.array([weight for weight, _ in choices])
        links.add(choices[int(rng.choice(len(choices), p=weights / weights.sum()))][1])
    return links


@pytest.mark.parametrize("seed", range(6))
def test_without_noise_the_mean_is_exactly_one_after_any_history(seed: int) -> None:
    after = history(seed, 5 * seed, 12)
    for p, q in worlds(100 + seed, 3, 12):
        assert list(growth_of(after, outcomes(p, p, q, 0.0)).values()) == pytest.approx([1.0] * 3, abs=1e-9)
        assert list(growth_of(after, outcomes(p, p, None, 0.0, 3)).values()) == pytest.approx([1.0] * 3, abs=1e-9)
        assert list(growth_of(after, outcomes(p, p, None, 0.0)).values()) == pytest.approx([1.0] * 3, abs=1e-9)


@pytest.mark.parametrize("noise", first([0.1, 0.01, 0.5], 1))
def test_no_law_in_the_band_exceeds_a_mean_of_one(noise: float) -> None:
    rng = np.random.default_rng(8)
    honest: list[float] = []
    naive: list[float] = []
    for seed, (p, q) in enumerate(worlds(9, 12, 10)):
        after = history(seed, 15, 10)
        # A corner of the band: every logit as far off as it may be.
        engine = softmax(np.log(p) + noise * rng.choice([-1.0, 1.0], len(p)))
        for law, drafted in ((q, None), (None, 2), (None, None)):
            honest += growth_of(after, outcomes(p, engine, law, noise, drafted)).values()
            naive += growth_of(after, outcomes(p, engine, law, 0.0, drafted)).values()
    assert max(honest) <= 1.0 + 1e-9
    # The same laws, taken for exact, would earn evidence: the band is needed, and this test sees it missing.
    assert max(naive) > 1.0 + noise / 20


def test_the_band_of_a_residual_holds_every_residual() -> None:
    rng = np.random.default_rng(10)
    touched = 0.0
    for p, q in worlds(11, 40, 8):
        noise = 0.2
        low, high = residual_band(p * np.exp(-2 * noise), p * np.exp(2 * noise), q)
        engine = softmax(np.log(p) + noise * rng.choice([-1.0, 1.0], len(p)))
        residual = np.maximum(engine - q, 0.0)
        residual /= residual.sum()
        assert (low <= residual + 1e-12).all()
        assert (residual <= high + 1e-12).all()
        touched = max(touched, float((residual - low)[residual > 0].min() / residual.max()))
        again = Trial(residual, low=low, high=high).band()
        assert again[0] is not None
        assert np.array_equal(again[1], high)
    exact = residual_band(p, p, q)
    assert exact[0] == pytest.approx(np.maximum(p - q, 0) / np.maximum(p - q, 0).sum())
    assert exact[0] == pytest.approx(exact[1])


# --- streams ---------------------------------------------------------------------------------------------------------


def draw_token(rng: np.random.Generator, law: Array) -> int:
    return min(int(np.searchsorted(np.cumsum(law), rng.random() * law.sum(), side="right")), len(law) - 1)


def trial(rng: np.random.Generator, wide: int, fault: str, noise: float) -> Trial:
    """One trial of a chain whose every context is new; a noisy engine's logits are off by sd noise / 4."""
    logits = rng.normal(0, 2, wide)
    claimed = logits + rng.normal(0, 0.7, wide)
    p, q = softmax(logits), softmax(claimed)
    engine = softmax(logits + np.clip(rng.normal(0, noise / 4, wide), -noise, noise)) if noise else p
    if fault == "leaning":
        engine = softmax(logits + noise * np.sign(claimed - logits))
    x = draw_token(rng, softmax(claimed / 0.9) if fault == "draft temperature" else q)
    ratio = q[x] / engine[x] if fault == "reversed ratio" else engine[x] / q[x]
    if (ratio >= 1.0) if fault == "hard" else (rng.random() < ratio):
        return Trial(p, q, x, True, noise=noise)
    residual = np.maximum(engine - q, 0.0)
    if fault == "argmax residual":
        return Trial(p, q, x, False, int(residual.argmax()), noise)
    return Trial(p, q, x, False, draw_token(rng, engine if fault == "bonus from p" else residual), noise)


def until(seed: int, wide: int, fault: str, noise: float, most: int, bar: float = 1e9) -> tuple[int, Links]:
    """Trials until the e-value of a stream reaches `bar`, or `most` + 1."""
    rng, links = np.random.default_rng(seed), Links()
    for count in range(1, most + 1):
        links.add(trial(rng, wide, fault, noise))
        if links.log_e >= math.log(bar):
            return count, links
    return most + 1, links


@pytest.mark.parametrize("noise", first([0.08, 0.0], 1))
@pytest.mark.parametrize(
    ("fault", "link", "most"),
    [
        ("bonus from p", "token", 300),
        ("argmax residual", "token", 200),
        ("reversed ratio", "accept", 150),
        ("hard", "accept", 200),
        ("draft temperature", "draft", 5000),
    ],
)
def test_a_fault_is_seen_in_its_own_link(fault: str, link: str, most: int, noise: float) -> None:
    for seed, wide in ((0, 512), (1, 1024), (2, 4096)):
        if fault == "draft temperature" and wide == 4096:
            continue
        count, links = until(seed, wide, fault, noise, most)
        assert count <= most
        assert max(links.log_es, key=lambda candidate: links.log_es[candidate]) == link


@pytest.mark.parametrize("noise", first([0.08, 0.0], 1))
def test_correct_streams_are_quiet(noise: float) -> None:
    ended = []
    for seed in range(8):
        count, links = until(seed, 512, "", noise, 250, bar=1e4)
        assert count == 251
        assert links.trials == 250
        ended.append(math.exp(links.log_e))
    assert np.mean(ended) <= 1.0 + 4.0 * np.std(ended) / math.sqrt(len(ended))


def test_noise_taken_for_exact_would_raise_an_alarm_that_the_band_does_not() -> None:
    values = {}
    for claimed in (0.0, 0.2):
        rng, links = np.random.default_rng(12), Links()
        for _ in range(600):
            links.add(replace(trial(rng, 512, "leaning", 0.2), noise=claimed))
        values[claimed] = links.log_e
    assert values[0.0] > math.log(1e6)
    assert values[0.2] < math.log(20)


def test_sure_drafts_have_two_links() -> None:
    rng, right, wrong = np.random.default_rng(13), Links(), Links()
    for _ in range(300):
        p = softmax(rng.normal(0, 2, 512))
        x = int(p.argmax())
        residual = np.where(np.arange(512) == x, 0.0, p)
        for links, accepted in ((right, rng.random() < p[x]), (wrong, rng.random() < p[x] ** 2)):
            links.add(Trial(p, None, x, True) if accepted else Trial(p, None, x, False, draw_token(rng, residual)))
    assert right.log_es["draft"] == wrong.log_es["draft"] == 0.0
    assert right.log_e < math.log(1e3)
    assert wrong.log_es["accept"] > math.log(1e9)


def test_what_cannot_happen_is_infinite_evidence_for_good() -> None:
    p, q = np.array([0.5, 0.5, 0.0]), np.array([1.0, 0.0, 0.0])
    for broken, link in (
        (Trial(p, q, 1, True), "draft"),
        (Trial(p, None, 0, False, 2), "token"),
        (Trial(p, None, 0, False, 0), "token"),
        (Trial(p, replacement=2, noise=0.5), "token"),
    ):
        links = Links()
        links.add(broken)
        links.add(Trial(p, None, 0, True))
        assert [name for name, value in links.log_es.items() if value == np.inf] == [link]
        assert links.log_e == np.inf


def test_rejecting_what_is_sure_of_acceptance_is_quick_evidence() -> None:
    p, q, links = np.array([0.6, 0.4]), np.array([0.5, 0.5]), Links()
    for _ in range(6):
        links.add(Trial(p, q, 0, False))
    assert links.log_es["accept"] > math.log(1e9)
    assert links.log_es["token"] == 0.0


@pytest.mark.parametrize(
    "broken",
    [
        Trial(np.array([0.5, 0.5]), None, 2, True),
        Trial(np.array([0.5, 0.5]), None, None, False, -1),
        Trial(np.array([0.5, 0.5]), None, 0, True, 1),
        Trial(np.array([0.5, 0.5]), None, None, True),
        Trial(np.array([0.5, 0.5]), np.array([0.5, 0.5]), None, False, 1),
        Trial(np.array([0.5, 0.6]), None, 0, True),
        Trial(np.array([0.5, np.nan]), None, 0, True),
        Trial(np.array([0.5, 0.5]), np.ones(3) / 3, 0, True),
        Trial(np.array([0.5, 0.5]), None, 0, True, noise=-1.0),
        Trial(np.array([0.5, 0.5]), None, 0, True, low=np.zeros(2)),
    ],
)
def test_trials_that_contradict_themselves_are_refused(broken: Trial) -> None:
    links = Links()
    with pytest.raises(ValueError, match=r"token|q has|probabilit|noise"):
        links.add(broken)
    assert links.trials == 0


def test_any_order_of_links_counts_equal() -> None:
    links = Links()
    assert links.log_es == dict.fromkeys(LINKS, 0.0)
    assert links.log_e == pytest.approx(0.0)
    p = np.array([0.25] * 4)
    for x, y in itertools.product(range(4), repeat=2):
        links.add(Trial(p, None, x, False, y if y != x else None))
    assert links.log_e > 0


@pytest.mark.parametrize("noise", [0.0, 0.05])
def test_no_bet_pays_more_than_one_on_average_under_any_law_of_the_band(noise: float) -> None:
    bets = np.array([[0.5, 1.2, 1.1, 0.9], [1.4, 0.3, 1.0, 0.2]])
    for p, other_law in worlds(17, 6, 4):
        for tilt in (-1.0, 0.0, 1.0):
            engine = softmax(np.log(p) + tilt * noise * np.sign(other_law - other_law.mean()))
            pays = np.zeros(len(bets))
            for token in range(4):
                links = Links({"two": 2})
                links.add(Trial(p, replacement=token, noise=noise, bets={"two": bets}))
                pays += engine[token] * np.exp(links.groups[0].log_es)
            assert (pays <= 1 + 1e-12).all()
    assert Links().groups == ()


def test_every_bet_has_words_for_the_event_that_it_is_about() -> None:
    links = Links()
    words = [describe_bet(number) for number in range(len(links.parts))]
    assert all(words)
    assert describe_bet(len(links.parts)) == ""
    assert len(set(words)) == 2 * 11
    sure = Trial(
        np.array([0.5, 0.5]), np.array([0.5, 0.5]), 0, False, 1, low=np.array([0.4, 0.4]), high=np.array([0.6, 0.6])
    )
    for _ in range(20):
        links.add(sure)
    best = describe_bet(int(np.argmax(links.parts)))
    assert best in (
        "drafted tokens are accepted too seldom",
        "drafted tokens that are not sure of acceptance are accepted too seldom",
    )
