"""Links: the three-link conditional e-process over the trials of a generation.

It serves vocabularies in which no context is ever seen twice. `LINKS` names the three links. Groups of bets on faults
of the draft stand beside them for engines that show nothing but tokens, where the law of their draft is known.
"""

from collections.abc import Mapping
from dataclasses import dataclass

import numpy as np
from scipy.special import logsumexp

from specverify.properties.bet_group import BetGroup, GroupSums
from specverify.properties.laws.sampled.draft_faults import ACCEPT, RESIDUAL, by_token, overall
from specverify.properties.laws.sampled.evalue import law
from specverify.properties.laws.sampled.truncated import share_of
from specverify.properties.resolution import ACCEPTANCE, LIKELIEST, Resolution, ResolutionSums
from specverify.reference.trace import Array

THETAS = np.array([sign * 0.1 * 2.0**k for k in range(7) for sign in (1.0, -1.0)])
"""Tilts of the mixture: .1 to 6.4, upwards and downwards."""

LINKS = ("draft", "accept", "token")
"""The three links: a token is drafted from q; it is accepted or not; a token replaces it or follows the path."""

RANKS = (1, 8, 64)
"""Last ranks of the cells of a law: 1, 2-8, 9-64, and the rest."""

NEARLY = 0.98
"""A token whose p is below this share of q cannot be in the residual; rounding does not bridge the margin."""


SUMS_TO = 1e-3
"""Largest distance from 1 of the sum of a law, which is then normalised.

Laws of a large vocabulary come in the engine's own precision.
"""


@dataclass(frozen=True, eq=False)
class Trial:
    """One drafted token on trial, or the token after a path that was accepted to its end.

    Attributes:
        p: The oracle's law at this point, float [V]: after rejected siblings, their residual.
        q: The law from which the drafted token is said to come, as the engine logged it [V]; None for a token that was
            proposed for sure, or for no drafted token.
        drafted: The drafted token; None for the token after a whole path, which comes from p.
        accepted: Whether the drafted token was accepted.
        replacement: The token that was drawn instead, or after the path; None if the drafted token was accepted, or a
            sibling is tried next.
        noise: How far each logit of the engine may lie from the oracle's (divided by the temperature).
        low: Lower bounds of the engine's p [V], in place of those that `noise` gives.
        high: Upper bounds of it [V].
        bets: What the bets of each group pay for each token, above 0, float [bets, V]; None where there are none.
            Whatever they pay, the test is sound, since they are made before the token is seen.
    """

    p: Array
    q: Array | None = None
    drafted: int | None = None
    accepted: bool = False
    replacement: int | None = None
    noise: float = 0.0
    low: Array | None = None
    high: Array | None = None
    bets: Mapping[str, Array] | None = None

    def band(self) -> tuple[Array, Array]:
        """Bounds of the engine's own p, float64 [V] each.

        A change of up to e in each logit changes a probability by a factor within exp(+-2e). That is the whole band
        only where both laws have the same support: where top-k or top-p cut on noisy logits, give `low` and `high`.
        """
        p = law(self.p, SUMS_TO)
        if self.noise < 0 or (self.low is None) != (self.high is None):
            raise ValueError("noise is negative, or one bound came without the other")
        if self.low is not None and self.high is not None:
            return np.asarray(self.low, dtype=np.float64), np.asarray(self.high, dtype=np.float64)
        if self.noise == 0.0:
            return p, p
        return p * np.exp(-2.0 * self.noise), np.minimum(p * np.exp(2.0 * self.noise), 1.0)


def residual_band(low: Array, high: Array, q: Array) -> tuple[Array, Array]:
    """Bounds [V] of norm(relu(p - q)) for every p between `low` and `high`: the band of the next sibling's trial."""
    least, most = np.maximum(low - q, 0.0), np.maximum(high - q, 0.0)
    return share_of(least, most.sum() - most), share_of(most, least.sum() - least)


ROLE_WORDS = {
    "draft": (
        "the likeliest token of the draft's law is drafted",
        "tokens of rank 2 to 8 in the draft's law are drafted",
        "tokens of rank 9 to 64 in the draft's law are drafted",
        "tokens beyond rank 64 in the draft's law are drafted",
    ),
    "accept": (
        "drafted tokens are accepted",
        "drafted tokens that are sure of acceptance are accepted",
        "drafted tokens that are not sure of acceptance are accepted",
    ),
    "token": (
        "tokens that cannot come follow the accepted path",
        "the likeliest token follows the accepted path",
        "tokens of rank 2 to 8 follow the accepted path",
        "tokens beyond rank 8 follow the accepted path",
    ),
}
"""The roles of each link in words."""


