"""Planned sampling: what the sampled cases of a run can show, before they run."""

from properties.generations import ALONE, BESIDE, Heard
from properties.invariants.lossless import distribution
from properties.invariants.pair import EVERY
from properties.laws.sampled.gate import stream_bar
from properties.laws.sampled.partners import PARTNERS, PARTS
from properties.pair_generations import TOKENS
from properties.resolution import Gathered, Resolution
from properties.strategies.cases import GREEDY, plays, temperatures
from properties.streams import Expected
from reference.abilities import Abilities

FOCUSED = frozenset({"lossless.distribution", "pair.same-law"})
"""The invariants that `--focus distribution` asks on every case."""

USUAL = 4
"""Tokens of a usual output of a drawn case."""

ALONE_SHARE = 0.6
"""Share of the cases that are one request, for an engine that also plays sessions."""


def expected(
    within: Abilities, tokens_alone: bool, tables: bool = False, focused: bool = False, interval: int = 1
) -> Expected | None:
    """The draws that a drawn case adds to the sampling of a run, or None where no case samples.

    Args:
        within: The abilities within which cases are drawn.
        tokens_alone: Whether the reference shows tokens alone.
        tables: Whether the engine's sampling is also asked on tables.
        focused: Whether every case samples and is asked for its law.
        interval: The engine's `variant_interval`.
    """
    warm = len(temperatures(within))
    if not warm:
        return None
    effort = BESIDE if tables else ALONE
    each = TOKENS if tokens_alone else min(effort.tokens, USUAL * effort.runs)
    turns = EVERY if tokens_alone else distribution.EVERY
    alone = ALONE_SHARE if plays(within) else 1.0
    share = 1.0 if focused else alone * warm / (GREEDY + warm) / (turns * interval)
    # Each temperature is a stream, beside the one over all of them.
    bar = stream_bar(PARTS if tokens_alone else len(Heard().parts), warm + 1 if warm > 1 else 1)
    return Expected(each * share, _usual(tokens_alone), bar)


def _usual(tokens_alone: bool) -> Resolution:
    """One bet on a token that has half of the mass."""
    bet = Gathered()
    if tokens_alone:
        bet.labels((1 + PARTNERS) // 2, 1 + PARTNERS)
    else:
        bet.event(0.5, 0.5, 0.5)
    return bet.told
