"""The test of two runs' accepted tokens, in words and as facts."""

from collections.abc import Mapping
from typing import Any

from rich.table import Table

from specverify.properties.paired_acceptance import AcceptanceTest
from specverify.reports.format import clean, number, plural
from specverify.reports.layout80 import plain_text

SAME_RUN = "acceptance differs although model, draft and seeds are the same"
"""The words for a difference between two runs that should accept alike."""

VERDICTS = {
    "equal": "acceptance is equal on every prompt",
    "agrees": "acceptance differs on some prompts, by no more than chance",
    "differs": "acceptance differs",
    "too few": "too few prompts to tell whether acceptance differs",
}
"""The words for each verdict of a test."""

MOST_POSITIONS = 8
"""Most positions that are shown."""


def test_fact(test: AcceptanceTest) -> dict[str, Any]:
    """A test as JSON."""
    positions = [vars(position) for position in test.positions]
    facts = {name: value for name, value in vars(test).items() if name != "positions"}
    return {**facts, "verdict": test.verdict, "p_value": test.p_value, "positions": positions}


def verdict_words(test: Mapping[str, Any], is_same_run: bool) -> str:
    """The verdict of a test in one sentence, with its numbers; `test` is a fact of `test_fact`."""
    verdict = test["verdict"]
    words = SAME_RUN if verdict == "differs" and is_same_run else VERDICTS[verdict]
    if verdict == "equal":
        return f"{words} ({test['prompts']})"
    difference = f"{test['differing']} of {plural(test['prompts'], 'prompt')} differ"
    if verdict == "too few":
        least_p = number(test["least_p"])
        return f"{words}: {difference}, which can show p = {least_p} at least, error rate {test['alpha']:g}"
    return f"{words}: {difference}, p = {number(test['p_value'])}, error rate {test['alpha']:g}"


def position_lines(test: Mapping[str, Any]) -> list[str]:
    """Accepted tokens of both runs, all positions together and then each, a line for each."""
    lines = []
    for position in test["positions"][: MOST_POSITIONS + 1]:
        place = f"at position {position['number']}" if position["number"] else "accepted"
        shares = f"{position['second']:.3f}, {position['first']:.3f} before"
        lines.append(f"{place} {shares}, p = {number(position['p_value'])}")
    return lines


def acceptance_page(tests: Mapping[str, Mapping[str, Any]], is_same_run: bool) -> str:
    """The verdict of each way, and accepted tokens by position where a way differs; empty without a way."""
    parts = []
    for way, test in tests.items():
        parts.append(f"{clean(way)}: {verdict_words(test, is_same_run)}\n")
        if not test["differing"]:
            continue
        table = Table(box=None, padding=(0, 1, 0, 0))
        table.add_column("accepted per step", no_wrap=True)
        for name in ("first", "second", "p"):
            table.add_column(name, justify="right")
        for position in test["positions"][: MOST_POSITIONS + 1]:
            place = f"at position {position['number']}" if position["number"] else "at all positions"
            shares = [f"{position[run]:.3f}" for run in ("first", "second")]
            table.add_row(place, *shares, number(position["p_value"]))
        parts.append(plain_text(table))
    return "".join(parts)
