"""Planned sampling: what the sampled cases of a run can show, before they run."""

from specverify.properties.generations import FULL_EFFORT, SMALL_EFFORT, GenerationEvidence
from specverify.properties.invariants.lossless import distribution
from specverify.properties.invariants.pair import EVERY, TOKENS
from specverify.properties.laws.sampled.gate import stream_bar
from specverify.properties.laws.sampled.partners import PARTNERS, PARTS
from specverify.properties.resolution import Resolution, ResolutionSums
from specverify.properties.strategies.cases import GREEDY, can_play_sessions, temperatures
from specverify.properties.streams import ExpectedDraws
from specverify.reference.abilities import Abilities

FOCUSED = frozenset({"lossless.distribution", "pair.same-law"})
"""The invariants that `--focus distribution` asks on every case."""

USUAL = 4
"""Tokens of a usual output of a drawn case."""

ALONE_SHARE = 0.6
"""Share of the cases that are one request, for an engine that also plays sessions."""


def expected_draws(
    within: Abilities, tokens_alone: bool, tables: bool = False, focused: bool = False, interval: int = 1
) -> ExpectedDraws | None:
    """The draws that a drawn case adds to the sampling of a run, or None where no case samples.

    Cases are drawn `within` these abilities. The reference may show `tokens_alone`; sampling may also be asked on
    `tables`; a `focused` run samples in every case. `interval` is the engine's `variant_interval`.
    """
    num_temperatures = len(temperatures(within))
    if not num_temperatures:
        return None
    effort = SMALL_EFFORT if tables else FULL_EFFORT
    draws = TOKENS if tokens_alone else min(effort.tokens, USUAL * effort.runs)
    cases_per_turn = EVERY if tokens_alone else distribution.EVERY
    alone_share = ALONE_SHARE if can_play_sessions(within) else 1.0
    share = (
        1.0 if focused else alone_share * num_temperatures / (GREEDY + num_temperatures) / (cases_per_turn * interval)
    )
    # Each temperature is a stream, beside the one over all of them.
    bar = stream_bar(
        PARTS if tokens_alone else len(GenerationEvidence().parts), num_temperatures + 1 if num_temperatures > 1 else 1
    )
    return ExpectedDraws(draws * share, _usual_bet(tokens_alone), bar)


def _usual_bet(tokens_alone: bool) -> Resolution:
    """One bet on a token that has half of the mass."""
    bet = ResolutionSums()
    if tokens_alone:
        bet.add_labels((1 + PARTNERS) // 2, 1 + PARTNERS)
    else:
        bet.add_event(0.5, 0.5, 0.5)
    return bet.resolution
