"""Strategies for sampling settings: rules, temperatures, processors and tapes."""

from dataclasses import replace

from hypothesis import strategies as st

from specverify.properties.strategies.within import admitted_values, fit_sampling
from specverify.reference.abilities import Abilities
from specverify.reference.architecture import Seeded
from specverify.reference.draft import Draft
from specverify.reference.rules import DRAWS, PLAIN, RULES, Rule
from specverify.reference.sampling import Sampling, Stops

TEMPERATURES = (1.0, 0.4, 2.5, 8.0)
"""Temperatures of sampled cases; high ones, since the laws of built-in models are sharply peaked."""

EXTREMES = (0.0, 1.0 - 2.0**-24, 0.5, 2.0**-24)
"""Coins at the ends of their range and in the middle, where comparisons with thresholds go wrong."""


@st.composite
def rules(draw: st.DrawFn, chains: bool, within: Abilities | None = None) -> Rule:
    """A rule for trees, or with `chains` also one for chains alone, some with thresholds other than the defaults.

    It is the plain rule for an engine that accepts by a rule of its own.
    """
    # Most engines have the plain rule, so it is frequent; rules for chains alone are too, since few cases are chains.
    special = [name for name, promise in RULES.items() if promise.chains_only]
    names = [*RULES, *special * 5] if chains else [name for name in RULES if name not in special]
    frequent_names = admitted_values((PLAIN, PLAIN, *names), within, "rules")
    if not frequent_names:
        return Rule()
    name = draw(st.sampled_from(frequent_names))
    promise = RULES[name]
    # The defaults keep the promise of a rule that has one.
    if promise.thresholds and (not promise.lossless or draw(st.integers(0, 2)) == 0):
        return Rule(name, **{field: draw(st.sampled_from(values)) for field, values in promise.thresholds.items()})
    return Rule(name)


EDGE_DISTANCES = (2.0**-8, -(2.0**-8), 2.0**-11, -(2.0**-11))
"""Relative distances between a setting and the value at which it keeps another token; 16-bit rounding shows there."""


@st.composite
def top_ps(draw: st.DrawFn, ranked: tuple[float, ...]) -> float:
    """A top-p: any mass, or a mass just beside that of the first tokens of `ranked`, a law in descending order."""
    if not ranked or draw(st.booleans()):
        return draw(st.floats(0.3, 0.99))
    mass = sum(ranked[: draw(st.integers(1, len(ranked)))])
    return min(max(mass * (1 + draw(st.sampled_from(EDGE_DISTANCES))), 0.01), 0.999)


@st.composite
def min_ps(draw: st.DrawFn, ranked: tuple[float, ...]) -> float:
    """A min-p: any share of the largest probability, or a share just beside that of a token of `ranked`."""
    if len(ranked) < 2 or draw(st.booleans()):
        return draw(st.one_of(st.floats(0.01, 0.3), st.floats(0.3, 0.95)))
    share = ranked[draw(st.integers(1, len(ranked) - 1))] / ranked[0]
    return min(max(share * (1 + draw(st.sampled_from(EDGE_DISTANCES))), 0.001), 0.95)


@st.composite
def processing(draw: st.DrawFn, model: Seeded, stops: Stops, ranked: tuple[float, ...]) -> Sampling:
    """Settings without temperature, rule and coins; each setting has its default half of the time.

    Some top-p and min-p values lie beside an edge of the request's first law `ranked`, in descending order.
    """
    vocab = model.vocab_size

    def maybe(strategy: st.SearchStrategy[float], default: float) -> float:
        return draw(strategy) if draw(st.booleans()) else default

    words: tuple[tuple[int, ...], ...] = ()
    if vocab >= 5 and draw(st.booleans()):
        token = st.integers(0, vocab - 1)
        words = (tuple(draw(st.lists(token, min_size=1, max_size=3))),)
    # min_tokens bans end tokens; together with banned words it must leave a token.
    spare = vocab - len({*stops.eos, *stops.stop_tokens, *(word[-1] for word in words)})
    return Sampling(
        repetition_penalty=maybe(st.sampled_from((1.3, 0.8, 2.0)), 1.0),
        presence_penalty=maybe(st.sampled_from((0.6, -0.4, 2.0, -2.0)), 0.0),
        frequency_penalty=maybe(st.sampled_from((0.3, -0.2, 2.0, -2.0)), 0.0),
        bad_words=words,
        min_tokens=draw(st.integers(0, 4)) if spare > 0 else 0,
        top_k=draw(st.integers(1, max(1, vocab - 1))) if draw(st.booleans()) else 0,
        top_p=maybe(top_ps(ranked), 1.0),
        min_p=maybe(min_ps(ranked), 0.0),
    )


@st.composite
def samplings(
    draw: st.DrawFn,
    model: Seeded,
    draft: Draft,
    stops: Stops,
    temperature: float,
    processors: tuple[str, ...] = (),
    ranked: tuple[float, ...] = (),
    within: Abilities | None = None,
) -> Sampling:
    """Settings for this model, draft and stops at this temperature; `ranked` is the first law at that temperature.

    Half of the sampled settings use `processors`, if there are any, and then ban no tokens of their own: together with
    the bans of a user's processor they might leave no token.
    """
    # One in three greedy cases has processors, one in two sampled ones.
    rarely = 2 if temperature == 0.0 else 1
    settings = draw(processing(model, stops, ranked)) if draw(st.integers(0, rarely)) == 0 else Sampling()
    settings = fit_sampling(settings, within)
    if temperature == 0.0:
        return settings
    fields = {name: getattr(settings, name) for name in type(settings).__dataclass_fields__}
    # The tape holds the first coins alone; the seed gives the others.
    takes_tape = within is None or within.takes_tape
    tape = (
        tuple(draw(st.lists(st.sampled_from(EXTREMES), max_size=12)))
        if takes_tape and not draw(st.integers(0, 5))
        else ()
    )
    draws = admitted_values((*DRAWS, "without-replacement"), within, "draws") or (Sampling().draws,)
    # The tokens of a dynamic tree are not drawn.
    draws = tuple(way for way in draws if draft.refuses_draws(way) is None) or ("top-k",)
    fields |= {
        "temperature": temperature,
        "tape": tape,
        "rule": draw(rules(not draft.branches, within)),
        "draws": draw(st.sampled_from(draws)),
        "seed": draw(st.integers(0, 2**20)),
    }
    if len(processors) > 0 and draw(st.booleans()):
        fields |= {"processors": processors, "bad_words": (), "min_tokens": 0}
    return Sampling(**fields)


def with_min_tokens(sampling: Sampling, least: int, model: Seeded, stops: Stops) -> Sampling:
    """`sampling` with min_tokens of `least`, unless `least` is 0, processors are in use or no token would be left."""
    end_tokens = {*stops.eos, *stops.stop_tokens, *(word[-1] for word in sampling.bad_words)}
    if not least or sampling.processors or len(end_tokens) >= model.vocab_size:
        return sampling
    return replace(sampling, min_tokens=least)
