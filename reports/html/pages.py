"""The HTML pages of `diff`, `replay` and `gate`."""

from collections.abc import Mapping
from datetime import datetime, timezone

from properties.tally import Failure, Tally
from reports.format import cut
from reports.html.document import Downloads, rendered
from reports.html.failure import failure_facts
from reports.html.plain_words import WHAT
from reports.html.run import run_facts

REPLAYED = {
    "FAILED": "The saved difference is still there.",
    "CHANGED": "The saved difference is gone, and another one is there.",
    "FIXED": "The saved difference is gone.",
    "DIFFER": "The case differs.",
    "AGREE": "The case agrees.",
    "UNJUDGED": "The case could not be judged. This is no pass.",
}
"""The headline of each result of a replay."""


def made() -> str:
    """The time in UTC, to the minute."""
    return f"{datetime.now(timezone.utc):%Y-%m-%d %H:%M} UTC"


def diff_page(tally: Tally, version: str) -> bytes:
    """The page of one run."""
    facts = run_facts(tally, Downloads())
    title = f"{facts['headword']}: {facts['backend']}"
    return rendered("diff.html.j2", {"title": title, "version": version, "made": made(), "r": facts})


def replay_page(
    word: str, why: str, failure: Failure | None, emulated: bool, environment: Mapping[str, str], version: str
) -> bytes:
    """The page of one saved case that ran again."""
    outcome = {"FIXED": "agree", "AGREE": "agree", "UNJUDGED": "unjudged"}.get(word, "differ")
    found = None if failure is None else failure_facts(failure, 1, Downloads(), environment)
    facts = {
        "title": f"{word.capitalize()}: {found['backend'] if found else 'a saved case'}",
        "word": word.capitalize(),
        "outcome": outcome,
        "verdict": REPLAYED[word],
        "what": WHAT,
        "why": cut(why, 400),
        "emulated": emulated,
        "f": found,
        "version": version,
        "made": made(),
    }
    return rendered("replay.html.j2", facts)
