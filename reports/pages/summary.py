"""The page of a whole run on the terminal."""

from collections import Counter

from specverify.properties.run_statistics import exactness
from specverify.properties.tally import Failure, InternalFailure, Tally
from specverify.properties.verdict.finding import FINISHED, STAGE_UNKNOWN, Finding
from specverify.reference.trace import Stage
from specverify.reports.bundle import replay_command
from specverify.reports.counts import (
    commit_rows,
    fallback_counts,
    invariant_table,
    judged_rows,
    residue_rows,
    speculation_rows,
    unjudged_rows,
    unrevealed_rows,
    way_rows,
)
from specverify.reports.format import HEADLINES, clean, cut, number, outside, plural
from specverify.reports.layout80 import MARGIN, WIDTH, indent, label_rows, last_lines, plain_text, wrapping_text
from specverify.reports.pages.sampling import evidence_rows
from specverify.reports.pages.terminal import labelled_lines, wrapped_command
from specverify.reports.record import mean_accepted
from specverify.reports.vocabulary import reference_name

EXIT = {
    "agree": "everything that could be compared agrees with {reference}",
    "differ": "the backend does not do what the target alone would do",
    "unjudged": "this is no pass: exit code 3",
}
"""The sentence below the headline of each outcome."""

WRONG = {
    Stage.DRAFTED: "drafted other tokens than its draft proposes",
    Stage.LOWERED: "gave the forward pass a wrong form of the tree: its mask, positions or links",
    Stage.ATTENDED: "computed wrong attention",
    Stage.SCORED: "computed wrong scores for the next token",
    Stage.ACCEPTED: "accepted drafted tokens wrongly",
    Stage.EMITTED: "gave a wrong output",
    Stage.COMMITTED: "left a wrong KV cache behind a step",
}
"""The stage at which a difference began, in words for a reader who knows no stages."""

REPLAYED = 3
"""Most failures whose replay command stands at the end of a page; each failure's own page has it too."""


def opening(tally: Tally, width: int = WIDTH) -> str:
    """The first sentences of a run that differs, before the pages of its failures; empty without failures."""
    if not tally.failures:
        return ""
    name, count, judged = clean(tally.backend), len(tally.failures), _judged_words(tally)
    error = _error_words(tally.failures[0].finding)
    if count > 1:
        sentence = (
            f"{judged}, and {name} went wrong in {count} ways. These are the smallest cases found that show them:"
        )
    elif tally.cases >= tally.wanted > 1 or not tally.judged:
        sentence = (
            f"{judged}. {name} {error} in {tally.differed} of them. This is the smallest case found that shows it:"
        )
    else:
        sentence = f"{judged}, then {name} {error}. This is the smallest case found that shows it:"
    return plain_text(wrapping_text(sentence), width=width)


def _error_words(finding: Finding) -> str:
    """The error of a backend, for a reader who knows none of the project's words."""
    if finding.where.get("side") == STAGE_UNKNOWN or finding.expected == FINISHED:
        return "did not finish a case"
    return WRONG[finding.stage]


def _judged_words(tally: Tally) -> str:
    """The judged cases out of those that the run was to judge."""
    verb = "was" if tally.judged == 1 else "were"
    if tally.open_ended and tally.cases < tally.wanted:
        return f"{plural(tally.judged, 'case')} {verb} judged in the time budget"
    total = max(tally.wanted, tally.cases)
    return f"{tally.judged} of {plural(total, 'case')} {verb} judged"


def _breadth_words(tally: Tally) -> str:
    """How many invariants had a turn, and how much ran in the backend's own attention."""
    words = f", {tally.num_asked} of {plural(len(tally.invariants), 'invariant')} had a turn"
    if tally.native_share is not None:
        words += f", {100 * tally.native_share:.3g} % of attention calls were native"
    return words


