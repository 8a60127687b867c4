"""The HTML pages of `diff`, `replay` and `gate`."""

from collections.abc import Mapping

from specverify.properties.gate_result import ELSEWHERE, RED, GateResult
from specverify.properties.tally import Failure, Tally
from specverify.reports.format import HEADLINES, cut, number, plural
from specverify.reports.gate import words
from specverify.reports.html.document import Downloads, render_page
from specverify.reports.html.failure import failure_facts
from specverify.reports.html.plain_words import WHAT
from specverify.reports.html.run import CONDITIONS_S, MOST_FAILURES, run_facts

REPLAYED = {
    "FAILED": "The saved difference is still there.",
    "CHANGED": "The saved difference is gone, and another one is there.",
    "FIXED": "The saved difference is gone.",
    "DIFFER": "The case differs.",
    "AGREE": "The case agrees.",
    "UNJUDGED": "The case could not be judged. This is no pass.",
}
"""The headline of each result of a replay."""


def diff_page(tally: Tally, version: str) -> bytes:
    """The page of one run."""
    facts = run_facts(tally, Downloads())
    title = f"{facts['headword']}: {facts['backend']}"
    return render_page("diff.html.j2", {"title": title, "version": version, "r": facts})


def replay_page(
    word: str, why: str, failure: Failure | None, emulated: bool, environment: Mapping[str, str], version: str
) -> bytes:
    """The page of one saved case that ran again."""
    outcome = {"FIXED": "agree", "AGREE": "agree", "UNJUDGED": "unjudged"}.get(word, "differ")
    failure_content = None if failure is None else failure_facts(failure, 1, Downloads(), environment)
    facts = {
        "title": f"{word.capitalize()}: {failure_content['backend'] if failure_content else 'a saved case'}",
        "word": word.capitalize(),
        "outcome": outcome,
        "verdict": REPLAYED[word],
        "what": WHAT,
        "why": cut(why, 400),
        "emulated": emulated,
        "f": failure_content,
        "version": version,
    }
    return render_page("replay.html.j2", facts)


def gate_page(result: GateResult, version: str) -> bytes:
    """The page of a gate: every run with its failures, the ledger, and the seeds."""
    downloads = Downloads()
    runs, first, room = [], 1, MOST_FAILURES
    for run in result.runs:
        facts = run_facts(run.tally, downloads, first, room, CONDITIONS_S / len(result.runs))
        first, room = first + len(facts["failures"]), room - len(facts["failures"])
        num_known = sum(1 for _ in run.tally.known.elements())
        facts |= {
            "title": cut(run.title, 120),
            "headword": HEADLINES[run.outcome],
            "outcome": run.outcome,
            "counts": (run.tally.judged, run.tally.cases, run.tally.differed, num_known),
            "short": [cut(shortfall, 300) for shortfall in run.short],
        }
        runs.append(facts)
    known_failures = [known_failure for known_failure in result.known if known_failure.state != ELSEWHERE]
    rerun_words = words.rerun_command(result)
    facts = {
        "title": f"{HEADLINES[result.outcome].capitalize()}: specverify gate",
        "version": version,
        "outcome": result.outcome,
        "word": HEADLINES[result.outcome].capitalize(),
        "verdict": words.verdict(result),
        "what": WHAT,
        "judged": [f"{cut(run.title, 120)}: {words.judged_words(run)}." for run in result.runs],
        "wrong": [
            (cut(run.title, 80), words.sentence(failure)) for run, failure in words.failures(result)[:MOST_FAILURES]
        ],
        "reasons": words.reasons(result)[:40],
        "todo": _advice(result),
        "runs": runs,
        "known": [
            (
                known_failure.state in RED,
                words.known_line(known_failure),
                cut(known_failure.reason, 200),
                cut(known_failure.issue, 200),
            )
            for known_failure in known_failures
        ],
        "behind": [f"{cut(name, 200)}, in {plural(count, 'case')}" for name, count in result.behind.most_common(10)],
        "notes": [cut(note, 300) for note in result.notes],
        "rows": [
            ("seeds", ", ".join(map(str, result.seeds))),
            ("the same cases again", rerun_words),
            ("time", f"{number(result.seconds)} s"),
        ],
    }
    return render_page("gate.html.j2", facts)


def _advice(result: GateResult) -> str:
    if words.failures(result):
        return "Each failure below says how to see it again, and where to look."
    if any(known_failure.state in RED for known_failure in result.known):
        return "Known failures are not as the ledger says: take out those that are repaired, and look at the others."
    if result.exit_code:
        return "Read the reasons: each says what was missing. Then run the gate again."
    return "Nothing."