def describe_bet(number: int) -> str:
    """The event of the bet that stands at `number` in `Links.parts`, with its direction; empty behind their end."""
    events = [words for link in LINKS for words in ROLE_WORDS[link]]
    role, tilt = divmod(number, len(THETAS))
    if role >= len(events):
        return ""
    return f"{events[role]} too {'often' if THETAS[tilt] > 0 else 'seldom'}"


class Links:
    """E-values of the three links over a stream of trials, in the order in which they happened.

    Every link is conditional on everything that the engine logged before. Its outcome falls into one of a few roles,
    chosen from p and q alone. For a role of probability between l and u, exp(theta 1[role]) / M, with M = 1 + u
    (e^theta - 1) where theta > 0 and 1 + l (e^theta - 1) where theta < 0, has mean at most 1 under every law in the
    band. So has the product over the stream, and so has the average over roles and tilts: at any time, P(E >= 1/a) <=
    a.

    Args:
        groups: Number of bets of each group, in each trial that makes bets.
    """

    def __init__(self, groups: Mapping[str, int] | None = None) -> None:
        self._sums: dict[str, Array] = {
            "draft": np.zeros((4, len(THETAS))),
            "accept": np.zeros((3, len(THETAS))),
            "token": np.zeros((4, len(THETAS))),
        }
        self._groups = {name: GroupSums(name, bets) for name, bets in (groups or {}).items()}
        self._violated = dict.fromkeys(self._sums, False)
        self._resolutions = {"accept": ResolutionSums(ACCEPTANCE), "token": ResolutionSums(LIKELIEST)}
        self.trials = 0

    def add(self, trial: Trial) -> None:
        """Take one trial.

        A draft of claimed probability 0, and a token that no law in the band allows, are violations: +inf from then on.

        Raises:
            ValueError: A law is invalid, a token is outside the vocabulary, or the trial contradicts itself.
        """
        low, high = trial.band()
        q = None if trial.q is None else law(trial.q, SUMS_TO)
        self._check(trial, q)
        self.trials += 1
        if trial.drafted is not None:
            if q is not None:
                self._draft(q, trial.drafted)
                self._bet_on_acceptance(low, high, q, trial)
            self._accept(low, high, q, trial)
        if trial.replacement is not None:
            self._token(low, high, q, trial)
            for name, pays in (trial.bets or {}).items():
                self._groups[name].add(pays, law(trial.p, SUMS_TO), high, trial.replacement)

    @staticmethod
    def _check(trial: Trial, q: Array | None) -> None:
        vocab_size = len(trial.p)
        for token in (trial.drafted, trial.replacement):
            if token is not None and not 0 <= token < vocab_size:
                raise ValueError(f"token {token} is outside a vocabulary of {vocab_size}")
        if q is not None and (len(q) != vocab_size or trial.drafted is None):
            raise ValueError("q has another vocabulary, or belongs to no drafted token")
        if trial.accepted and (trial.replacement is not None or trial.drafted is None):
            raise ValueError("an accepted token is a drafted one, and nothing replaces it")

    def _draft(self, q: Array, drafted: int) -> None:
        if q[drafted] == 0.0:
            self._violated["draft"] = True
        top = _top(q, RANKS[-1])
        sums = np.cumsum(q[top])
        ends = [float(sums[min(rank, len(top)) - 1]) for rank in RANKS]
        p = np.array([ends[0], ends[1] - ends[0], ends[2] - ends[1], max(0.0, 1.0 - ends[2])])
        self._tilt("draft", (_role(top, drafted, RANKS),), p, p)

    def _accept(self, low: Array, high: Array, q: Array | None, trial: Trial) -> None:
        x = trial.drafted
        assert x is not None
        claimed = 1.0 if q is None else float(q[x])
        # A draft that its law does not allow is a violation of the draft link; the accept link has no ratio for it.
        if claimed == 0.0:
            return
        least, most = (min(1.0, float(end[x]) / claimed) for end in (low, high))
        # Roles: all trials, trials sure of acceptance, other trials. The latter two are kept apart since a reversed
        # ratio errs upwards in one kind and downwards in the other, and nearly cancels over both together.
        kinds = (0, 1) if least == 1.0 else (0, 2)
        bounds = np.zeros((2, 3))
        bounds[0, kinds], bounds[1, kinds] = least, most
        self._tilt("accept", kinds if trial.accepted else (), *bounds)
        self._resolutions["accept"].add_event(min(1.0, float(trial.p[x]) / claimed), least, most)

    def _bet_on_acceptance(self, low: Array, high: Array, q: Array, trial: Trial) -> None:
        """Place the bets of the group ACCEPT: on any token of q, and on the one that was drafted.

        The two kinds are bets of their own: the first is made before the token is drawn, the second behind it.
        """
        assert trial.drafted is not None
        if ACCEPT not in self._groups or q[trial.drafted] == 0.0:
            return
        p = law(trial.p, SUMS_TO)
        first = 0
        for event in (overall(p, q, low, high), by_token(p, q, low, high, trial.drafted)):
            self._groups[ACCEPT].add(event.pays, event.p, event.high, int(not trial.accepted), first)
            first += len(event.pays)

    def _token(self, low: Array, high: Array, q: Array | None, trial: Trial) -> None:
        y = trial.replacement
        assert y is not None
        if trial.drafted is None:
            draft_mass = np.zeros(len(low))
        elif q is None:
            draft_mass = np.zeros(len(low))
            # Proposed for sure and rejected: the token cannot come, and no other token loses mass.
            draft_mass[trial.drafted] = np.inf
        else:
            draft_mass = q
        least, most = np.maximum(low - draft_mass, 0.0), np.maximum(high - draft_mass, 0.0)
        if high[y] == 0.0 or draft_mass[y] == np.inf:
            self._violated["token"] = True
        # With an empty residual the rejection was impossible: the accept link says so, and the token adds nothing.
        if most.sum() == 0.0:
            return
        forbidden = high <= NEARLY * draft_mass
        centre = np.where(forbidden, -1.0, np.maximum(trial.p - draft_mass, 0.0))
        top = _top(centre, RANKS[1])
        roles = [np.flatnonzero(forbidden), top[:1], top[1:]]
        bounds = np.array([[float(end[role].sum()) for role in roles] for end in (least, most)])
        totals = np.array([[float(least.sum())], [float(most.sum())]])
        bounds = np.concatenate([bounds, np.maximum(totals - bounds.sum(axis=1, keepdims=True), 0.0)], axis=1)
        # A role is least likely where its mass is smallest and that of all others largest, and the other way round.
        least_likely = share_of(bounds[0], totals[1] - bounds[1])
        most_likely = share_of(bounds[1], totals[0] - bounds[0])
        role = 0 if forbidden[y] else 1 + _role(top, y, RANKS[:2])
        self._tilt("token", (role,), least_likely, most_likely)
        middle = (least_likely[1] + most_likely[1]) / 2.0
        self._resolutions["token"].add_event(min(float(middle), 1.0), float(least_likely[1]), float(most_likely[1]))

    def _tilt(self, link: str, hit: tuple[int, ...], low: Array, high: Array) -> None:
        """Multiply the e-processes [roles, thetas] of `link`; bounds of 0 leave a role that was not hit unchanged."""
        edge = np.where(THETAS > 0, np.minimum(high, 1.0)[:, None], np.maximum(low, 0.0)[:, None])
        self._sums[link] -= np.log1p(edge * np.expm1(THETAS))
        self._sums[link][list(hit)] += THETAS

    @property
    def parts(self) -> tuple[float, ...]:
        """Logarithms of the e-values of all bets of the three links; +inf where a link has a violation."""
        return tuple(
            float(np.inf) if self._violated[link] else float(value)
            for link, sums in self._sums.items()
            for value in sums.flat
        )

    @property
    def resolution(self) -> Resolution:
        """The shifts that bets on the likeliest token, or on acceptance if drafts are shown, would have seen."""
        return max(self._resolutions.values(), key=lambda sums: sums.draws).resolution

    @property
    def log_es(self) -> dict[str, float]:
        """Logarithm of the e-value of each link so far, and of the group RESIDUAL; 0 for one that nothing reached."""
        sums = {**self._sums, **{name: group.log_es for name, group in self._groups.items() if name == RESIDUAL}}
        return {
            link: np.inf if self._violated.get(link) else float(logsumexp(bets) - np.log(bets.size))
            for link, bets in sums.items()
        }

    @property
    def groups(self) -> tuple[BetGroup, ...]:
        """The groups of bets so far; a group that could place none is left out."""
        return tuple(sums.group for sums in self._groups.values() if sums.group.draws)

    @property
    def log_e(self) -> float:
        """Logarithm of the e-value of all trials so far: the mean of the e-values in `log_es`.

        Other groups stand beside it, as streams of the run alone: a place in this mean would cost each link a part of
        its evidence in every case.
        """
        log_es = list(self.log_es.values())
        return float(logsumexp(log_es) - np.log(len(log_es)))


def _top(values: Array, count: int) -> Array:
    """Indices of the `count` largest entries, the largest first, without sorting the rest."""
    count = min(count, len(values))
    top = np.argpartition(-values, count - 1)[:count]
    return np.asarray(top[np.argsort(-values[top], kind="stable")])


def _role(top: Array, token: int, ends: tuple[int, ...]) -> int:
    """The number of the rank cell that holds `token`, for cells that end at `ends`; len(ends) for the rest."""
    index = np.flatnonzero(top == token)
    return len(ends) if not len(index) else int(np.searchsorted(np.array(ends), index[0] + 1))