def summary_page(tally: Tally, width: int = WIDTH, verbose: bool = False) -> str:
    """The whole run: its outcome, then what was compared, then every failure again and what to do next.

    With `verbose` every invariant has a row of counts, and every fact of the run a line.
    """
    emulated = "  EMULATED, no hardware was judged" if tally.emulated else ""
    regions = outside(tally.excluded)
    excluded = f"  NOT JUDGED: {regions}" if regions else ""
    head = f"{HEADLINES[tally.outcome]}  {clean(tally.backend)}{emulated}{excluded}\n"
    reference = reference_name(tally.against) if tally.against else "the target model, run alone by the oracle"
    sentence = EXIT[tally.outcome].format(reference=reference)
    if tally.cases:
        sentence = f"{_judged_words(tally)}{_breadth_words(tally)}: {sentence}"
    parts = [plain_text(wrapping_text(head), width=width) + labelled_lines(sentence, width)]
    if tally.errors:
        parts.append(label_rows([("error", cut(error, 400)) for error in tally.errors], width))
    parts += [_internal_lines(unanswered, width) for unanswered in tally.internal[:REPLAYED]]
    if verbose and tally.invariants:
        parts.append(indent(invariant_table(tally, width)))
    parts.append(label_rows(_run_facts(tally, verbose), width))
    parts += _ending_lines(tally, width)
    return "\n".join(part.strip("\n") + "\n" for part in parts)


def _internal_lines(unanswered: InternalFailure, width: int) -> str:
    """An exception inside the judge: the invariant, the last lines of the traceback, the case, and how to run it."""
    facts = [("internal", cut(unanswered.line, 600))]
    if unanswered.error.said:
        facts.append(("said", last_lines(unanswered.error.said, width)))
    command = None if unanswered.saved is None else replay_command(unanswered.saved)
    replay_lines = "" if command is None else wrapped_command(command, " " * MARGIN + "replay  ", width)
    return label_rows(facts, width) + replay_lines


def _ending_lines(tally: Tally, width: int) -> list[str]:
    """The last lines: each failure again, and what to do next."""
    failure_rows = [("failure", _failure_line(failure)) for failure in tally.failures]
    if tally.outcome == "differ" and not failure_rows:
        reason = (
            tally.excess_ties
            or tally.excess_evidence
            or tally.excess_error
            or f"{plural(tally.differed, 'case')} differ"
        )
        failure_rows.append(("failure", cut(reason, 400)))
    commands = "".join(
        wrapped_command(command, " " * MARGIN + "next    ", width)
        for command in map(replay_command, tally.failures[:REPLAYED])
        if command is not None
    )
    return [label_rows(failure_rows, width) + commands] if failure_rows else []


def _failure_line(failure: Failure) -> str:
    """One failure on one line: invariant, stage, case and bundle."""
    file = f" ({clean(failure.file)})" if failure.file else ""
    finding = failure.finding
    return f"{clean(finding.invariant)} at stage {finding.stage.word}, case {failure.verdict.case.id}{file}"


def _run_facts(tally: Tally, verbose: bool) -> list[tuple[str, str]]:
    """The labelled facts of a run, in the order in which they are printed."""
    facts = [("cases", _pace(tally))]
    if verbose or tally.shrink_seconds:
        facts.append(("time", _time(tally)))
    facts += [("left out", cut(sentence, 300)) for sentence in tally.excluded]
    facts += speculation_rows(tally)
    stage_rows = unrevealed_rows(tally)
    if not tally.invariants:
        stage_rows = [("not judged", "everything: no invariant was selected")]
    facts += judged_rows(tally, verbose)
    facts += stage_rows or unjudged_rows(tally, verbose)
    mean = mean_accepted(tally)
    if mean is not None:
        steps = plural(sum(tally.accept_lengths.values()), "step")
        means = ", ".join(
            f"{kind} {accepted / count:.2f}" for kind, (count, accepted) in tally.accepted_by_draft.items()
        )
        by_draft = f" ({means})" if means else ""
        facts.append(("accepted", f"{mean:.2f} drafted tokens per step on average, over {steps}{by_draft}"))
    facts += _ties(tally, verbose) + _exactness(tally, verbose)
    if tally.routing_ties:
        facts.append(("routing", f"{plural(len(tally.routing_ties), 'difference')} at a tie between experts (rule T)"))
    if tally.routed.ties:
        ties = f"{plural(tally.routed.ties, 'row')} of {tally.routed.judged} took other experts at a tie (rule T)"
        facts.append(("experts", f"{ties}; {tally.routed.predicted:.3g} predicted"))
    facts += evidence_rows(tally)
    facts += way_rows(tally.fallbacks)
    facts += [
        ("fell back", f"{count} of {tally.attention_calls} attention calls: {clean(reason)}")
        for reason, count in fallback_counts(tally.fallbacks)
    ]
    facts += commit_rows(tally)
    facts += [("declined", f"{plural(count, 'case')}: {clean(reason)}") for reason, count in tally.unsupported.items()]
    facts += residue_rows(tally.residue.values())
    if tally.stopped is not None:
        facts.append(("stopped", f"early: {clean(tally.stopped)}"))
    if tally.against is not None:
        addition = ", and no oracle in its place; tokens are compared with its tokens" if tally.tokens_alone else ""
        facts.append(("reference", f"{reference_name(tally.against)}: the NumPy oracle did not run{addition}"))
    environment = (
        tally.environment if verbose else {name: tally.environment[name] for name in SHORT if name in tally.environment}
    )
    if environment:
        facts.append(("ran on", cut(", ".join(f"{name} {value}" for name, value in environment.items()), 400)))
    if tally.invariants and not verbose:
        facts.append(("all counts", "by --verbose"))
    return facts


