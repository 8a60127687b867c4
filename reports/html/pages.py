"""The HTML pages of `diff`, `replay` and `gate`: what was judged, what was drawn, where it ran."""

import time
from collections import Counter
from collections.abc import Mapping
from itertools import groupby
from typing import Any

from specverify.properties.gate_result import ELSEWHERE, RED, GateResult
from specverify.properties.laws.sampled.gate import stream_bar
from specverify.properties.strategies.conditions import CONDITIONS
from specverify.properties.streams import streams_of
from specverify.properties.tally import Failure, InternalFailure, Tally
from specverify.properties.verdict.coverage.pair_coverage import PairCoverage
from specverify.properties.verdict.run_log import RunLog
from specverify.reference.architecture import Seeded
from specverify.reports.bundle import replay_command
from specverify.reports.counts import (
    commit_rows,
    fallback_counts,
    native_rows,
    reference_rows,
    residue_rows,
    short_count,
    speculation_rows,
    unjudged_reason,
    unrevealed_rows,
    varied_rows,
    way_rows,
)
from specverify.reports.format import HEADLINES, TEXT_ALONE, cut, number, outside, plural
from specverify.reports.gate import words
from specverify.reports.html.document import Downloads, render_page
from specverify.reports.html.failure import STATEMENTS, failure_facts, headline
from specverify.reports.html.pictures.bars import Bars, evidence_bars, share_bars
from specverify.reports.html.pictures.timeline import timeline
from specverify.reports.html.plain_words import GROUPS, VERDICTS, WHAT
from specverify.reports.pages import sampling
from specverify.reports.pages.summary import is_of_text_alone
from specverify.reports.record import mean_accepted
from specverify.reports.vocabulary import reference_name

REPLAYED = {
    "FAILED": "The saved difference is still there.",
    "CHANGED": "The saved difference is gone, and another one is there.",
    "FIXED": "The saved difference is gone.",
    "DIFFER": "The case differs.",
    "AGREE": "The case agrees.",
    "UNJUDGED": "The case could not be judged. This is no pass.",
}
"""The headline of each result of a replay."""

MOST_FAILURES = 10
"""Most failures that are shown whole."""

CONDITIONS_S = 5.0
"""Seconds in which the drawn cases are looked at for the conditions under which faults show."""

MOST_PAIRS = 300
"""Pairs that never met, of which a page has the names."""

ORDERED = ("nodes of the largest tree", "tokens before the first step", "requests side by side")
"""Features whose values have an order of their own."""


def run_facts(
    tally: Tally, downloads: Downloads, first: int = 1, most: int = MOST_FAILURES, looked_s: float = CONDITIONS_S
) -> dict[str, Any]:
    """The facts of a run, by the names that the templates use.

    Its first `most` failures are shown, and numbered from `first` on. For `looked_s` seconds its cases are looked at.
    """
    headword, sentence = VERDICTS[tally.outcome]
    headword = TEXT_ALONE if is_of_text_alone(tally) else headword
    name = cut(tally.backend, 120)
    failures = tally.failures[: max(0, most)]
    return {
        "backend": name,
        "outcome": tally.outcome,
        "headword": headword,
        "verdict": sentence.format(name=name),
        "emulated": tally.emulated,
        "outside": outside(tally.excluded),
        "excluded": [cut(sentence, 300) for sentence in tally.excluded],
        "what": WHAT,
        "judged": judged_words(tally),
        "wrong": headline(tally.failures) or _beyond_cases(tally),
        "failures": [
            failure_facts(failure, ordinal, downloads, tally.environment)
            for ordinal, failure in enumerate(failures, first)
        ],
        "more_failures": len(tally.failures) - len(failures),
        "reasons": [
            *(cut(error, 400) for error in tally.errors),
            *(_internal_words(unanswered) for unanswered in tally.internal),
        ],
        "stopped": cut(tally.stopped, 300) if tally.stopped else "",
        "todo": _advice(tally),
        "groups": _groups(tally),
        "rows": _rows(tally),
        "drawn": _feature_charts(tally.log),
        "accepted": _acceptance_bars(tally),
        "conditions": _conditions(tally.log, looked_s),
        "pairs": _pairs(tally.pairs),
        "streams": _stream_bars(tally),
        "timeline": timeline(tally.log, tally.seconds),
        "environment": [(cut(key, 60), cut(value, 200)) for key, value in tally.environment.items()],
    }


