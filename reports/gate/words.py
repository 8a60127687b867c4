"""The sentences of a gate's result, for all of its reports."""

from properties.gate_result import RED, UNJUDGED, GateResult, GateRun, KnownState
from properties.tally import Failure
from reports.format import clean, cut, number, plural
from reports.tree_scene import scene_of
from reports.vocabulary import account

HEADLINE = {"agree": "AGREE", "differ": "DIFFER", "unjudged": "COULD NOT JUDGE"}
"""The headline of each outcome."""


def verdict(result: GateResult) -> str:
    """The gate's findings in one or two sentences."""
    differ = [run for run in result.runs if run.exit_code == 1]
    red = [one for one in result.known if one.state in RED]
    parts = []
    if differ:
        names = ", ".join(clean(run.title) for run in differ)
        does = "does" if len(differ) == 1 else "do"
        parts.append(f"{cut(names, 200)} {does} not do what the target model alone would do.")
    if red:
        has = "is not as the ledger says" if len(red) == 1 else "are not as the ledger says"
        parts.append(f"{plural(len(red), 'known failure')} {has}.")
    if not parts and result.exit_code == 0:
        parts.append("Everything that could be judged does what the target model alone would do.")
    if not parts:
        parts.append("Too little was compared to say yes or no; this is no pass.")
    return " ".join(parts)


def judged_words(run: GateRun) -> str:
    """How many cases of a run were judged, in a sentence that needs no glossary."""
    tally = run.tally
    drawn = tally.cases - sum(tally.unsupported.values())
    told = f"{tally.judged} of {plural(drawn, 'case')} judged in {number(tally.seconds)} s"
    differed = f", {tally.differed} of them differ" if tally.differed else ""
    known = sum(1 for _ in tally.known.elements())
    return f"{told}{differed}" + (f"; known failures seen {plural(known, 'time')}" if known else "")


def reasons(result: GateResult) -> list[str]:
    """Every reason why the gate, or a run of it, could not judge."""
    told = [cut(one, 300) for one in result.complaints]
    for run in result.runs:
        told += [f"{cut(run.title, 100)}: {cut(one, 300)}" for one in (*run.tally.reasons, *run.short)]
    unknown = [one for one in result.known if one.state == UNJUDGED]
    return told + [f"known failure {clean(one.known.name)}: {cut(one.why, 200)}" for one in unknown]


def failures(result: GateResult) -> list[tuple[GateRun, Failure]]:
    """Every located failure with its run."""
    return [(run, failure) for run in result.runs for failure in run.tally.failures]


def sentence(failure: Failure) -> str:
    """A failure in one sentence or two."""
    return cut(account(failure.finding, scene_of(failure.verdict, failure.finding)), 600)


def known_line(one: KnownState) -> str:
    """A known failure on one line: what, how often, until when, and why its state is what it is."""
    seen = f", seen in {plural(one.cases, 'case')}" if one.cases else ""
    until = f", until {one.until}" if one.until else ""
    why = f": {cut(one.why, 200)}" if one.why else ""
    return f"{cut(one.backend, 80)}: {cut(str(one.known.main), 200)}{seen}{until} ({one.state}{why})"


def rerun_command(result: GateResult) -> str:
    """The options that draw the same cases again."""
    seed = "" if result.fresh is None else f" --seed {result.fresh}"
    shard = "" if result.shard[1] == 1 else f" --shard {result.shard[0]}/{result.shard[1]}"
    return f"specverify gate{seed}{shard}"
