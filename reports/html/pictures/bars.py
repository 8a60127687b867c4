"""Bars: shares and probabilities, with intervals where they were sampled."""

import math
from collections.abc import Mapping, Sequence
from dataclasses import dataclass

from specverify.reports.format import number

NINETY_FIVE = 1.959964
"""Standard deviations of a normal law that hold 95 % of it."""


@dataclass(frozen=True)
class Bar:
    """A bar on a scale from 0 to 1.

    Attributes:
        name: Its series: `target`, `rule`, or empty where there is one series.
        value: Its length.
        text: The value as it is printed.
        low, high: The interval; equal to `value` where it is exact.
        state: The style: `due` for what must be, `got` for what is, `off` for what differs.
    """

    name: str
    value: float
    text: str
    low: float
    high: float
    state: str = "got"

    @property
    def exact(self) -> bool:
        """Whether the bar has no interval."""
        return self.low == self.high


@dataclass(frozen=True)
class Bars:
    """A chart: groups of bars, one below the other.

    Attributes:
        title: What the bars are, in a few words.
        groups: A label with its bars.
        note: What the intervals are, or what is left out; empty where there is nothing to say.
    """

    title: str
    groups: tuple[tuple[str, tuple[Bar, ...]], ...]
    note: str = ""


def interval(count: int, total: int) -> tuple[float, float]:
    """Wilson's interval of the share `count` of `total`, at 95 %.

    Wilson, Probable inference, the law of succession, and statistical inference, JASA 22 (1927).

    >>> [round(one, 3) for one in interval(5, 10)]
    [0.237, 0.763]
    """
    if not total:
        return 0.0, 1.0
    share, square = count / total, NINETY_FIVE**2
    centre = (share + square / (2 * total)) / (1 + square / total)
    reach = NINETY_FIVE / (1 + square / total) * math.sqrt(share * (1 - share) / total + square / (4 * total**2))
    return max(0.0, centre - reach), min(1.0, centre + reach)


def share_bars(title: str, counts: Mapping[str, int], note: str = "", most: int = 14) -> Bars | None:
    """The shares of `counts` in their sum, the largest count first among the `most`; None without a count."""
    total = sum(counts.values())
    if not total:
        return None
    groups = []
    for name, count in list(counts.items())[:most]:
        low, high = interval(count, total)
        groups.append((name, (Bar("", count / total, f"{count} ({100 * count / total:.3g} %)", low, high),)))
    more = f"{len(counts) - most} further ones left out. " if len(counts) > most else ""
    return Bars(title, tuple(groups), more + note)


def comparison_bars(title: str, rows: Sequence[tuple[str, float, float]], note: str = "") -> Bars:
    """Probabilities beside those that they must be: (label, due, got), each exact."""
    groups = []
    for label, target_p, rule_p in rows:
        state = "off" if abs(target_p - rule_p) > 1e-9 else "got"
        pair = (
            Bar("target", target_p, f"{target_p:.4f}", target_p, target_p, "due"),
            Bar("rule", rule_p, f"{rule_p:.4f}", rule_p, rule_p, state),
        )
        groups.append((label, pair))
    return Bars(title, tuple(groups), note)


def evidence_bars(title: str, rows: Sequence[tuple[str, float]], red_at: float, note: str = "") -> Bars | None:
    """Logarithms of evidence as shares of the one that makes a run red; None without a row."""
    if not rows:
        return None
    groups = []
    for label, log_e in rows:
        share = min(1.0, max(0.0, log_e / red_at))
        text = f"e^{number(log_e)}"
        groups.append((label, (Bar("", share, text, share, share, "off" if log_e >= red_at else "got"),)))
    return Bars(title, tuple(groups), note)