SHORT = ("specverify", "torch", "device", "seed", "jobs")
"""The parts of the environment that every page tells."""


def _pace(tally: Tally) -> str:
    """The number of judged cases and the cases per second."""
    if not tally.cases:
        return "none was run"
    pace = f", {number(tally.cases / tally.seconds)} per second" if tally.seconds > 0 else ""
    num_drawn = tally.cases - sum(tally.unsupported.values())
    shortfall = f" ({tally.wanted} wanted)" if tally.wanted and tally.wanted != num_drawn else ""
    return f"{tally.judged} judged / {num_drawn} drawn{shortfall}, in {number(tally.seconds)} s{pace}"


def _time(tally: Tally) -> str:
    """The time inside the backend's forwards, and how many times as long the run took."""
    shrinking = f", and {number(tally.shrink_seconds)} s of shrinking" if tally.shrink_seconds else ""
    if tally.backend_seconds <= 0:
        return f"no time was measured inside the backend's forwards{shrinking}"
    ratio = (tally.seconds - tally.shrink_seconds) / tally.backend_seconds
    backend_words = f"{number(tally.backend_seconds)} s in the backend's forwards"
    return f"{backend_words}; the run took {number(ratio)} times that{shrinking}"


def _exactness(tally: Tally, verbose: bool) -> list[tuple[str, str]]:
    """The errors of plain decode over the run, beside the usual ones of the dtype."""
    if tally.excess_error is not None:
        return [("EXACTNESS", clean(tally.excess_error))]
    errors = [error for error in exactness(tally.control_errors) if error.quantity == "logits" or verbose]
    if not errors:
        return []
    ratios = ", ".join(
        f"{error.times:.2f} in {error.dtype}{' attention' if error.quantity == 'attended' else ''}" for error in errors
    )
    prompts = plural(sum(error.prompts for error in errors if error.quantity == "logits"), "prompt")
    return [("exactness", f"errors of plain decode over the usual ones: {ratios} ({prompts})")]


def _ties(tally: Tally, verbose: bool) -> list[tuple[str, str]]:
    """The number of near-ties, compared with the number that the control run predicts."""
    counts = tally.positions
    if tally.excess_ties is not None:
        return [("TIES", f"{clean(tally.excess_ties)}: that many cannot be chance")]
    facts = []
    drafted_ties = Counter(tie.invariant for tie in tally.ties if tie.invariant.startswith("draft."))
    num_greedy = len(tally.ties) - drafted_ties.total()
    if (num_greedy or verbose) and counts.judged:
        control = f"{number(counts.predicted)} predicted by the control, which had {counts.control_ties} itself"
        spread = f"{plural(counts.judged, 'position')} judged, {counts.near} near a tie"
        facts.append(("ties", f"{num_greedy}; {control} ({spread})"))
    elif num_greedy:
        facts.append(("ties", f"{num_greedy}, without a control to compare with"))
    for invariant, count in drafted_ties.items():
        predicted = number(tally.predicted_ties.get(invariant, 0.0))
        facts.append(
            ("ties", f"{count} of drafted nodes; {predicted} predicted by the draft's control ({clean(invariant)})")
        )
    return facts
