"""The sentences of a gate's result, for all of its reports."""

from specverify.properties.gate_result import RED, UNJUDGED, GateResult, GateRun, KnownState
from specverify.properties.tally import Failure
from specverify.reports.format import clean, cut, number, plural
from specverify.reports.tree_scene import scene_of
from specverify.reports.vocabulary import account


def verdict(result: GateResult) -> str:
    """The gate's findings in one or two sentences."""
    differing_runs = [run for run in result.runs if run.exit_code == 1]
    red_failures = [known_failure for known_failure in result.known if known_failure.state in RED]
    parts = []
    if differing_runs:
        names = ", ".join(clean(run.title) for run in differing_runs)
        verb = "does" if len(differing_runs) == 1 else "do"
        parts.append(f"{cut(names, 200)} {verb} not do what the target model alone would do.")
    if red_failures:
        predicate = "is not as the ledger says" if len(red_failures) == 1 else "are not as the ledger says"
        parts.append(f"{plural(len(red_failures), 'known failure')} {predicate}.")
    if not parts and result.exit_code == 0:
        parts.append("Everything that could be judged does what the target model alone would do.")
    if not parts:
        parts.append("Too little was compared to say yes or no; this is no pass.")
    return " ".join(parts)


def judged_words(run: GateRun) -> str:
    """How many cases of a run were judged, in a sentence that needs no glossary."""
    tally = run.tally
    num_drawn = tally.cases - sum(tally.unsupported.values())
    judged_words = f"{tally.judged} of {plural(num_drawn, 'case')} judged in {number(tally.seconds)} s"
    differ_words = f", {tally.differed} of them differ" if tally.differed else ""
    num_known = sum(1 for _ in tally.known.elements())
    return f"{judged_words}{differ_words}" + (f"; known failures seen {plural(num_known, 'time')}" if num_known else "")


def reasons(result: GateResult) -> list[str]:
    """Every reason why the gate, or a run of it, could not judge."""
    lines = [cut(reason, 300) for reason in result.complaints]
    for run in result.runs:
        lines += [f"{cut(run.title, 100)}: {cut(reason, 300)}" for reason in (*run.tally.reasons, *run.short)]
    unjudged = [known_failure for known_failure in result.known if known_failure.state == UNJUDGED]
    return lines + [
        f"known failure {clean(known_failure.known.name)}: {cut(known_failure.why, 200)}" for known_failure in unjudged
    ]


def failures(result: GateResult) -> list[tuple[GateRun, Failure]]:
    """Every located failure with its run."""
    return [(run, failure) for run in result.runs for failure in run.tally.failures]


def sentence(failure: Failure) -> str:
    """A failure in one sentence or two."""
    return cut(account(failure.finding, scene_of(failure.verdict, failure.finding)), 600)


def known_line(known_failure: KnownState) -> str:
    """A known failure on one line: what, how often, until when, and why its state is what it is."""
    seen_words = f", seen in {plural(known_failure.cases, 'case')}" if known_failure.cases else ""
    until_words = f", until {known_failure.until}" if known_failure.until else ""
    reason = f": {cut(known_failure.why, 200)}" if known_failure.why else ""
    signature = f"{cut(known_failure.backend, 80)}: {cut(str(known_failure.known.main), 200)}"
    return f"{signature}{seen_words}{until_words} ({known_failure.state}{reason})"


def rerun_command(result: GateResult) -> str:
    """The options that draw the same cases again."""
    seed = "" if result.fresh is None else f" --seed {result.fresh}"
    shard = "" if result.shard[1] == 1 else f" --shard {result.shard[0]}/{result.shard[1]}"
    return f"specverify gate{seed}{shard}"