def judged_words(tally: Tally) -> str:
    """How much was judged, in a sentence that needs no glossary."""
    num_drawn = tally.cases - sum(tally.unsupported.values())
    declined = sum(tally.unsupported.values())
    reference = cut(reference_name(tally.against), 80)
    if reference == "the oracle":
        reference = "a slow, exact reference (the oracle)"
    parts = [f"{tally.judged} of {plural(num_drawn, 'case')} judged in {number(tally.seconds)} seconds"]
    parts += [f"{declined} more declined by the engine"] if declined else []
    num_checked = sum(1 for counts in tally.invariants.values() if counts.checked)
    num_compared = sum(counts.compared for counts in tally.invariants.values())
    return (
        f"{'; '.join(parts)}. In each, a model, a prompt and the drafted trees are fixed, and what the engine did is "
        f"compared with {reference}: {num_checked} of {plural(len(tally.invariants), 'rule')}, "
        f"{short_count(num_compared)} comparisons."
    )


def _internal_words(unanswered: InternalFailure) -> str:
    """An exception inside the judge, with the last lines of its traceback and the command that replays its case."""
    command = None if unanswered.saved is None else replay_command(unanswered.saved)
    command_words = "" if command is None else f" Run it again: {command}"
    return cut(f"{unanswered.line}. Last lines: {'; '.join(unanswered.error.said)}.{command_words}", 1200)


def _beyond_cases(tally: Tally) -> str:
    """Why a run without a located failure differs: its samples, its ties or its errors, together."""
    reason = tally.excess_evidence or tally.excess_ties or tally.excess_error
    return cut(reason, 600) if reason else ""


def _advice(tally: Tally) -> list[str]:
    """The advice on the run as a whole; failures bring steps of their own."""
    if tally.outcome == "agree":
        return ["Nothing. What was not judged stands below; a stage that the engine does not show proves nothing."]
    if tally.outcome == "unjudged":
        return ["Read the reasons below: each says what was missing. Then run the command again."]
    if tally.failures:
        return []
    return ["No single case shows it. Run with more cases, or with --focus distribution, to see it more clearly."]


def _groups(tally: Tally) -> list[dict[str, Any]]:
    """The invariants by what they look at, each with the depth of its evidence."""
    sorted_names = sorted(
        tally.invariants, key=lambda name: [*GROUPS].index(_room(name)) if _room(name) in GROUPS else 99
    )
    groups = []
    for room, names in groupby(sorted_names, key=_room):
        stage, promise = GROUPS.get(room, ("", ""))
        lines = []
        for name in names:
            counts = tally.invariants[name]
            state = "failed" if counts.failed else "checked" if counts.checked else "silent"
            state = "internal" if counts.internal and not counts.failed else state
            lines.append(
                {
                    "name": cut(name, 80),
                    "statement": STATEMENTS.get(name, ""),
                    "state": state,
                    "counts": (
                        counts.checked,
                        counts.compared,
                        counts.failed,
                        counts.unobserved,
                        counts.not_applicable,
                    ),
                    "why": cut(unjudged_reason(name, counts) or "", 200) if state == "silent" else "",
                    "internal": plural(counts.internal, "case") if counts.internal else "",
                }
            )
        num_checked = sum(line["state"] not in ("silent", "internal") for line in lines)
        groups.append(
            {"room": cut(room, 40), "stage": stage, "promise": promise, "lines": lines, "checked": num_checked}
        )
    return groups


def _room(name: str) -> str:
    return name.partition(".")[0]


def _rows(tally: Tally) -> list[tuple[str, str]]:
    """Labelled facts of the run."""
    facts = [*reference_rows(tally), *varied_rows(tally), *speculation_rows(tally), *unrevealed_rows(tally)]
    mean = mean_accepted(tally)
    if mean is not None:
        steps = plural(sum(tally.accept_lengths.values()), "step")
        facts.append(("accepted", f"{mean:.2f} drafted tokens per step on average, over {steps}"))
    facts += sampling.evidence_rows(tally)
    calls = tally.attention_calls
    facts += native_rows(tally)
    facts += way_rows(tally.fallbacks)
    facts += [
        ("fell back", f"{count} of {calls} attention calls: {cut(reason)}")
        for reason, count in fallback_counts(tally.fallbacks)
    ]
    facts += commit_rows(tally)
    facts += [
        ("declined", f"{plural(count, 'case')}: {cut(reason)}") for reason, count in [*tally.unsupported.items()][:20]
    ]
    facts += residue_rows(tally.residue.values())
    if tally.ties:
        facts.append(("ties", f"{len(tally.ties)} tokens were as likely as the reference's: either is right"))
    if tally.backend_seconds > 0:
        facts.append(("time", f"{number(tally.backend_seconds)} s of it inside the engine's own forwards"))
    return [(label, cut(text, 500)) for label, text in facts]


def _feature_charts(log: RunLog) -> list[Bars]:
    """A chart for each feature of the cases."""
    charts = []
    for feature, counts in log.drawn.items():
        ordered = Counter(dict(counts.most_common()))
        if feature in ORDERED:
            ordered = Counter(dict(sorted(counts.items(), key=lambda item: _first_number(item[0]))))
        chart = share_bars(feature[:1].upper() + feature[1:], {cut(name, 60): count for name, count in ordered.items()})
        charts += [chart] if chart is not None else []
    return charts


def _first_number(name: str) -> tuple[int, bool]:
    """The place of a class among its feature's: `more than 8` stands behind `5 to 8`."""
    return int("".join(char if char.isdigit() else " " for char in name).split()[0]), name.startswith("more")


def _acceptance_bars(tally: Tally) -> Bars | None:
    counts = {plural(length, "drafted token"): count for length, count in sorted(tally.accept_lengths.items())}
    note = "The thin line is Wilson's 95 % interval of the share."
    return share_bars("Drafted tokens accepted in a step", counts, note)


def _conditions(log: RunLog, looked_s: float) -> dict[str, Any] | None:
    """The conditions under which reported faults show, met by cases or not, as far as there was time to look."""
    deadline = time.monotonic() + looked_s
    met_counts: Counter[str] = Counter()
    num_looked = 0
    for case in (case for case in log.cases if isinstance(case.model, Seeded)):
        if time.monotonic() > deadline:
            break
        met_counts.update(condition.name for condition in CONDITIONS if condition.is_met(case))
        num_looked += 1
    if not num_looked:
        return None
    lines = [(condition.name, condition.sentence, met_counts[condition.name]) for condition in CONDITIONS]
    return {"looked": num_looked, "met": sum(1 for line in lines if line[2]), "lines": lines}


def _pairs(coverage: PairCoverage | None) -> dict[str, Any] | None:
    """Which pairs of what a request may have and reach were judged, and the names of the first of the others."""
    if coverage is None:
        return None
    missing = [(str(pair.first), str(pair.second)) for pair in coverage.missing_of_present]
    return {
        "met": f"{coverage.num_met:,}",
        "possible": f"{coverage.num_possible:,}",
        "absent": [str(label) for label in coverage.absent],
        "missing": missing[:MOST_PAIRS],
        "more": max(0, len(missing) - MOST_PAIRS),
    }


def _stream_bars(tally: Tally) -> Bars | None:
    """The evidence of each stream of tests by sampling, beside the bar at which one stream alone makes a run red."""
    streams = streams_of(tally.evidence).all
    if not streams:
        return None
    red_log_e = stream_bar(1, max(1, len(streams)))
    evidence_rows = [(f"{cut(stream.name, 100)} ({plural(stream.draws, 'draw')})", stream.log_e) for stream in streams]
    return evidence_bars(
        "Evidence that sampled tokens are not from the target's law",
        evidence_rows,
        red_log_e,
        f"A full bar is e^{number(red_log_e)}, which is red.",
    )


def diff_page(tally: Tally, version: str) -> bytes:
    """The page of one run."""
    facts = run_facts(tally, Downloads())
    title = f"{facts['headword']}: {facts['backend']}"
    return render_page("diff.html.j2", {"title": title, "version": version, "r": facts})


def running_page(tally: Tally, version: str, refresh_s: int) -> bytes:
    """The page of a run that goes on; a browser loads it again after `refresh_s` seconds."""
    facts = run_facts(tally, Downloads(), looked_s=0.0)
    if not tally.failures:
        facts |= {
            "headword": "Running",
            "outcome": "plain",
            "verdict": f"{facts['backend']} is being judged: no difference so far.",
            "todo": ["Wait: this page loads itself again every few seconds until the run has ended."],
            "reasons": [],
        }
    total_words = f" of {tally.wanted}" if tally.wanted else ""
    facts["judged"] = f"So far {tally.judged}{total_words} cases. {facts['judged']}"
    title = f"Running: {facts['backend']}"
    return render_page("diff.html.j2", {"title": title, "version": version, "r": facts, "refresh": refresh_s})


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
        "todo": _gate_advice(result),
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


def _gate_advice(result: GateResult) -> str:
    if words.failures(result):
        return "Each failure below says how to see it again, and where to look."
    if any(known_failure.state in RED for known_failure in result.known):
        return "Known failures are not as the ledger says: take out those that are repaired, and look at the others."
    if result.exit_code:
        return "Read the reasons: each says what was missing. Then run the gate again."
    return "Nothing."
